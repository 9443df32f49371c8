"""Pure Python and torch on a CPU: no Triton, no compiler. `pytest -m host` runs these alone."""
