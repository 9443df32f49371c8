"""What a GPU that this project never ran on must pass, on a small model (model/small.py): every stage of a backend
against the reference, tokens against the definition of sampling, and requests of all its kernels (request_check.py).
"""

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch

from kog_triton.backends import STAGE_READS, Backend, BackendOptions, find_backend
from kog_triton.backends.device import gpu_of
from kog_triton.backends.mailbox import Request
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError
from kog_triton.model.small import CACHED, CONTEXT, small_model
from kog_triton.model.spec import Head, ModelSpec, Reduce
from kog_triton.request_check import CHOICES, CHOSEN, check_requests, sampled, serve
from kog_triton.sampling import History, sample

log = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]
TOKENS = 2
# Root mean square of a stage's error over that of what is expected. On an H200 and on a CPU 16 bits cost 6.0e-3 at most
# (tests/lib/conformance_backends.py); one wrong row of the widest stage costs more than this.
LIMIT = 0.02
PROMPT = (7, 300, 1000)


def check_new_gpu(backend: type[Backend], spec: ModelSpec, options: BackendOptions) -> None:
    """Where the backend would run on a GPU that this project never ran on, every stage and kernel of it. DeviceError
    if one is wrong; the log says what was tested."""
    if "cpu" in getattr(backend, "vendors", ("cpu",)) or not torch.cuda.is_available():
        return
    gpu = gpu_of(torch.device("cuda"))
    if gpu is None or gpu.proven:
        return
    where = f"{gpu.name}, {gpu.share}" if gpu.share else gpu.name
    log.warning("%s: this project has never run on it: every stage and kernel is tested", where)
    begun = time.perf_counter()
    small, gpus = small_model(spec, options.dtype, options.num_gpus), options.num_gpus
    count = check_stages(backend, small, where)
    of_all = where if gpus == 1 else f"{gpus} x {where}"
    kernels = check_requests(backend, small, of_all, options.num_slots, gpus)
    log.warning(
        "%s: %s agree with the reference, in %.1f s",
        where,
        ", ".join([f"{count} stages and sampling", *kernels]),
        time.perf_counter() - begun,
    )


def check_stages(backend: type[Backend], spec: ModelSpec, where: str) -> int:
    """How many runs of stages agree with the reference; DeviceError with the first that does not, or with the first
    token that the definition of sampling would not have chosen."""
    weights = RandomWeights(spec)
    options = BackendOptions(max_context=CONTEXT, prefill="decode")
    reference = find_backend("reference")(weights, BackendOptions(max_context=CONTEXT))
    ours, count = backend(weights, options), 0
    try:
        for stage, layer in _runs(spec):
            state = stage_inputs(spec, stage, layer, TOKENS, CACHED)
            expected = reference.run_stage(stage, layer, state)
            got = ours.run_stage(stage, layer, state)
            for name, want in expected.items():
                error = got[name].cpu().float() - want
                off = float(error.square().mean().sqrt() / want.square().mean().sqrt())
                if not off < LIMIT:
                    raise DeviceError(
                        f"backend {backend.name} computes {stage} wrong on {where} ({name} is off by {off:.2g} in "
                        f"layer {layer} of a small model): choose another backend, and report this"
                    )
            count += 1
        for rules in CHOICES:
            _check_choice(ours, rules, where)
    finally:
        ours.close()
    return count


def _check_choice(backend: Backend, rules: dict[str, Any], where: str) -> None:
    """Each token of a request is the definition's, by the backend's own logits."""
    params = sampled(rules)
    (steps,) = serve(backend, Request(0, PROMPT, params, 5, CHOSEN))
    tokens = [step.token for step in steps]
    logits, history = backend.forward_logits([*PROMPT, *tokens[:-1]]), History(PROMPT)
    for position, token in enumerate(tokens, len(PROMPT)):
        right = sample(logits[position - 1], params, history, position).token
        if token != right:
            raise DeviceError(
                f"backend {backend.name} chooses token {token} where {right} is right on {where} "
                f"(sampling by {rules}): choose another backend, and report this"
            )
        history.append(token)


def mixes(spec: ModelSpec) -> bool:
    """Whether lanes meet before the head."""
    return spec.num_lanes > 1 and spec.head is not Head.VOCAB_PARALLEL


def stage_inputs(spec: ModelSpec, stage: str, layer: int, tokens: int, cached: int) -> Tensors:
    """Random tensors that the stage reads, by name (backends.STAGE_READS), the same for a layer each time."""
    g = torch.Generator().manual_seed(layer)
    s, d = spec.num_lanes, spec.head_dim
    heads, kv = spec.num_heads // s, spec.num_kv_heads // s
    shapes = {
        "x": (s, tokens, spec.hidden_size),
        "q": (s, tokens, heads, d),
        "k": (s, tokens, kv, d),
        "v": (s, tokens, kv, d),
        "keys": (s, kv, cached, d),
        "values": (s, kv, cached, d),
        "attention": (s, tokens, heads * d),
        "delayed": (s, tokens, spec.hidden_size),
        "mlp": (s, tokens, spec.intermediate_size // s),
        "y": (1, tokens, spec.hidden_size * (s if spec.head is Head.CONCAT else 1)),
    }
    state = {name: torch.randn(shapes[name], generator=g) for name in STAGE_READS[stage] if name in shapes}
    if stage == "embed":
        return {"token_ids": torch.randint(spec.vocab_size, (tokens,), generator=g)}
    if "delayed" in state:
        how = (spec.reduce_attention if stage == "o_proj" else spec.reduce_mlp)[layer]
        if how is not Reduce.DELAYED or s == 1:
            del state["delayed"]
    if stage == "lm_head":
        del state["x" if mixes(spec) else "y"]
    return state


def _runs(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Every stage in every layer that it has."""
    for stage in STAGE_READS:
        if stage == "mix" and not mixes(spec):
            continue
        for layer in range(1 if stage in ("embed", "mix", "lm_head") else spec.num_layers):
            yield stage, layer
