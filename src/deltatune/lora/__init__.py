"""Adapters: the LoRA and DoRA modules, the choice of where they go, and how they are saved, loaded and merged."""

from .adapter import Adapter
from .adapter_files import load_adapter_weights, load_adapters, save_adapters
from .convert import ConversionReport, adapters, convert_to_lora, merge
from .experts import LoRASwitchLinear
from .linear import DoRAEmbedding, DoRALinear, LoRAEmbedding, LoRALinear

__all__ = [
    "Adapter",
    "ConversionReport",
    "DoRAEmbedding",
    "DoRALinear",
    "LoRAEmbedding",
    "LoRALinear",
    "LoRASwitchLinear",
    "adapters",
    "convert_to_lora",
    "load_adapter_weights",
    "load_adapters",
    "merge",
    "save_adapters",
]
