"""The families of text models that the fixtures `tiny_checkpoint` and `tiny_model` build."""

HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "olmo_hybrid", "bailing", "kimi_k3"]
FAMILIES = [*HYBRIDS, "qwen3", "gemma3_text"]
