"""What a run is worth telling: a few lines for people, and a record for machines.

`record` follows generate.schema.json, which a test holds it to.
"""

import platform
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from kog_triton import __version__
from kog_triton.llm import LLM
from kog_triton.outputs import RequestOutput
from kog_triton.sampling.params import SamplingParams

SCHEMA = "kog_triton.generate/1"


def stats(output: RequestOutput) -> str:
    """The figures of one output; a figure that has no meaning here is shown as -."""
    m, done = output.metrics, output.outputs[0]
    mbu = f"MBU {_number(m.mbu, 100)} % of {m.peak}" if m.mbu is not None else "MBU unknown"
    by = "by the backend's stamps" if m.clock == "device" else "as they arrived"
    between = f"p50 {_number(m.itl_p50_us, 1e-3)} ms, p99 {_number(m.itl_p99_us, 1e-3)} ms"
    return "\n".join(
        (
            f"prompt  {m.prompt_tokens} tokens, {m.cached_tokens} of them cached; "
            f"{_number(m.prompt_tokens_per_s)} tokens/s; first token after "
            f"{_number(m.ttft_s, 1e3)} ms",
            f"output  {m.output_tokens} tokens, {_number(m.decode_tokens_per_s)} tokens/s without "
            f"the first; between tokens {between}, {by}",
            f"memory  {m.bytes_per_token / 1e6:,.1f} MB a token, {_number(m.gb_per_s)} GB/s, "
            f"{mbu}; KV depth {m.kv_depth_start} to {m.kv_depth_end}",
            f"end     {done.finish_reason}; seed {m.seed}; backend {m.backend}; {m.total_s:.2f} s",
        )
    )


def record(llm: LLM, params: SamplingParams, output: RequestOutput) -> dict[str, Any]:
    """One run as JSON: what was asked, of which model, where, and what came back."""
    spec = llm.engine.backend.spec
    asked = asdict(params)
    for resolved in ("end_token_ids", "bad_words_token_ids"):
        del asked[resolved]
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "path": str(llm.checkpoint.folder),
            "family": spec.family,
            "num_parameters": spec.num_parameters,
            "dtype": spec.dtype.name.lower(),
            "max_context": llm.engine.max_context,
        },
        "backend": {
            "name": llm.choice.name,
            "reason": llm.choice.reason,
            "options": asdict(llm.engine.backend.options),
            "memory_bytes": llm.engine.backend.memory_bytes(),
        },
        "environment": {
            "kog_triton": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "argv": sys.argv[1:],
        },
        "load_s": llm.load_s,
        "params": asked | {"seed": output.metrics.seed},
        "output": asdict(output),
    }


def _number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.2f}"
