"""Checkpoints of other programs, in and out: Hugging Face safetensors and GGUF."""
