"""What slow tests plant in CUDA's and HIP's headers can be planted: each text that changes stands there once.

A change of the kernel would else be told hours later, by a run of the slow tests.
"""

import pytest

from kog_triton.backends.cuda import toolchain
from tests.conformance import test_conformance as conformance
from tests.conformance import test_conformance_requests as requests
from tests.conformance import test_conformance_sampling as sampling
from tests.cuda import test_cuda_chunks as chunks
from tests.cuda import test_cuda_column_threads as column_threads
from tests.cuda import test_cuda_columns as columns
from tests.cuda import test_cuda_lanes as lanes
from tests.cuda import test_cuda_life as life
from tests.cuda import test_cuda_threads as threads
from tests.cuda import test_deep as deep
from tests.gpu import test_cuda_sanitizer as sanitizer
from tests.lib import sanitized_child
from tests.lib.cuda_walk import INCLUDE
from tests.lib.hip_walk import OWN as HIP_INCLUDE

HIP_FAULTS = (*conformance.HIP_FAULTS.values(), *requests.HIP_FAULTS.values())
EDITS = [  # header, before, after
    *((header, *edit[:2]) for header, *edit in conformance.FAULTS.values()),
    *(edit[:3] for faults in (requests.FAULTS, sampling.FAULTS) for edit in faults.values()),
    *chunks.FAULTS.values(),
    *column_threads.RACES.values(),
    *(edit for _, *edit in column_threads.NARROW_RACES.values()),
    *threads.NARROW_EDITS,
    *(("narrow.h", *edit) for _, *edit in threads.BEYOND.values()),
    *(edit for _, *edit in deep.NARROW_FAULTS.values()),
    *columns.FAULTS.values(),
    *(edit for _, *edit in columns.SHAPE_FAULTS.values()),
    *lanes.FAULTS.values(),
    *life.FAULTS.values(),
]


@pytest.mark.parametrize(
    ("include", "header", "before", "after"),
    [*((INCLUDE, *edit) for edit in EDITS), *((HIP_INCLUDE, *fault[:3]) for fault in HIP_FAULTS)],
)
def test_an_edit_has_one_place(include, header, before, after):
    assert (include / "kog" / header).read_text().count(before) == 1 and before != after


def test_what_compute_sanitizer_is_to_find_can_be_planted(monkeypatch, tmp_path):
    """In headers and sources, beside what racecheck follows the ring by."""
    monkeypatch.setattr(toolchain, "INCLUDE", toolchain.INCLUDE)
    monkeypatch.setattr(toolchain, "FOLDER", toolchain.FOLDER)
    folder, include = toolchain.FOLDER, toolchain.INCLUDE
    for n, (tool, case, fault) in enumerate(sanitizer.PLANTED):
        assert case in sanitized_child.CASES
        toolchain.FOLDER, toolchain.INCLUDE = folder, include
        names = (sanitizer.NO_FAULT.get(tool), fault)
        edits = [edit for name in names if name for edit in sanitized_child.EDITS.get(name, ())]
        assert edits or tool == "initcheck"
        (tmp_path / str(n)).mkdir()
        sanitized_child.plant_all(tmp_path / str(n), edits)
        for path, _, after in edits:
            where = toolchain.FOLDER if path.endswith(".cu") else toolchain.INCLUDE / "kog"
            assert after in (where / path).read_text()
