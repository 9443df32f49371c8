"""Models and settings that tests of token columns and of chunks share, and the layout of columns."""

import numpy as np

from kog_triton.backends.cuda.layout.columns import lay_out_columns
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.cuda_requests import GREEDY
from tests.lib.cuda_walk import lower
from tests.lib.ring_walker import f16_spec

ODD = f16_spec(hidden_size=54, intermediate_size=90, num_heads=4, head_dim=8, qkv_bias=True)
EXTRAS = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True}
ALLOWED = np.array([0x0F0F0F0F] * 4, np.uint32)
MIXED = {  # of each column
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=2.0, seed=7),
    "cut": SamplingParams(temperature=3.0, seed=8, top_k=9, top_p=0.8, logprobs=3),
    "penalized": SamplingParams(temperature=1.5, seed=9, repetition_penalty=1.7, logit_bias={3: 2.0, 60: -4.0}),
    "masked": SamplingParams(temperature=1.0, seed=10, min_p=0.01),
    "banned": SamplingParams(temperature=0, min_tokens=2, end_token_ids=(5, 60), bad_words_token_ids=((9, 8), (7,))),
    "told": SamplingParams(temperature=0, logprobs=5),
}


def layout_of(spec, columns, num_blocks=0, max_context=1024, gpu="h200", **options):
    lowering = lower(build(spec), GPUS[gpu], num_blocks)
    return lay_out_columns(lowering, max_context, columns, **options)
