"""Faults in the model as data."""

from tests.planted.fault import Fault

FAULTS = (
    Fault(
        "model/rope_config.py",
        "return Rope(theta, scaling, _factor(parameters))",
        "return Rope(theta)",
        "host/test_families.py",
        "linear RoPE scaling is read and forgotten",
    ),
    Fault(
        "model/families/laneformer.py",
        "early if layer < delay else late",
        "early if layer <= delay else late",
        "host/test_families.py",
        "the delayed reduction starts a layer late",
    ),
    Fault(
        "model/families/decoder.py",
        "windows=windows or (0,) * layers,",
        "windows=(0,) * layers,",
        "host/test_families.py",
        "sliding windows are ignored",
    ),
    Fault(
        "model/families/decoder.py",
        "default=1e-6),\n        rope=rope",
        "default=1e-5),\n        rope=rope",
        "host/test_families.py",
        "a norm epsilon that is left out takes another family's value",
    ),
    Fault(
        "model/spec.py",
        "min(position + 1, window or position + 1)",
        "min(position, window or position)",
        "host/test_metrics.py",
        "the step's own position is not counted in the KV bytes",
    ),
)
