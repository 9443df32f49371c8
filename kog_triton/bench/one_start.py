"""The process that `kog bench startup` starts: as `kog generate` does, the compiler first and torch after it.

Takes the arguments of `one_start` as JSON and prints its phases (startup.PHASES) as JSON, in seconds. What is
compiled or wrong is told on stderr.
"""

import json
import logging
import sys
import time
from collections.abc import Sequence

from kog_triton.backends import BackendOptions
from kog_triton.cli.command import end_process, run
from kog_triton.cli.stderr_log import STDERR_LOG
from kog_triton.precompile import precompile

PROMPT_TOKENS, MAX_CONTEXT = 16, 64
SLOTS = 8  # so that the kernels of several requests are compiled as well


def one_start(
    started: float,
    backend: str,
    model: str | None,
    revision: str | None,
    shape: str | None,
    device: str,
    num_gpus: int,
    dtype: str,
    weights: str | None,
) -> dict[str, float]:
    """`started` by the wall clock, since that was in another process; the others are `open_model`'s.

    weights  the format that a shape's random weights are rounded to, as `kog bench --weights` takes it
    """
    precompile(
        backend,
        model,
        revision=revision,
        shape=shape,
        device=device,
        num_gpus=num_gpus,
        dtype=dtype,
        weights=weights,
        max_model_len=MAX_CONTEXT,
        num_slots=SLOTS,
    )
    from kog_triton.backends.choose import choose
    from kog_triton.bench.engines import BackendUnderTest
    from kog_triton.bench.model import find_device, open_model

    imported = time.time()
    place, word = find_device(device)
    opened = open_model(model, shape, place, dtype, weights, revision)
    options = BackendOptions(SLOTS, max_context=MAX_CONTEXT, num_gpus=num_gpus, device=word)
    engine = BackendUnderTest(choose(backend, word).backend, opened.weights, options)
    loaded = time.time()
    prompt = opened.prompt(PROMPT_TOKENS)
    first, second = (engine.generate(prompt, 1) for _ in range(2))
    times = [run.arrivals[0] - run.submitted for run in (first, second)]
    engine.settle()
    compiled = time.time()
    engine.close()
    return {
        "import_s": imported - started,
        "load_s": loaded - imported,
        "first_token_s": times[0],
        "second_token_s": times[1],
        "total_s": loaded - started + times[0],
        "compiled_s": compiled - started,
    }


def _body(argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    logging.getLogger("kog_triton").addHandler(STDERR_LOG)
    logging.getLogger("kog_triton.compilers").setLevel(logging.INFO)
    print(json.dumps(one_start(**json.loads(argv[0]))))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, argv)


if __name__ == "__main__":
    end_process(main)
