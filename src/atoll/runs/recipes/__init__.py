"""Recipes that come with Atoll, one YAML file each; the first line of each says what it is."""
