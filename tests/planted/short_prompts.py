"""Faults of short prompts that share a pass, and of waits for slices of prompts."""

from tests.planted.fault import Fault

FAULTS = (
    Fault(
        "backends/cuda/short_prompts.py",
        "if self._owner.fits([*prompts, other.prompt]):",
        "if True:",
        "cuda/test_short_prompts.py",
        "a pass takes along more prompts than it has room for",
    ),
    Fault(
        "backends/cuda/short_prompts.py",
        "run.filled = run.end",
        "pass",
        "cuda/test_short_prompts.py",
        "a prompt that another's pass has run is run again by the kernel",
    ),
    Fault(
        "backends/cuda/short_prompts.py",
        "return not request.cached and len",
        "return len",
        "cuda/test_short_prompts.py",
        "a prompt behind a cached prefix takes a pass",
    ),
    Fault(
        "backends/cuda/short_pass.py",
        "words[at:end, 2], words[end - 1, 3] = slot, 1",
        "words[at:end, 2], words[end - 1, 3] = prompts[0].slot, 1",
        "cuda/test_short_prompts.py",
        "all prompts of a pass are put into the first one's slot",
    ),
    Fault(
        "backends/cuda/prompt_texts.py",
        "    if lowering.schedule.spec.narrow:",
        "    if False:",
        "cuda/test_short_prompts.py",
        "a pass reads narrow weights as 16-bit ones",
    ),
    Fault(
        "backends/cuda/backend.py",
        "                beside += workspace_bytes(",
        "                workspace_bytes(",
        "cuda/test_short_prompts.py",
        "the workspace of passes is in no plan",
    ),
    Fault(
        "backends/cuda/backend.py",
        "            other += self.short.memory_bytes()",
        "            pass",
        "cuda/test_short_prompts.py",
        "the workspace of passes is not in what is held",
    ),
    Fault(
        "backends/serving.py",
        "self.attempt(other.request.slot, partial(self._went_on, other, True))",
        "self._went_on(other, True)",
        "cuda/test_short_prompts.py",
        "a mask that fails is the error of whoever's pass its prompt shared",
    ),
    Fault(
        "backends/serving.py",
        "        except Stalled:\n            raise\n",
        "",
        "cuda/test_cuda_slices.py",
        "a GPU that hangs in a slice is an error of one request alone",
    ),
    Fault(
        "backends/prefill/slices.py",
        "wait_for(lambda: self._reached(timed.ended), SLICE, self._device)",
        "pass",
        "host/test_slices.py",
        "a slice of a prompt is waited for without a bound",
    ),
    Fault(
        "backends/cuda/include/kog/prompt/short_pass.h",
        "if (!own.last) return;",
        "",
        "cuda/test_short_pass.py",
        "a pass leaves the streams of any token of a prompt",
    ),
    Fault(
        "backends/cuda/include/kog/prompt/short_pass.h",
        "p.window != 0 && last >= p.window ?",
        "p.window != 0 && last > p.window ?",
        "cuda/test_short_pass.py",
        "a window of a pass has a position more",
    ),
)
