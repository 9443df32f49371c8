"""The benchmark commands, their records and their tables."""
