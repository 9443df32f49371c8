"""Compile the Triton kernel, as often as asked: a line of JSON in, [target, shape, variant ..], a line out.

A variant is rules, chunks, rules+chunks, columns=8, rules+columns=8 or the name of a stage; "of ones"
behind a stage's name: for a layer, position and token of 1. An answer has the version of Triton and the reports, or
the error.

A process of its own, because the tests' own import of Triton interprets kernels (conftest.py).
"""

import json
import sys
import traceback
from typing import Any

import triton

from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import Head
from kog_triton.model.weight_format import FORMATS
from tests.lib.compile_report import compile_report
from tests.lib.lowering_cases import lanes
from tests.lib.narrow_stream import narrow_spec
from tests.lib.ring_walker import spec_of

FLAGS = {"rules", "chunks"}  # of the kernel that decodes
OF_ONES = " of ones"
WITH_HEAD = ("fp8-block", "mxfp4")  # narrow too, of the small models, and the embedding
SMALL = {"num_blocks": 4, "max_context": 64}
NARROW = {"fp8": "fp8-block", "int8": "int8-channel", "int4": "int4-g128", "mxfp4": "mxfp4"}
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
         "num_layers": 2, "vocab_size": 512}  # fmt: skip
SHAPES = {
    "tiny": (spec_of(), SMALL),
    "llama-3.1-8b, 108 blocks": (named_shape("llama-3.1-8b"), {"num_blocks": 108}),
    "qwen3-8b, 108 blocks": (named_shape("qwen3-8b"), {"num_blocks": 108}),
    **{f"qwen3-8b, {name}": (with_format(named_shape("qwen3-8b"), FORMATS[how]), {}) for name, how in NARROW.items()},
    **{
        f"small, {name}": (
            narrow_spec(FORMATS[how], how in WITH_HEAD, **SIZES, tied_embeddings=how in WITH_HEAD),
            SMALL,
        )
        for name, how in NARROW.items()
    },
    "256 ids a block": (spec_of(vocab_size=1000), SMALL),  # as many as a block has threads
    "two rows a block": (spec_of(hidden_size=52, intermediate_size=92), {"num_blocks": 132}),
    "lanes": (lanes(1, Head.CONCAT, intermediate_size=96), SMALL),
}


def reports_of(target: str, shape: str, *variants: str) -> list[dict[str, Any]]:
    spec, sizes = SHAPES[shape] if shape in SHAPES else (named_shape(shape), {})
    reports = []
    for variant in variants or [""]:
        flags = variant.split("+") if variant else []
        columns = [int(flag[8:]) for flag in flags if flag.startswith("columns=")]
        flags = [flag for flag in flags if not flag.startswith("columns=")]
        known = (
            dict.fromkeys(flags, True)
            if set(flags) <= FLAGS
            else {"stage": variant.removesuffix(OF_ONES), "ones": variant.endswith(OF_ONES)}
        )
        known |= {"columns": columns[0]} if columns else {}
        reports.append(vars(compile_report(spec, target, **sizes, **known)))
    return reports


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            answer = {"triton": triton.__version__, "reports": reports_of(*json.loads(line))}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
