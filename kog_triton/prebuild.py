"""Code objects of a model for machines without a compiler, written to a folder where there is one. Needs no GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kog_triton.backends import find_backend
from kog_triton.cli.arguments import Parser, positive
from kog_triton.cli.command import end_process, run
from kog_triton.cli.model import add_model, open_spec
from kog_triton.plan import plan_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu


def _body(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m kog_triton.prebuild", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    add_model(parser)
    parser.add_argument("--device", default="mi300x", help="an AMD GPU (default: mi300x)")
    parser.add_argument("--gpus", type=positive, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument("--max-model-len", type=positive, default=0, help="positions (default: as the model allows)")
    parser.add_argument("--blocks", type=positive, default=0, help="as kog generate's (default: usual)")
    args = parser.parse_args(argv)
    backend: Any = find_backend("hip")
    _, spec = open_spec(args)
    gpu = find_gpu(args.device)
    plan_hip(build(spec, args.gpus), gpu, args.blocks)  # refuses what has no kernel
    for path in backend.prebuild(args.folder, spec, gpu, args.max_model_len, args.gpus, args.blocks):
        print(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, argv)


if __name__ == "__main__":
    end_process(main)
