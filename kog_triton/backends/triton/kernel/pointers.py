"""What the megakernel is given: pointers and a few scalars. Sizes and offsets are in `Tiles`.

Three groups: what a model is, what blocks exchange within a launch, and what slots keep from launch to launch.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl


class Pointers(NamedTuple):
    """One argument of a kernel; `slots.py` says what a slot's words mean, `words.py` those of `error`."""

    # ---- the model ----
    weights: Any  # int32: layers, then the head, in tiles
    half_weights: Any  # the same memory, in the model's 16-bit type
    embed: Any  # int32 [vocab, hidden / 2, or words of an `EmbeddingRow`]
    half_embed: Any  # the same memory
    gains: Any  # float32 [2 * layers + 1, lanes or 1, 2 planes, hidden / 2]
    biases: Any  # float32: a layer's qkv, o, gate_up, down rows of every lane
    qk_gains: Any  # float32 [layers, 2, head_dim]
    rope: Any  # float32 [positions, 2, head_dim / 2]
    windows: Any  # int32 [layers]
    reduces: Any  # int32 [2, layers]
    # ---- a launch ----
    words: Any  # int32 [columns, total_words], zero at launch
    wide: Any  # int64: the same memory
    fences: Any  # int32 [blocks, 32]
    error: Any  # int32 [1 + blocks, RECORD]: the waits that expired (words.py)
    chunk: Any  # float32: a chunk's vectors (columns.py)
    half_chunk: Any  # the model's 16-bit type; columns that pad a width are zero
    profile: Any  # int64 [layer runs, blocks, 16]: see POINTS of layer, shared_step
    # ---- slots ----
    slot_order: Any  # int32 [1 + slots]: how many slots to serve, and which, round robin
    requests: Any  # int32 [slots, capacity]: backends/request_words.py
    states: Any  # int32 [slots, blocks, STATE_WORDS]: a block reads and writes its own
    tokens: Any  # int32 [slots, positions]: the prompt, then the output
    marks: Any  # int32 [slots, vocab]: how often an id is in the output, SEEN, END (edits.py)
    bias: Any  # float32 [slots, vocab]: what is added to a logit; -inf where an id is not allowed
    bans: Any  # int32 [slots, vocab]: the last token for which a bad word banned the id
    kv: Any  # [slots, layers, lanes, kv_heads, 2, positions, head_dim]
    # float32 [columns, vocab]; with ALL_LOGITS a row for every position from the first on
    logits: Any
    mailbox: Any  # int64 [slots, mailbox_words], mapped
    # ---- scalars ----
    limit: Any  # how long a wait may last, in units of 1,024 ns; in the interpreter its tries


# What every function is passed: which block this is, of which lane, which of the lane's blocks, and the pointers. S is
# beside it: Triton gives no variable a tuple that holds it, and its aggregates hide it from code that is interpreted.
Given = namedtuple("Given", ("block", "lane", "group_index", *Pointers._fields))


@triton.jit
def given(p, S: tl.constexpr):
    """The pointers of a launch, and what block this is."""
    block = tl.program_id(0)
    return Given(block, block // S.group, block % S.group, *p)
