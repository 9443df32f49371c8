"""Compile the Triton kernel and print reports as JSON: `compile_child.py TARGET SHAPE [VARIANT ..]`.

A variant is rules, chunks, rules+chunks or the name of a stage.

A process of its own, because the tests' own import of Triton interprets kernels (conftest.py).
"""

import json
import sys

import triton
from lowering_cases import lanes
from ring_walker import spec_of

from kog_triton.backends.triton.report import compile_report
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import Head

FLAGS = {"rules", "chunks"}  # of the kernel that decodes

if __name__ == "__main__":
    target, shape, *variants = sys.argv[1:]
    small = {"num_blocks": 4, "max_context": 64}
    options = {
        "tiny": (spec_of(), small),
        "lanes": (lanes(1, Head.CONCAT, intermediate_size=96), small),
    }
    spec, sizes = options[shape] if shape in options else (named_shape(shape), {})
    reports = []
    for variant in variants or [""]:
        flags = variant.split("+")
        known = dict.fromkeys(flags, True) if set(flags) <= FLAGS else {"stage": variant}
        reports.append(compile_report(spec, target, **sizes, **known))
    print(f"compiled by triton {triton.__version__}", file=sys.stderr)
    print(json.dumps([vars(report) for report in reports]))
