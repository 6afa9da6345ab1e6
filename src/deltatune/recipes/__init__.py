"""Recipes: option files for models that many people tune, and other trainers' files in deltatune's words."""
