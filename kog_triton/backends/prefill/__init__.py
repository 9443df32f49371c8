"""Prompts through a library's matrix products, and the moves of weights and numbers that this takes."""
