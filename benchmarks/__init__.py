"""Measurements behind the numbers in the documentation. Run one with ``python -m benchmarks.NAME``."""
