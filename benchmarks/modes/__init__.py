"""Jobs for `flowtrain bench` whose two sides have loads of a known ratio, and what its records become in the docs."""
