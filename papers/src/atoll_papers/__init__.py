"""Atoll studies that reproduce tables and figures from four papers, with their recipes and supporting code."""
