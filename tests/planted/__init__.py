"""The faults of tests/faults.py, a file a room of the house."""
