"""deltatune: fine-tune hybrid gated-delta models with MLX. Import it before mlx to get a fast BLAS on Linux CPUs."""

from . import blas as _blas

_blas.load()
