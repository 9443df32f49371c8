"""What a run is worth telling: a few lines for people, and a record for machines.

`record` follows generate.schema.json, which a test holds it to.
"""

import platform
import sys
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

import torch

from kog_triton import __version__
from kog_triton.llm import LLM
from kog_triton.outputs import RequestOutput
from kog_triton.sampling.params import SamplingParams

SCHEMA = "kog_triton.generate/1"


def report(output: RequestOutput, params: SamplingParams, max_context: int, verbose: bool) -> str:
    """What stderr says behind a text: two lines, or all figures, the last by which parameters it was made in a context
    of so many positions."""
    m = output.metrics
    by = ", ".join(effective(params, m.seed, max_context - m.prompt_tokens))
    return f"{stats(output) if verbose else summary(output)}\n{by}; backend {m.backend}"


def summary(output: RequestOutput) -> str:
    """One line for people: how many tokens, and how fast."""
    m, done = output.metrics, output.outputs[0]
    of = "" if len(output.outputs) == 1 else f"sample 1 of {len(output.outputs)}: "
    rate = "" if m.decode_tokens_per_s is None else f" at {m.decode_tokens_per_s:,.1f} tokens/s"
    first = "" if m.ttft_s is None else f", first after {m.ttft_s * 1e3:,.0f} ms"
    cached = f" ({m.cached_tokens} cached)" if m.cached_tokens else ""
    return f"{of}{m.output_tokens} tokens{rate}{first}; prompt {m.prompt_tokens}{cached}; {done.finish_reason}"


def effective(params: SamplingParams, seed: int, room: int) -> list[str]:
    """The parameters that a request ran by: temperature and seed, and what is not vLLM's default; of max_tokens as many
    as the context had `room` for."""
    said = ["temperature 0"] if params.greedy else [f"temperature {params.temperature:g}", f"seed {seed}"]
    for field in fields(params):
        value = getattr(params, field.name)
        skip = ("temperature", "seed", "max_tokens", "structured_outputs")
        # of a greedy request no cut says anything
        cuts = ("top_p", "top_k", "min_p") if params.greedy else ()
        if field.name not in (*skip, *cuts) and value != field.default and value not in ((), None):
            said.append(f"{field.name} {value}")
    if params.max_tokens is not None:
        cut = f" (the context has no room for {params.max_tokens})" if params.max_tokens > room else ""
        said.append(f"max_tokens {min(params.max_tokens, room)}{cut}")
    if params.structured_outputs is not None:
        said.append(f"shape by {params.structured_outputs.constraint[0]}")
    return said


def stats(output: RequestOutput) -> str:
    """The figures of one output's first sample; a figure that has no meaning here is shown as -."""
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
            f"end     {done.finish_reason}; {m.total_s:.2f} s",
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
