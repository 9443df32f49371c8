"""A GGUF file as a checkpoint: its directory, its tensors, its metadata as a config.json."""
