"""What the objects of the HIP kernels keep, whichever code generator they are by."""

from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.hip.column_layout import ColumnLayout
from kog_triton.model.spec import DType
from kog_triton.schedule.lowering import matrix_stages
from tests.lib.gfx942 import hip_columns, hip_kernel
from tests.lib.gfx942.backends import CLANG
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.decode import decode
from tests.lib.gfx942.executor import operations
from tests.lib.gfx942.gates import Gates, gates_of
from tests.lib.gfx942.wait_states import too_soon
from tests.lib.gfx942.waits import touched_early


def made(layout: Layout, compiler: str = CLANG) -> tuple[CodeObject, str]:
    """The object of a layout's kernel, and the kernel's name."""
    of = hip_columns if isinstance(layout, ColumnLayout) else hip_kernel
    return of.compiled(render(layout), hip_kernel.INCLUDES, compiler), of.KERNEL


def gates(layout: Layout, compiler: str = CLANG) -> Gates:
    return gates_of(*made(layout, compiler), layout.shared_bytes, layout.threads // 64)


def keeps_its_promises(layout: Layout, compiler: str = CLANG) -> None:
    one, half = gates(layout, compiler), layout.lowering.schedule.spec.dtype is DType.F16
    assert one.spilled == one.scratch == 0
    assert one.vgprs <= 256 and one.groups_per_cu >= 1 and one.lds <= 64 << 10
    assert one.narrow == 0 and one.non_temporal >= 4  # weights in loads of 16 bytes alone
    assert one.count("BUFFER_WBL2", "FLAT_", "SCRATCH_") == 0
    assert one.count("BUFFER_INV") >= 1
    # Plain, agent scope, the host's, streamed: nothing else.
    forms = {form[1:] for form in one.scopes if form[0] != "ATOMIC"}
    assert forms <= {(0, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1)}
    if not isinstance(layout, ColumnLayout):
        assert (one.count("V_DOT2") > 0) == half
        return
    # Two of a fragment and column set, in each piece of code that multiplies a stage; none of the other type.
    least = 2 * sum(
        layout.lowering.steps(s) * layout.row_words(s) // 4 for s in matrix_stages(layout.lowering.schedule)
    )
    kind = "V_MFMA_F32_16X16X16_" + ("F16" if half else "BF16")
    assert one.count(kind) == one.count("V_MFMA") >= least


def amiss(made: CodeObject, kernel: str) -> list[str]:
    """On any way through the code: registers in flight, and distances that the hardware does not keep."""
    return touched_early(made, kernel) + too_soon(made, kernel)


def keeps_to(layout: Layout, compiler: str = CLANG) -> None:
    """Nothing lies in scratch memory, all its instructions are known, with every modifier, and nothing is amiss."""
    one, kernel = made(layout, compiler)
    assert one.kernels[kernel][".private_segment_fixed_size"] == 0
    decode(one.code(kernel)[1], operations())
    assert amiss(one, kernel) == []
