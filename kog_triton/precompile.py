"""What a command begins before torch is imported: the kernels' compilers, which the model's shape decides.

Importing torch takes seconds, and so does compiling: side by side they take the longer of the two. Nothing is
decided or refused here. What is wrong is said where the model and its backend are opened, and what was not begun is
compiled there. What is known to be refused is not begun; a compiler ends with the process that began it.
"""

import logging
from importlib.metadata import entry_points
from pathlib import Path

from kog_triton.backends import DTYPE_NAMES, BackendOptions
from kog_triton.checkpoint.hub import INDEX, SINGLE, local_file
from kog_triton.demo import checkpoint_path
from kog_triton.json_file import read_json
from kog_triton.model.config import Config
from kog_triton.model.families import read_spec
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import ModelSpec
from kog_triton.model.weight_format import FORMATS

# Name of a backend -> (ModelSpec, BackendOptions) -> None: begins what the backend will ask for, where "auto" means it.
GROUP = "kog_triton.precompilers"
log = logging.getLogger(__name__)


def precompile(
    backend: str,
    model: str | Path | None = None,
    *,
    revision: str | None = None,
    shape: str | None = None,
    device: str = "",
    num_gpus: int = 1,
    dtype: str = "auto",
    weights: str | None = None,
    max_model_len: int | None = None,
    num_slots: int = 1,
    prefill: str = "auto",
) -> None:
    """Let the backend of this name begin to compile, or "auto" that which it will take. Never raises.

    The model is a folder, a hub id whose files are here, a published shape, or by default the demo. `weights` is
    the format that the shape's random weights are rounded to, a key of FORMATS; the others are what LLM takes.
    """
    try:
        spec = named_shape(shape) if shape else _read_spec(model, revision)
        if spec is None:
            return
        if weights:
            spec = with_format(spec, FORMATS[weights])
        room = spec.max_context if max_model_len is None else max_model_len
        if not 2 <= room <= spec.max_context:
            return
        options = BackendOptions(
            num_slots=num_slots,
            max_context=room,
            num_gpus=num_gpus,
            device=device,
            dtype=DTYPE_NAMES[dtype],
            prefill=prefill,
        )
        for entry in entry_points(group=GROUP):
            if backend in ("auto", entry.name):
                entry.load()(spec, options)
    except Exception as error:
        log.debug("nothing is compiled beforehand: %s: %s", type(error).__name__, error)


def _read_spec(model: str | Path | None, revision: str | None) -> ModelSpec | None:
    """From config.json alone; None if a model of that name is not here, or leaves the weights' type to their files."""
    model = checkpoint_path() if model is None else model
    file = local_file(model, "config.json", revision)
    if file is None or not any(local_file(model, name, revision) for name in (SINGLE, INDEX)):
        return None
    config = read_json(file)
    return read_spec(config, str(file)) if Config(config).dtype() is not None else None
