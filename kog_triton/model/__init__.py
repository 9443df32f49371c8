"""What a model is: its spec, the families that read a checkpoint's configuration, and the loading of its weights."""
