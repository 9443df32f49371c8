"""The code objects of a model, written to a folder for machines without a compiler (objects.py). Needs no GPU.

python -m kog_triton.backends.hip.prebuild FOLDER [--model M | --shape S] [--device mi300x] [--max-model-len N]
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from kog_triton.backends.cuda.jit import compile_cubin
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.hip import selftest, toolchain
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.backends.hip.objects import file_of
from kog_triton.model.spec import DTYPES, ModelSpec
from kog_triton.plan import open_spec
from kog_triton.schedule.hip import lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import Gpu, find_gpu
from kog_triton.stage_check import CONTEXT, small_model


def sources(spec: ModelSpec, gpu: Gpu, max_context: int) -> Iterator[tuple[str, str]]:
    """Header and source of all that a start compiles: the self-tests' before the model's."""
    yield selftest.HEADER, "selftest.hip"
    for one, context in ((small_model(spec), CONTEXT), (spec, max_context)):
        header = render(lay_out_hip(lower_hip(build(one), gpu), context))
        yield header, "decode.hip"
        if one is not spec:
            yield header, "stage.hip"


def prebuild(folder: Path, spec: ModelSpec, gpu: Gpu, max_context: int = 0) -> list[Path]:
    """The files that a start of this model needs, written; KogError for what the kernel cannot do."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for header, source in sources(spec, gpu, max_context or spec.max_context):
        path = folder / file_of(header, source, gpu.arch)
        path.write_bytes(compile_cubin(header, source, gpu.arch, tools=toolchain))
        written.append(path)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kog_triton.backends.hip.prebuild", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--model", help="a checkpoint folder or a Hugging Face id (default: the demo that ships)"
    )
    what.add_argument("--shape", help="a named shape, such as llama-3.2-1b")
    parser.add_argument("--device", default="mi300x")
    parser.add_argument("--dtype", choices=("bf16", "fp16"))
    parser.add_argument("--max-model-len", type=int, default=0)
    args = parser.parse_args(argv)
    _, spec = open_spec(args.model, args.shape)
    if args.dtype:
        spec = spec.replace(dtype=DTYPES[args.dtype])
    for path in prebuild(args.folder, spec, find_gpu(args.device), args.max_model_len):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
