"""Emulated devices under the real runtime: see `benchmarks.emulated.__main__`."""
