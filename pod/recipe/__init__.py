"""Recipes: YAML and key=value, read strictly.

schema.py   the schema of the recipes: every key with its default and help
yaml.py     reads and writes their YAML
checks.py   whether a recipe can be run; the closest name
loading.py  from a file and key=value to a recipe; the list of recipes, --help
"""
