"""Turns JSONL files and Hugging Face data sets into tokenised examples, and examples into batches of few shapes."""

from .batch import Batch, bucket_widths, collate
from .datasets import load_datasets
from .example import Example, Splits
from .order import BatchOrder
from .packing import pack
from .show import show_batch

__all__ = [
    "Batch",
    "BatchOrder",
    "Example",
    "Splits",
    "bucket_widths",
    "collate",
    "load_datasets",
    "pack",
    "show_batch",
]
