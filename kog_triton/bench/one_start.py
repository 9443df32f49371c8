"""The process that `kog bench startup` starts: as `kog generate` does, the compiler first and torch after it.

Prints its phases (startup.PHASES) as JSON, in seconds.
"""

import argparse
import json
import time

from kog_triton.backends import BackendOptions
from kog_triton.precompile import precompile

PROMPT_TOKENS, MAX_CONTEXT = 16, 64


def one_start(args: argparse.Namespace) -> dict[str, float]:
    """Wall clock, since it began in another process."""
    precompile(
        args.backend,
        args.model,
        shape=args.shape,
        device=args.device,
        num_gpus=args.gpus,
        dtype=args.dtype,
        max_model_len=MAX_CONTEXT,
    )
    from kog_triton.backends.choose import choose
    from kog_triton.bench.engines import BackendUnderTest
    from kog_triton.bench.model import find_device, open_model

    imported = time.time()
    device, word = find_device(args.device)
    model = open_model(args.model, args.shape, device, args.dtype)
    options = BackendOptions(max_context=MAX_CONTEXT, num_gpus=args.gpus, device=word)
    engine = BackendUnderTest(choose(args.backend, word).backend, model.weights, options)
    loaded = time.time()
    prompt = model.prompt(PROMPT_TOKENS)
    first, second = (engine.generate(prompt, 1) for _ in range(2))
    times = [run.arrivals[0] - run.submitted for run in (first, second)]
    engine.close()
    return {
        "import_s": imported - args.started,
        "load_s": loaded - imported,
        "first_token_s": times[0],
        "second_token_s": times[1],
        "total_s": loaded - args.started + times[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--started", type=float, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--model")
    parser.add_argument("--shape")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="")
    parser.add_argument("--gpus", type=int, default=1)
    print(json.dumps(one_start(parser.parse_args())))


if __name__ == "__main__":
    main()
