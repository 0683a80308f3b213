"""Recipes: YAML and key=value, read strictly.

sections.py  every key with its type, bounds, default and help, and what goes together in a section
schema.py    the recipe of these sections, what goes together across them, what a run derives from it
yaml.py      reads and writes their YAML
loading.py   from a file and key=value to a recipe; the list of recipes, --help
errors.py    the error of all these, and the closest name
"""
