"""Compile the Triton kernel for `python compile_child.py TARGET SHAPE` and print the report as JSON.

A process of its own, because the tests' own import of Triton interprets kernels (conftest.py).
"""

import json
import sys

from ring_walker import spec_of

from kog_triton.backends.triton.report import compile_report
from kog_triton.model.shapes import named_shape

if __name__ == "__main__":
    target, shape = sys.argv[1:]
    if shape == "tiny":
        report = compile_report(spec_of(), target, num_blocks=4, max_context=64)
    else:
        report = compile_report(named_shape(shape), target)
    print(json.dumps(vars(report)))
