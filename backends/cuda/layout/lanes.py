"""What lanes send each other in a kernel of several token columns.

A module's output goes to all lanes in layers that are reduced NOW, and `delay` layers ahead of those that are
DELAYED: by one word a value, which serves both. No other output is sent, for a word that nobody reads could
land after the one that follows it. Outputs are numbered over the steps of a launch: the number says buffer and
phase (include/kog/columns/lanes.h).
"""

from collections.abc import Sequence

from kog_triton.model.spec import ModelSpec, Reduce


def sends_before(reduces: Sequence[Reduce], delay: int) -> list[int]:
    """Outputs sent in a step before each layer, then those of all layers."""
    counts = [0]
    for layer in range(len(reduces)):
        counts.append(counts[-1] + _is_sent(reduces, delay, layer))
    return counts


def num_buffers(reduces: Sequence[Reduce], delay: int) -> int:
    """The fewest buffers that rotate without a lane overwriting what another has not read; 0 if nothing is sent.

    Before a lane sends layer n's output it has read what it needs of the others for all layers before n, and
    for n itself if that is DELAYED. Nothing else holds lanes together: a prompt's steps have no head.
    """
    layers = len(reduces)
    sent = [n for n in range(4 * layers) if _is_sent(reduces, delay, n % layers)]

    def known(n: int) -> int:
        """The latest output of another lane that a lane has read before it sends its own of n; -1 if none."""
        hows = [reduces[i % layers] for i in range(n + 1)]
        now = [i for i, how in enumerate(hows[:-1]) if how is Reduce.NOW]
        late = [i - delay for i, how in enumerate(hows) if how is Reduce.DELAYED]
        return max([*now, *late], default=-1)

    def is_read(lost: int, n: int) -> bool:
        """Whether all lanes have read an output once one of them is about to send that of n."""
        behind = known(n)
        later = lost % layers + delay < layers and (
            reduces[lost % layers + delay] is Reduce.DELAYED
        )
        return lost + delay <= behind if later else lost < behind

    return next(
        b for b in range(len(sent) + 1) if all(map(is_read, sent, sent[b:])) and (b or not sent)
    )


def shares(spec: ModelSpec) -> bool:
    """Whether any output goes to another lane."""
    return spec.num_lanes > 1 and any(
        how is not Reduce.OWN for how in spec.reduce_attention + spec.reduce_mlp
    )


def _is_sent(reduces: Sequence[Reduce], delay: int, layer: int) -> bool:
    later = layer + delay
    return reduces[layer] is Reduce.NOW or (
        later < len(reduces) and reduces[later] is Reduce.DELAYED
    )
