"""What slow tests plant in the CUDA kernel's headers can be planted: each text that they change stands there once.

A change of the kernel would else be told hours later, by a run of the slow tests.
"""

import pytest

from tests.conformance import test_conformance as conformance
from tests.conformance import test_conformance_requests as requests
from tests.conformance import test_conformance_sampling as sampling
from tests.cuda import test_cuda_chunks as chunks
from tests.cuda import test_cuda_column_threads as column_threads
from tests.cuda import test_cuda_columns as columns
from tests.cuda import test_cuda_lanes as lanes
from tests.cuda import test_cuda_life as life
from tests.lib.cuda_walk import INCLUDE

EDITS = [  # header, before, after
    *((header, *edit[:2]) for header, *edit in conformance.FAULTS.values()),
    *(edit[:3] for faults in (requests.FAULTS, sampling.FAULTS) for edit in faults.values()),
    *chunks.FAULTS.values(),
    *column_threads.RACES.values(),
    *columns.FAULTS.values(),
    *(edit for _, *edit in columns.SHAPE_FAULTS.values()),
    *lanes.FAULTS.values(),
    *life.FAULTS.values(),
]


@pytest.mark.parametrize(("header", "before", "after"), EDITS)
def test_an_edit_has_one_place(header, before, after):
    assert (INCLUDE / "kog" / header).read_text().count(before) == 1 and before != after
