"""The records of what is replaced: a table for each package, or for each kind of operation in several packages."""

# The oldest mlx-vlm that deltatune works with. pyproject.toml asks for it in the extra `vision`.
LOWEST_MLX_VLM = "0.5"
