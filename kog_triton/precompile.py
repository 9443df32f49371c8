"""What a start begins before torch is imported: the compiler of the kernel, which the model's shape decides.

Importing torch takes seconds, and so does compiling: side by side they take the longer of the two. Nothing is
decided or refused here. What is wrong is said where the model and its backend are opened, and what was not begun is
compiled there.
"""

import logging
from importlib.metadata import entry_points
from pathlib import Path

from kog_triton.backends import BackendOptions
from kog_triton.choose import AUTO_ORDER, OTHER_DEVICES
from kog_triton.demo import checkpoint_path
from kog_triton.hub import local_file
from kog_triton.model.config import Config, read_json
from kog_triton.model.families import read_spec
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import ModelSpec

GROUP = "kog_triton.precompilers"  # name of a backend -> (ModelSpec, BackendOptions) -> None
log = logging.getLogger(__name__)


def precompile(
    backend: str,
    options: BackendOptions,
    model: str | Path | None = None,
    shape: str | None = None,
) -> None:
    """Let the backend of this name begin to compile for a model, or "auto" the first that serves the device.

    The model is a folder, a hub id whose files are here, a published shape, or by default the demo. Returns at
    once, and never raises.
    """
    names = AUTO_ORDER[:1] if backend == "auto" else (backend,)
    try:
        spec = named_shape(shape) if shape else _read_spec(model or checkpoint_path())
        for entry in entry_points(group=GROUP):
            serves = options.device not in OTHER_DEVICES.get(entry.name, ())
            if spec is not None and entry.name in names and serves:
                entry.load()(spec, options)
    except Exception as error:
        log.debug("nothing is compiled beforehand: %s", error)


def _read_spec(model: str | Path) -> ModelSpec | None:
    """From config.json alone; None if it is not here, or leaves the type of the weights to their files."""
    file = local_file(model, "config.json")
    if file is None:
        return None
    config = read_json(file)
    return read_spec(config, str(file)) if Config(config).dtype() is not None else None
