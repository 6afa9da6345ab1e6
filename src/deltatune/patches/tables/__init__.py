"""The patches themselves: one table of records for each package, or each kind of operation, that they change."""

# The oldest mlx-vlm that is served: that of the extra `vision` in pyproject.toml.
LOWEST_MLX_VLM = "0.5"
