"""Recipes of the papers' size, and those that only studies use."""
