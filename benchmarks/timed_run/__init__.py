"""A real run whose orders are timed: see `__main__`."""
