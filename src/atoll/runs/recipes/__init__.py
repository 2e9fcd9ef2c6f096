"""Recipes that come with Atoll, one YAML file each; the first line of a file describes it."""
