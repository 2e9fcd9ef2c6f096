"""Runs: recipes, folders of trained models, and what was measured of them."""
