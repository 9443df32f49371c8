"""The kernel's stamps as a Recording: one request, once by the plain kernel and once by one that takes stamps.

The kernel's rows are points of a layer (names.POINTS), the head's behind the layers'. A point that a block
does not pass keeps what an older token left there: those are told by their time.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.layout.names import POINTS
from kog_triton.backends.cuda.rank_memory import Ranks
from kog_triton.backends.mailbox import Request
from kog_triton.backends.recording import HEAD, Recording, Span
from kog_triton.backends.request_words import encode
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.lowering import layer_matrices, matrix_stages

WAITS = ("attention_qkv", "o_proj_input", "attention_out", "down_proj_input", "mlp_out")
# The head's points, by the names that they have in a layer.
HEAD_POINTS = (("qkv_proj", Span("lm_head", HEAD)), ("attention", Span("argmax", HEAD, True)))
LOW_HALF = 0xFFFFFFFF


def record(
    layout: Layout, ranks: Ranks, prompt: Sequence[int], launches: Sequence[Callable[[], None]]
) -> list[Recording]:
    """Run the request in slot 0 of all ranks: by the plain kernel, then by the one with stamps. A recording a rank.

    launches  start either kernel on slot 0, wait for its end and raise what went wrong
    """
    tokens, vocab_size = layout.profile_tokens, layout.lowering.schedule.spec.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
    request = Request(0, tuple(prompt), params, seed=0, max_tokens=tokens)
    steps_ns = []
    for launch in launches:
        ranks.write_request(0, encode(request, vocab_size), request.prompt, 0)
        launch()
        steps_ns.append(np.diff(ranks.first.outbox[0, :tokens, 1].numpy()))
    return [
        recording_of(layout, m.profile.cpu().numpy(), m.clocks.cpu().numpy(), steps_ns[0].copy()) for m in ranks.each
    ]


def recording_of(layout: Layout, stamps: np.ndarray, clocks: np.ndarray, plain_step_ns: np.ndarray) -> Recording:
    """Of one rank; stamps and clocks as in Memory, whose rows of tokens rotate."""
    layers = layout.lowering.schedule.spec.num_layers
    order = np.argsort(stamps[:, 0, 0, 0, 0, 0])
    stamps, clocks = stamps[order], np.concatenate([clocks[order], clocks[-1:]])
    ticks = stamps[..., 0].copy()
    body = ticks[:, :, :, :layers]
    body[(body < body[..., :1]) | (body > body[..., -1:])] = 0
    spans, places = [], []
    for layer in range(layers):
        for at, name in enumerate(POINTS):
            if name == "start" and layer:
                continue  # where the layer before has ended
            spans.append(Span("next_token" if name == "start" else name, layer, name in WAITS))
            places.append((layer, at))
    for name, span in HEAD_POINTS:
        spans.append(span)
        places.append((layers, POINTS.index(name)))
    rows, points = np.array(places).T
    words = stamps[:, :, :, rows, points, 1]
    peers = stamps[:, :, :, rows, points, 2] if stamps.shape[-1] > 2 else np.zeros_like(words)
    return Recording(
        spans=tuple(spans),
        ticks=ticks[:, :, :, rows, points],
        weight_ticks=words & LOW_HALF,
        ring_slots_asked=words >> 32,
        peer_ticks=peers,
        clocks=clocks,
        stage_bytes=stage_bytes(layout),
        plain_step_ns=plain_step_ns,
    )


def stage_bytes(layout: Layout) -> dict[str, float]:
    """Bytes that all blocks read in one run of a matrix stage, padding included; a mean over layers."""
    lo = layout.lowering
    out = {}
    layer = layer_matrices(lo.schedule)
    for stage in matrix_stages(lo.schedule):
        runs = lo.schedule.spec.num_layers if stage in layer else 1
        out[stage.name] = sum(lo.stage_bytes(stage, layer) for layer in range(runs)) / runs
    return out
