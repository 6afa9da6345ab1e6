"""Data: JSONL files and Hugging Face data sets to examples, and examples to batches of few shapes."""

from .batch import Batch, bucket_widths, collate
from .example import Example, Splits
from .order import BatchOrder
from .packing import pack

__all__ = ["Batch", "BatchOrder", "Example", "Splits", "bucket_widths", "collate", "pack"]
