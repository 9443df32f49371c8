"""Measure, and read every figure in a terminal of 80 columns."""

import os
import re
import subprocess
import sys

argv = ["bench", "decode", "--max-tokens", "4", "--rounds", "1", "--warmup", "1", "--depth", "4"]
done = subprocess.run(
    [sys.executable, "-m", "kog_triton", *argv],
    env=os.environ | {"COLUMNS": "80"}, capture_output=True, text=True, check=True,
)  # fmt: skip
assert "…" not in done.stdout, done.stdout
heads = [line for line in done.stdout.splitlines() if re.search(r"tokens/s|p99 us|TTFT ms", line)]
table = [line for line in done.stdout.splitlines() if line.startswith(" ")]
assert heads and max(map(len, table)) <= 80, done.stdout
rows = " ".join(line for line in table if line.startswith(" reference"))
assert len(re.findall(r"\d+\.\d+", rows)) >= 8, done.stdout
