"""Turns JSONL files and Hugging Face data sets into tokenised examples, and examples into batches of few shapes."""

from .batches.batch import Batch, bucket_widths, collate, pack
from .batches.order import BatchOrder
from .batches.show import show_batch
from .datasets import load_datasets
from .example import Example, Splits

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
