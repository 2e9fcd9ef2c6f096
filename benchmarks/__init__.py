"""Measured ratios: `make bench` runs all of them in one process after the other and prints one table."""
