"""Mutants of the HIP kernel's machine code (hip_mutants.py) that live, by place, and why no run can tell them.

Of several instructions of one place "#2 of 3" says which; a place alone is each of them. What many cases have stands in
OF_ONE and OF_COLUMNS, of kernels of one token and of several.
"""

SUMS_BEHIND = "a wave's part of a sum of squares is read behind the next barrier, ahead of which all wait for LDS again"
OF_MANY = "up to 64 blocks are one wave's (of 'many' caught)"
LAST_OF_PLACE = "the block's number is read behind the kernel's first barrier, which comes next, behind a wait for LDS"
STEPS = "a step's barriers stand before the next call"
CURSORS = (
    "cursors are stored and spread by the same threads, whose wave's accesses of LDS come in order; others read them"
    " behind the next barrier, ahead of which all wait for LDS"
)
ALONE = "each block writes the output's ids, all the same, and reads its own"
NO_ROWS = "of a block without rows, which reads nothing that it staged"
GAINS = "it leaves gains, and words that tell of themselves, on their way: whoever needs them waits again"
TOP_P = "a wait for lgkmcnt but one in run_head > choose > check_argmax > gather_top_p_check > sync_consumers"
LEAVES_HOSTS = (
    "it leaves the host's word in flight, which nobody reads ahead of the next barrier, where all wait for LDS; of more"
    " than 64 blocks another wave's best id, too, which is read there where two keys are equal"
)
ENTRY = {
    "no barrier in sync_consumers #1 of 2": "behind init_block, whose words are read behind find_place's own barriers",
    "no barrier in find_place > sync_consumers #1 of 3": OF_MANY,
    "no barrier in find_place > sync_consumers #3 of 3": LAST_OF_PLACE,
    "no barrier in any_consumer > sync_consumers #2 of 2": STEPS,
}
ENTRY_OF_RANKS = {
    "no wait for lgkmcnt in find_place > sync_consumers #1 of 3": OF_MANY,
    "a wait for lgkmcnt but one in find_place > sync_consumers #1 of 3": OF_MANY,
    "no wait for lgkmcnt in find_place > sync_consumers #3 of 3": LAST_OF_PLACE,
}
CHOICE = {
    "no barrier in run_head > choose > check_argmax > gather_shares > sync_consumers #1 of 2": "up to 64 blocks' shares"
    " are gathered by one wave, the one that has read the sums (of 'many', whose two gather, caught)",
    "no barrier in run_head > choose > publish_best > sync_consumers #2 of 3": "the sums' 16 words lie below those that"
    " other waves write (2 * kMostLogprobs up)",
    "no barrier in run_head > choose > publish_best > sync_consumers #3 of 3": "choose has a barrier before the scratch"
    " is used again",
    "no barrier in run_head > choose > publish_ahead > sync_consumers": "as publish_best's second",
    "global_store_dword of a narrower scope in run_head > choose > edit_logits > store_relaxed > store_scoped": ALONE,
    "global_load_dword of a narrower scope in run_head > choose > edit_logits > completes > load_relaxed > load_scoped":
    ALONE,
}  # fmt: skip
OF_ONE = ENTRY | CHOICE | {
    f"no wait for lgkmcnt in {stage} > stage_x > sync_staged > sync_consumers": SUMS_BEHIND
    for stage in ("run_head", "run_layers_between > qkv_proj", "run_layers_between > run_layer > gate_up_proj")
}  # fmt: skip
QKV_ROWS = "run_layers_between > qkv_proj > qkv_rows > normed_rows > run_rows > sync_consumers"
JOINED = "run_layers_between > run_layer > attention > join_splits > join_many > sync_consumers"
THREE = "the last rows of the head, run_head and choose have a barrier each ahead of what choose reads: two are enough"
DRAINED = "run_layers_between > run_layer > join_attention_out > drain_stores"
LEAVES_WEIGHTS = "what it would leave unfinished on any way (`kept`): weights, and what a wait that expires tells"
NO_ROW_OF_CACHE = "what it would leave unfinished on any way (`kept`): words that tell of themselves, and hints"
JOIN = "run_layer > attend > attention > join_kv_task"
SAME_THREAD = "whoever puts a sum of all lanes has joined it, the same thread: LDS takes a wave's in order"
ROWS_OF_HEAD = "run_head > head_rows > run_rows > sync_consumers"
DRAINS = {
    "no wait for vmcnt in run_layer > down_proj > drain_stores": NO_ROW_OF_CACHE,
    "a wait for vmcnt but one in run_layer > down_proj > drain_stores": NO_ROW_OF_CACHE,
}
HALF = "no wait for lgkmcnt in run_layer > stage_half > stage_half_for > stage_streams > sync_staged > sync_consumers"
STAGED = {
    f"{HALF} #1 of 2": SUMS_BEHIND,
    "no wait for lgkmcnt in run_head > head_operands > stage_head > stage_streams > sync_staged > sync_consumers":
    SUMS_BEHIND,
}  # fmt: skip
CHOOSE = "no barrier in run_head > choose > sync_consumers"
TOKEN_OF_COLUMNS = {"no barrier in run_head > sync_consumers #2 of 2": THREE, f"{CHOOSE} #1 of 2": THREE}
OF_COLUMNS = ENTRY | CHOICE | DRAINS | STAGED | TOKEN_OF_COLUMNS
JOINS = {
    f"no barrier in {JOIN} > sync_consumers": "join_many begins with one, and o_proj's sums lie elsewhere",
    f"no barrier in {JOIN} > join_many > sync_consumers": "finish_split has one behind the last look at what was"
    " merged; behind a head that the block walked alone, in one layer, this one is needed ('columns of heads')",
}
# Of a case alone, beside what its kernel's kind has.
OF_CASE = {
    "split": {
        f"no barrier in {JOINED}": "sums go into shared memory only where there are more than kJoined splits: not with"
        " 8 blocks (of 'heads' caught)",
        f"no barrier in {ROWS_OF_HEAD}": NO_ROWS,
        f"{TOP_P} #1 of 2": LEAVES_HOSTS,
    },
    "wide": {
        "no wait for vmcnt in run_layers_between > have_come > stay": GAINS,
        "a wait for vmcnt but one in run_layers_between > have_come > stay #2 of 2": GAINS,
        f"no barrier in {QKV_ROWS}": NO_ROWS,
        f"no wait for lgkmcnt in {QKV_ROWS}": NO_ROWS,
        f"a wait for lgkmcnt but one in {QKV_ROWS}": NO_ROWS,
        TOP_P: LEAVES_HOSTS,
        "no wait for lgkmcnt in run_head > choose > tell_best > take_best_of_block": "ahead of a load of what the same"
        " wave has stored: LDS takes a wave's in order",
        "no wait for lgkmcnt in run_head > choose > find_peaks > operator() > largest_of_warp > largest_of_threads"
        " > over_threads #4 of 7": "the end of a wait is stored, which its own wave alone looks at",
    },
    "laneformer": {
        "no wait for vmcnt in run_layers_between > run_layer > o_proj > module_rows > run_rows > run_batch > have_come"
        " > stay": GAINS,
        "no barrier in run_layers_between > run_layer > gate_up_proj > gate_up_rows > normed_rows > run_rows"
        " > sync_consumers": NO_ROWS,
        f"no barrier in {ROWS_OF_HEAD}": NO_ROWS,
        TOP_P: LEAVES_HOSTS,
        f"no barrier in {QKV_ROWS}": NO_ROWS,
    },
    "heads": {
        "no wait for vmcnt in run_layers_between > have_come > stay #2 of 2": GAINS,
        "a wait for vmcnt but one in run_layers_between > have_come > stay #2 of 2": GAINS,
        f"no barrier in {ROWS_OF_HEAD}": NO_ROWS,
        f"no wait for lgkmcnt in {ROWS_OF_HEAD}": NO_ROWS,
        f"a wait for lgkmcnt but one in {ROWS_OF_HEAD}": NO_ROWS,
    },
    "many": {
        "no barrier in find_place > sync_consumers #3 of 3": LAST_OF_PLACE,
        "no barrier in any_consumer > sync_consumers #2 of 2": STEPS,
        f"{TOP_P} #1 of 2": LEAVES_HOSTS,
        "no wait for vmcnt in run_layers_between > have_come > stay #2 of 2": GAINS,
        "a wait for vmcnt but one in run_layers_between > have_come > stay #2 of 2": GAINS,
        f"no barrier in {ROWS_OF_HEAD}": NO_ROWS,
        f"no wait for lgkmcnt in {ROWS_OF_HEAD}": NO_ROWS,
        f"a wait for lgkmcnt but one in {ROWS_OF_HEAD}": NO_ROWS,
        "a wait for lgkmcnt but one in run_layers_between > run_layer > gate_up_proj > gate_up_rows > normed_rows"
        " > run_rows > sync_consumers": NO_ROWS,
        f"a wait for lgkmcnt but one in {QKV_ROWS}": NO_ROWS,
    },
    "tails": {
        f"no wait for vmcnt in {DRAINED}": LEAVES_WEIGHTS,
        f"a wait for vmcnt but one in {DRAINED}": LEAVES_WEIGHTS,
        "a wait for vmcnt but one in run_layers_between > take_all > take > take > thread_weights": "it leaves the last"
        " of the weights behind a layer on its way: whoever multiplies them waits for them",
    },
    "ranks": ENTRY_OF_RANKS | {f"no barrier in {ROWS_OF_HEAD}": NO_ROWS},
    "columns": JOINS | {
        f"{TOP_P} #1 of 2": LEAVES_HOSTS,
    },
    "columns of waves": JOINS | {
        TOP_P: LEAVES_HOSTS,
        "no barrier in run_head > head_rows > run_rows > run_batch > sync_consumers #2 of 2": THREE,
    },
    "columns of ranks": ENTRY_OF_RANKS | {
        f"{what} > end_module > end > sync_consumers{which}": SAME_THREAD
        for what, which in (
            ("no barrier in run_layer > attend > o_proj", ""),
            ("no wait for lgkmcnt in run_layer > attend > o_proj", ""),
            ("a wait for lgkmcnt but one in run_layer > attend > o_proj", ""),
            ("no barrier in run_layer > down_proj", ""),
            ("no wait for lgkmcnt in run_layer > down_proj", " #1 of 3"),
            ("no wait for lgkmcnt in run_layer > down_proj", " #2 of 3"),
            ("a wait for lgkmcnt but one in run_layer > down_proj", " #1 of 3"),
        )
    } | {
        TOP_P: LEAVES_HOSTS,
        CHOOSE: THREE,
        "no wait for lgkmcnt in end > sync_consumers": "a read of the wave's own count of steps",
    },
    "chunk": {
        "no barrier in sync_consumers #1 of 3": ENTRY["no barrier in sync_consumers #1 of 2"],
        "no barrier in sync_consumers #2 of 3": CURSORS,
        "no wait for lgkmcnt in sync_consumers #2 of 3": CURSORS,
        "no barrier in sync_consumers #3 of 3": "the wave that stores tokens is the one that embeds them, of so narrow"
        " a model",
    },
    # What it alone catches needs no reason.
    "columns of heads": {place: why for place, why in JOINS.items() if "join_many" not in place} | {
        HALF: SUMS_BEHIND,
        CHOOSE: THREE,
    },
    "bfloat16": {f"no barrier in {ROWS_OF_HEAD}": NO_ROWS},
    "columns of bfloat16": {HALF: SUMS_BEHIND, CHOOSE: THREE},
}  # fmt: skip


def of_columns(case: str) -> bool:
    """Whether its kernel is one of several tokens."""
    return "columns" in case or case == "chunk"


KIND = {case: OF_COLUMNS if of_columns(case) else OF_ONE for case in OF_CASE}
KIND["many"] = {}  # its blocks are more than one wave's
ARGUED = {case: KIND[case] | own for case, own in OF_CASE.items()}


def alike(case: str, other: str, where: str) -> bool:
    """Whether a place of one case is the same code in the other: of kernels of one kind, and in `choose`, a function of
    both."""
    return of_columns(case) == of_columns(other) or " > choose > " in where
