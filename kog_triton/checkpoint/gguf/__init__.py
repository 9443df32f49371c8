"""A GGUF file as a checkpoint: its directory (file.py), its tensors (tensors.py), its metadata as a config.json (config.py)."""
