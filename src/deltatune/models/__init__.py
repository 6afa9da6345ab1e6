"""Everything that knows the models of mlx-lm and mlx-vlm: how they are loaded, split, run and written."""
