"""Hands a trained adapter to other programs: as a PEFT adapter, a merged checkpoint, a GGUF file, on the hub."""
