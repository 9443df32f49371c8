"""The small model of stage_check.py on the CUDA kernel's own C++: it passes, a stage planted wrong is named."""

import pytest

from kog_triton.errors import DeviceError
from kog_triton.model.shapes import named_shape
from kog_triton.model.small import small_model
from kog_triton.request_check import check_requests
from kog_triton.stage_check import check_stages
from tests.lib.cuda_planting import plant
from tests.lib.cuda_walk import FLAGS, FiberBackend, FiberKernel, compile_walk


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", pytest.param("laneformer-2b", marks=pytest.mark.slow)])
def test_the_kernel_passes(name):
    assert check_stages(FiberBackend, small_model(named_shape(name), "bf16"), "a CPU") >= 12


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_all_kernels_serve_requests(gpus):
    class Several(FiberBackend):
        column_counts, chunk_positions = (2, 4), 4

    small = small_model(named_shape("qwen2.5-0.5b"), "bf16", gpus)
    assert len(check_requests(Several, small, "a CPU", 4, gpus)) == 4


def test_a_stage_that_is_wrong_in_the_kernel_is_named(tmp_path):
    include = plant(tmp_path, ("join.h", "kWindows[b.layer]", "0"))

    class Wrong(FiberBackend):
        def _load(self, source, entry, layout):
            kernel = FiberKernel(layout, FLAGS[source], 0)
            kernel.library = compile_walk(layout, FLAGS[source], include=include)
            return kernel

    spec = small_model(named_shape("qwen2.5-0.5b").replace(windows=(16,) * 24), "bf16")
    with pytest.raises(DeviceError, match=r"backend cuda computes attention wrong on a CPU \(attention is off"):
        check_stages(Wrong, spec, "a CPU")
