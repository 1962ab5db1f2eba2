"""Recipes: configs that come with the package, each with the tasks and tools it names."""
