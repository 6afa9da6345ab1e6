"""Recipes: option files for models that many people tune."""
