"""The process that `kog bench startup` starts: as `kog generate` does, the compiler first and torch after it.

Takes the arguments of `one_start` as JSON and prints its phases (startup.PHASES) as JSON, in seconds.
"""

import json
import sys
import time

from kog_triton.backends import BackendOptions
from kog_triton.precompile import precompile

PROMPT_TOKENS, MAX_CONTEXT = 16, 64
SLOTS = 8  # so that the kernels of several requests are compiled as well


def one_start(
    started: float,
    backend: str,
    model: str | None,
    shape: str | None,
    device: str,
    num_gpus: int,
    dtype: str,
) -> dict[str, float]:
    """`started` by the wall clock, since that was in another process; the others are `precompile`'s."""
    precompile(
        backend,
        model,
        shape=shape,
        device=device,
        num_gpus=num_gpus,
        dtype=dtype,
        max_model_len=MAX_CONTEXT,
        num_slots=SLOTS,
    )
    from kog_triton.backends.choose import choose
    from kog_triton.bench.engines import BackendUnderTest
    from kog_triton.bench.model import find_device, open_model

    imported = time.time()
    place, word = find_device(device)
    opened = open_model(model, shape, place, dtype)
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


def main() -> None:
    print(json.dumps(one_start(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
