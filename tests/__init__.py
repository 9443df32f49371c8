"""The tests, in a folder each kind; lib/ has what they share, and imports no test."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
