"""Benchmarks: `make bench` runs all of them one after another and prints one table of ratios."""
