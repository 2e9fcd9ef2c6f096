"""Built-in recipes, one YAML file each; the first line of each file is its description."""
