"""In the HIP kernel's headers."""

from tests.planted.fault import Fault

FAULTS = (
    Fault(
        "backends/hip/include/kog/mma/products.h",
        "int group = b.warp % 2 * 2 + b.in_warp / 16",
        "int group = b.in_warp / 16",
        "gfx942/test_hip_fibers.py",
        "the second warp of a wave keeps the first one's products",
    ),
    Fault(
        "backends/hip/include/kog/ring.h",
        "if (b.thread < kWarps) b.small->waits",
        "if (b.thread < kThreads) b.small->waits",
        "gfx942/test_hip_fibers.py",
        "a block clears LDS behind its waits",
    ),
    Fault(
        "backends/hip/include/kog/place.h",
        "kCountsAt = kBlocks * 4;",
        "kCountsAt = kBlocks * 4 + 2;",
        "gfx942/test_hip_fibers.py",
        "counts of XCDs lie across words of LDS",
    ),
    Fault(
        "backends/hip/include/kog/place.h",
        "counts->before[b.thread] = before;\n  }\n  sync_consumers();",
        "counts->before[b.thread] = before;\n  }",
        "gfx942/test_hip_fibers.py",
        "counts of XCDs are read before all are there",
    ),
)
