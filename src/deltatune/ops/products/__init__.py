"""The products of linear layers: LoRA's narrow ones, those of layers that read one input, and quantised ones."""
