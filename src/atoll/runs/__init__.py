"""Runs: recipes, and folders of trained models with their results."""
