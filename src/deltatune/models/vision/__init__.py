"""Vision-language models of mlx-vlm: loaded, split for training, and run."""
