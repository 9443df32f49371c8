"""What runs in Python: memory, launches, serving. Imports the kernel, which imports nothing of it."""
