"""Benchmarks: `python -m benchmarks.NAME --json FILE --check`; see README.md."""
