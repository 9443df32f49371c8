"""Mutants of the HIP kernel's machine code (hip_mutants.py) that live, by place, and why no run can tell them."""

JOINED = "run_layers_between > run_layer > attention > join_splits > join_many > sync_consumers"
SUMS_BEHIND = "a wave's part of a sum of squares is read behind the next barrier, ahead of which all wait for LDS again"
OF_MANY = "up to 64 blocks are one wave's (of 'many' caught)"
# Survivors of "split", and others, that were read: why no run of that object can tell them, or what would have to be
# there.
ARGUED = {
    "no barrier in sync_consumers": "behind init_block: what it writes is read behind find_place's own barriers",
    "no barrier in find_place > sync_consumers": "the first: up to 64 blocks are one wave's (of 'many' caught); the"
    " last: the block's number is read behind the barrier of the kernel's entry, which comes next",
    "no barrier in any_consumer > sync_consumers": "the second: a step's barriers stand before the next call",
    f"no barrier in {JOINED}": "sums go into shared memory only where there are more than kJoined splits: not with 8"
    " blocks (of 'heads' caught)",
    "no barrier in run_head > head_rows > run_rows > sync_consumers": "of a block without rows, which reads nothing"
    " that it staged",
    "no barrier in run_head > choose > check_argmax > gather_shares > sync_consumers": "up to 64 blocks' shares are"
    " gathered by one wave, the one that has read the sums (of 'many', whose two gather, caught)",
    "a wait for lgkmcnt but one in run_head > choose > check_argmax > gather_top_p_check > sync_consumers": "the first:"
    " it leaves the host's word in flight, which nobody reads ahead of the next barrier, where all wait for LDS; of"
    " more than 64 blocks another wave's best id, too, which is read there where two keys are equal",
    "no barrier in run_head > choose > publish_best > sync_consumers": "the second: the sums' 16 words lie below those"
    " that other waves write (2 * kMostLogprobs up); the third: choose has a barrier before the scratch is used again",
    "no barrier in run_head > choose > publish_ahead > sync_consumers": "as publish_best's second",
    "global_store_dword of a narrower scope in run_head > choose > edit_logits > store_relaxed > store_scoped": "each"
    " block writes the output's ids, all the same, and reads its own",
    "global_load_dword of a narrower scope in run_head > choose > edit_logits > completes > load_relaxed > load_scoped":
    "as its store",
    "no wait for lgkmcnt in run_head > stage_x > sync_staged > sync_consumers": SUMS_BEHIND,
    "no wait for lgkmcnt in run_layers_between > qkv_proj > stage_x > sync_staged > sync_consumers": SUMS_BEHIND,
    "no wait for lgkmcnt in run_layers_between > run_layer > gate_up_proj > stage_x > sync_staged > sync_consumers":
    SUMS_BEHIND,
    "no wait for lgkmcnt in find_place > sync_consumers": OF_MANY,
    "a wait for lgkmcnt but one in find_place > sync_consumers": OF_MANY,
}  # fmt: skip
OF_SPLIT = "'split' catches it, whose blocks share a head's rows of the cache and whose waves join results"
NO_ROWS = "of a block without rows, which reads nothing that it staged"
OF_WIDE = "a block's ids are of one warp (of 'wide' caught)"
ATTENTION = "run_layers_between > run_layer > attention > walk_split > walk_span"
QKV_ROWS = "run_layers_between > qkv_proj > qkv_rows > normed_rows > run_rows > sync_consumers"
GAINS = "it leaves gains, and words that tell of themselves, on their way: whoever needs them waits again"
STORES = "receive > append > each > operator() > store_cache > store_scoped"
OF_WAVES = "what the waves of a block share is one wave's here (of 'columns of waves' caught)"
ONCE = "a chunk's launch chooses one token: nothing of its head was read before (of 'columns' caught)"
THREE = "the last rows of the head, run_head and choose have a barrier each ahead of what choose reads: two are enough"
NO_ROW_OF_CACHE = "what it would leave unfinished on any way (`kept`): words that tell of themselves, and hints"
JOIN = "run_layer > attend > attention > join_kv_task"
MERGE = "run_layer > attend > attention > walk_head > merge_head > sync_consumers"
SAME_THREAD = "whoever puts a sum of all lanes has joined it, the same thread: LDS takes a wave's in order"
OF_COLUMNS = {
    "no wait for vmcnt in run_layer > down_proj > drain_stores": NO_ROW_OF_CACHE,
    "a wait for vmcnt but one in run_layer > down_proj > drain_stores": NO_ROW_OF_CACHE,
    "no wait for lgkmcnt in run_layer > stage_half > stage_half_for > stage_streams > sync_staged > sync_consumers":
    SUMS_BEHIND,
    "no wait for lgkmcnt in run_head > head_operands > stage_head > stage_streams > sync_staged > sync_consumers":
    SUMS_BEHIND,
    "no wait for lgkmcnt in find_place > sync_consumers": OF_MANY,
    "a wait for lgkmcnt but one in find_place > sync_consumers": OF_MANY,
    f"no barrier in {JOIN} > sync_consumers": "join_many begins with one, and o_proj's sums lie elsewhere",
    f"no barrier in {JOIN} > join_many > sync_consumers": "the first: finish_split has one behind the last look at what"
    " was merged; behind a head that the block walked alone, in one layer, this one is needed (of 'columns of heads'"
    " caught)",
    "no barrier in run_head > sync_consumers": THREE,
    "no barrier in run_head > choose > sync_consumers": THREE,
}  # fmt: skip
# Survivors of other cases that are none of "split"'s.
ARGUED_OF = {
    "wide": {
        "no wait for vmcnt in run_layers_between > have_come > stay": GAINS,
        "a wait for vmcnt but one in run_layers_between > have_come > stay": GAINS,
        f"global_store_dword of a narrower scope in {ATTENTION} > {STORES}": OF_SPLIT,
        "no buffer_inv in acquire_cache > acquire_gpu": OF_SPLIT,
        "no buffer_inv in run_head > acquire_cache > acquire_gpu": OF_SPLIT,
        f"no barrier in {ATTENTION} > put_results > sync_consumers": OF_SPLIT,
        f"no barrier in {QKV_ROWS}": NO_ROWS,
        f"no wait for lgkmcnt in {QKV_ROWS}": NO_ROWS,
        f"a wait for lgkmcnt but one in {QKV_ROWS}": NO_ROWS,
        "no wait for lgkmcnt in run_head > choose > tell_best > take_best_of_block": "ahead of a load of what the same"
        " wave has stored: LDS takes a wave's in order",
        "no wait for lgkmcnt in run_head > choose > find_peaks > operator() > largest_of_warp > largest_of_threads"
        " > over_threads": "the end of a wait is stored, which its own wave alone looks at",
    },
    "laneformer": {
        "no wait for vmcnt in run_layers_between > run_layer > o_proj > module_rows > run_rows > run_batch > have_come"
        " > stay": GAINS,
        f"global_store_dword of a narrower scope in {ATTENTION} > {STORES}": OF_SPLIT,
        f"no barrier in {ATTENTION} > put_results > sync_consumers": OF_SPLIT,
        "no barrier in run_layers_between > run_layer > gate_up_proj > gate_up_rows > normed_rows > run_rows"
        " > sync_consumers": NO_ROWS,
        "no wait for lgkmcnt in run_head > choose > publish_candidate > sync_consumers": OF_WIDE,
        "no wait for lgkmcnt in run_head > choose > publish_top_p_check > sync_consumers": OF_WIDE,
        "a wait for lgkmcnt but one in run_head > choose > publish_top_p_check > sync_consumers": OF_WIDE,
        "no buffer_inv in acquire_cache > acquire_gpu": OF_SPLIT,
        "no buffer_inv in run_head > acquire_cache > acquire_gpu": OF_SPLIT,
        f"no barrier in {QKV_ROWS}": NO_ROWS,
        "no barrier in run_head > choose > sync_consumers": OF_WIDE,
        "no barrier in run_head > choose > edit_logits > count_token > sync_consumers": OF_WIDE,
        "no barrier in run_head > choose > edit_logits > sync_consumers": OF_WIDE,
        "no barrier in run_head > choose > publish_candidate > sync_consumers": OF_WIDE,
        "a wait for lgkmcnt but one in run_head > choose > publish_candidate > sync_consumers": OF_WIDE,
    },
    "heads": {
        "no wait for vmcnt in run_layers_between > have_come > stay": GAINS,
        "a wait for vmcnt but one in run_layers_between > have_come > stay": GAINS,
        "no wait for lgkmcnt in run_head > head_rows > run_rows > sync_consumers": NO_ROWS,
        "a wait for lgkmcnt but one in run_head > head_rows > run_rows > sync_consumers": NO_ROWS,
        "no buffer_inv in acquire_cache > acquire_gpu": "of one layer: what a prompt's steps read of the cache is"
        " nobody's but its last one's; 'split', of two, catches it",
        "no wait for vmcnt in store_system_pair > drain_stores": "once a run, of ten; 'split' catches it",
    },
    "many": {
        "no wait for vmcnt in run_layers_between > have_come > stay": GAINS,
        "a wait for vmcnt but one in run_layers_between > have_come > stay": GAINS,
        f"global_store_dword of a narrower scope in {ATTENTION} > {STORES}": OF_SPLIT,
        "no buffer_inv in run_head > acquire_cache > acquire_gpu": OF_SPLIT,
        f"no barrier in {ATTENTION} > put_results > sync_consumers": OF_SPLIT,
        "no wait for lgkmcnt in run_head > head_rows > run_rows > sync_consumers": NO_ROWS,
        "a wait for lgkmcnt but one in run_head > head_rows > run_rows > sync_consumers": NO_ROWS,
        "a wait for lgkmcnt but one in run_layers_between > run_layer > gate_up_proj > gate_up_rows > normed_rows"
        " > run_rows > sync_consumers": NO_ROWS,
        f"a wait for lgkmcnt but one in {QKV_ROWS}": NO_ROWS,
        "no wait for vmcnt in store_system_pair > drain_stores": "once a run, of ten; 'split' catches it",
        "no barrier in run_head > choose > sync_consumers": OF_WIDE,
        "no wait for lgkmcnt in run_head > choose > publish_top_p_check > sync_consumers": OF_WIDE,
        "a wait for lgkmcnt but one in run_head > choose > publish_top_p_check > sync_consumers": OF_WIDE,
    },
    "columns": OF_COLUMNS | {
        "no barrier in run_layer > attend > attention > walk_shared > finish_split > sync_consumers": OF_WAVES,
        f"no barrier in {MERGE}": OF_WAVES,
        f"no wait for lgkmcnt in {MERGE}": OF_WAVES,
        f"a wait for lgkmcnt but one in {MERGE}": OF_WAVES,
        "no barrier in run_head > choose > edit_logits > count_token > sync_consumers": OF_WAVES,
        "no barrier in run_head > choose > edit_logits > sync_consumers": OF_WAVES,
        "no barrier in run_head > choose > publish_best > sum_over_block > sync_consumers": OF_WAVES,
        "no barrier in run_layer > attend > qkv_proj > qkv_rows > normed_rows > run_rows > run_batch > sync_consumers":
        OF_WAVES,
    },
    "columns of waves": OF_COLUMNS | {
        "no barrier in run_head > head_rows > run_rows > run_batch > sync_consumers": THREE,
    },
    "columns of ranks": {place: why for place, why in OF_COLUMNS.items() if JOIN not in place} | {
        f"{what} in run_layer > {stage} > end_module > end > sync_consumers": SAME_THREAD
        for stage in ("attend > o_proj", "down_proj")
        for what in ("no barrier", "no wait for lgkmcnt", "a wait for lgkmcnt but one")
    } | {
        "no wait for lgkmcnt in end > sync_consumers": "a read of the wave's own count of steps",
    },
    "chunk": {place: OF_COLUMNS[place] for place in OF_COLUMNS if "wait" in place and "find_place" not in place} | {
        "no wait for lgkmcnt in sync_consumers": ONCE,
        "no wait for lgkmcnt in run_head > publish_best > sync_consumers": ONCE,
        "a wait for lgkmcnt but one in run_head > publish_best > sync_consumers": ONCE,
        "no buffer_inv in run_head > head_operands > stage_head > acquire_gpu": ONCE,
        "no barrier in run_layer > attend > qkv_proj > qkv_rows > normed_rows > run_rows > run_batch > sync_consumers":
        OF_WAVES,
    },
    # What it alone catches needs no reason.
    "columns of heads": {place: why for place, why in OF_COLUMNS.items() if "join_many" not in place},
}  # fmt: skip
