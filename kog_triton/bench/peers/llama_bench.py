"""llama.cpp's llama-bench, if it is on the PATH and a GGUF file of the same model is given.

It times itself and shows no tokens: its text is not checked, and a record says so. That the file holds
this model is judged by its number of parameters and its bytes, which also tell a quantized one. Its
definition of tg differs in one point: it starts from any token at the given depth.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kog_triton.bench.engines import Run
from kog_triton.bench.peers import Setting
from kog_triton.errors import RunError
from kog_triton.model.spec import ModelSpec

TIMEOUT_S = 600
# Of parameters and of bytes: llama.cpp counts tables for RoPE too, and keeps norms in float32.
LIKENESS = 0.01
FIELDS = ("avg_ns", "build_commit", "backends", "model_type", "model_n_params", "model_size")


class LlamaBench:
    """Every token of a run gets an equal share of the time that llama-bench reports."""

    name = "llama-bench"
    checks_text = False
    ran = "this adapter has run on a CPU only, with a tiny model"

    @staticmethod
    def absent(setting: Setting) -> str:
        if shutil.which("llama-bench") is None:
            return "llama-bench is not on the PATH"
        return "" if setting.gguf else "needs --gguf FILE, this model converted for llama.cpp"

    def __init__(self, setting: Setting) -> None:
        assert setting.gguf is not None, "absent() looked"
        self._gguf = setting.gguf
        self.spec = setting.weights.spec
        seen = self._ask(n_prompt=1, n_gen=0, depth=0)
        check_model(seen, self.spec)
        self.version = "llama.cpp {build_commit} ({backends}), {model_type}".format(**seen)
        self._weight_bytes = int(seen["model_size"])

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        raise RunError("llama-bench gives no logits")

    def generate(self, prompt: Sequence[int], count: int) -> Run:
        prefill = self._ask(n_prompt=len(prompt), n_gen=0, depth=0)
        run = Run(time.perf_counter())
        at = run.submitted + prefill["avg_ns"] / 1e9
        step = 0.0
        if count > 1:
            decode = self._ask(n_prompt=0, n_gen=count - 1, depth=len(prompt))
            step = decode["avg_ns"] / 1e9 / (count - 1)
        run.arrivals = [at + step * i for i in range(count)]
        run.tokens = [-1] * count
        return run

    def _ask(self, n_prompt: int, n_gen: int, depth: int) -> dict[str, Any]:
        done = subprocess.run(
            command(self._gguf, n_prompt, n_gen, depth), capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode:
            raise RunError(f"llama-bench failed: {done.stderr.strip()[-200:]}")
        return only_result(done.stdout)

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": self._weight_bytes}

    def close(self) -> None:
        pass


def command(gguf: Path, n_prompt: int, n_gen: int, depth: int) -> list[str]:
    sizes = ["-p", str(n_prompt), "-n", str(n_gen), "-d", str(depth)]
    return ["llama-bench", "-m", str(gguf), *sizes, "-ngl", "99", "-r", "1", "-o", "json"]


def only_result(text: str) -> dict[str, Any]:
    """The one test of llama-bench's JSON list; RunError if it is anything else."""
    try:
        results = json.loads(text)
    except ValueError as error:
        raise RunError(f"llama-bench printed no JSON: {text[:80]!r}") from error
    one = isinstance(results, list) and len(results) == 1 and isinstance(results[0], dict)
    missing = [name for name in FIELDS if name not in results[0]] if one else FIELDS
    if missing:
        raise RunError(f"llama-bench did not print one test with {missing[0]!r}")
    result: dict[str, Any] = results[0]
    return result


def check_model(result: dict[str, Any], spec: ModelSpec) -> None:
    """RunError if the file holds another model than the others run, or one of other types."""
    size = spec.num_parameters * spec.dtype.bytes
    for name, want in (("model_n_params", spec.num_parameters), ("model_size", size)):
        if abs(result[name] - want) > LIKENESS * want:
            raise RunError(
                f"the GGUF file is another model ({result['model_type']}): its {name} is "
                f"{result[name]}, and this model's {want}; convert it as {spec.dtype.name.lower()}"
            )
