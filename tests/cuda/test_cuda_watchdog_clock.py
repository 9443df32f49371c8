"""Which clock bounds the waits of a launch: the GPU's nanoseconds, since an SM's ticks change their length."""

import re

from kog_triton.model.shapes import named_shape
from tests.lib.cuda_walk import layout_of
from tests.lib.machine_code import innermost, machine_code


def test_the_watchdog_reads_the_gpu_s_clock():
    """Its loop is the only one that sleeps. Two seconds of ticks at 2 GHz are others at another speed."""
    (watch,) = innermost(machine_code(layout_of(named_shape("llama-3.2-1b"), max_context=1024)), r"\bNANOSLEEP")
    clocks = re.findall(r"\bSR_(GLOBALTIMER|CLOCK)", "\n".join(watch))
    assert clocks == ["GLOBALTIMER"]
