"""Activations as bytes (include/kog/bytes.h): how far they are from what they stand for, by the kernel's own C++."""

import ctypes
import subprocess

import numpy as np
import pytest
import torch

from tests.lib.compiled import made_once, version_of
from tests.lib.cuda_planting import plant
from tests.lib.cuda_walk import HERE, INCLUDE, header, layout_of
from tests.lib.ring_walker import spec_of

# Values of K that share a scale: a step's or, of int4 with one scale a row, a fragment's.
SHARED = (32, 128)
STEP = SHARED[0]
# Of such values together, over their length. bfloat16 has eight bits: rounding is off by 2^-8 at most.
BOUNDS, BF16_BOUND = {32: 2**-12.4, 128: 2**-11.4}, 2**-8
AS_BYTES = """
#include GENERATED
#include <kog/bytes.h>
template <int N>
void as_bytes(const float* x, int count, float* scales, signed char* high, signed char* low, int* sums) {
  using namespace kog;
  for (; count > 0; count--, x += N, high += N, low += N, scales++, sums++) {
    float all[N];
    for (int i = 0; i < N; i++) all[i] = x[i];
    WholeScale scale(largest_of(all));
    *scales = scale.scale, *sums = 0;
    for (int i = 0; i < N; i += 4) {
      FourBytes four({x[i], x[i + 1], x[i + 2], x[i + 3]}, scale.inverse);
      for (int j = 0; j < 4; j++) high[i + j] = four.high >> 8 * j, low[i + j] = four.low >> 8 * j;
      *sums += static_cast<int>(four.sum);
    }
    if (*scales > 0 && WholeScale::inverse_of(*scales) != scale.inverse) *sums = 1 << 30;
  }
}
extern "C" {
void as_bytes_32(const float* x, int count, float* scales, signed char* high, signed char* low, int* sums) {
  as_bytes<32>(x, count, scales, high, low, sums);
}
void as_bytes_128(const float* x, int count, float* scales, signed char* high, signed char* low, int* sums) {
  as_bytes<128>(x, count, scales, high, low, sums);
}
}
"""


def compiled(include=INCLUDE):
    generated = header.render(layout_of(spec_of()))
    headers = [*sorted(HERE.rglob("*.h")), *sorted((include / "kog").rglob("*.h"))]

    def make(draft):
        text, own = draft.with_suffix(".cpp"), draft.with_suffix(".h")
        text.write_text(AS_BYTES)
        own.write_text(generated)
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{HERE}"]
        command += [f"-I{include}", f'-DGENERATED="{own}"', str(text), "-o", str(draft)]
        subprocess.run(command, check=True)

    parts = [version_of("g++"), AS_BYTES.encode(), generated.encode()]
    return ctypes.CDLL(str(made_once([*parts, *(h.read_bytes() for h in headers)], make)))


def as_bytes(x, library):
    """Scales [n], whole numbers [n, 32 or 128] and their sums [n] of float32 [n, 32 or 128]."""
    x = np.ascontiguousarray(x, np.float32)
    scales, sums = np.zeros(len(x), np.float32), np.zeros(len(x), np.int32)
    high, low = np.zeros((2, *x.shape), np.int8)
    convert = getattr(library, f"as_bytes_{x.shape[1]}")
    convert(*(a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a
              for a in (x, len(x), scales, high, low, sums)))  # fmt: skip
    whole = 256 * high.astype(np.int64) + low
    return scales.astype(np.float64), whole, sums


NAMES = ("normal", "outliers", "spread", "edges")


def cases(shared):
    draw = np.random.default_rng(0)
    normal = draw.standard_normal((4000, shared))
    outliers = normal * np.where(draw.random(normal.shape) < 0.02, 300, 1)
    spread = normal * np.exp2(draw.integers(-80, 80, (4000, 1)))
    # Of each exponent the largest, which rounds up, and just what surrounds the places where scales change.
    edges = np.full((4 * 126, shared), 1.0)
    tops = [2 - 2.0**-23, 2 - 2.0**-7, 2 - 2.0**-7 - 2.0**-8, 2 - 2.0**-7 + 2.0**-8]
    edges *= (np.exp2(np.arange(126.0))[:, None] * tops).reshape(-1, 1)
    edges[:, 1::2] *= -1
    edges[:, 5:] *= draw.random((len(edges), shared - 5))
    return dict(zip(NAMES, (normal, outliers, spread, edges), strict=True))


@pytest.fixture(scope="module")
def library():
    return compiled()


def worst(x, library):
    """The largest error of values that share a scale over their length; AssertionError if it is not rounding to
    nearest."""
    x = x.astype(np.float32).astype(np.float64)
    scales, whole, sums = as_bytes(x, library)
    error = np.abs(scales[:, None] * whole - x)
    assert (error <= scales[:, None] / 2).all()
    assert np.array_equal(sums, whole.sum(1))
    return float((np.sqrt((error**2).sum(1)) / np.sqrt((x**2).sum(1))).max())


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_keep_more_than_bfloat16(name, shared, library):
    x = cases(shared)[name]
    assert worst(x, library) <= BOUNDS[shared] < BF16_BOUND / (16 if shared == STEP else 8)
    rounded = torch.from_numpy(x.astype(np.float32)).bfloat16().double().numpy()
    off = np.sqrt(((rounded - x) ** 2).sum(1) / (x**2).sum(1))
    assert 2 * worst(x, library) < off.max() <= BF16_BOUND


@pytest.mark.parametrize("shared", SHARED)
def test_the_bound_is_that_of_one_large_value(shared, library):
    """All others lie halfway between whole numbers: no values are further off."""
    x = np.full((1, shared), 0.5 * 2.0**-14)
    x[0, 0] = 1
    bound = BOUNDS[shared] * 2**-0.1
    assert 0.9 * bound < worst(x, library) <= bound


def test_zeros_are_zero_and_tiny_values_stay_finite(library):
    x = np.zeros((3, STEP))
    x[1:, 3] = 1e-38, -1e-45
    scales, whole, sums = as_bytes(x, library)
    assert np.isfinite(scales).all() and (scales > 0).all()
    assert not whole[0].any() and not sums[0]
    assert np.abs(scales * whole[:, 3] - x[:, 3]).max() < 2.0**-112


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_sums_that_are_none(value, library):
    x = np.ones((2, STEP))
    x[1, 7] = value
    scales, _, _ = as_bytes(x, library)
    assert np.isfinite(scales[0]) and np.isnan(scales[1])


PLANTED = {
    "no room for what rounds up": ("kStepRoom = 0x18000u;", "kStepRoom = 0;"),
    "a scale twice as large": ("(exponent - 14) << 23 : 0x", "(exponent - 13) << 23 : 0x"),
    "eight bits": ("float_of((268 - exponent) << 23);", "float_of((260 - exponent) << 23);"),
    "low bytes as they are": (" ^ 0x80808080u;", ";"),
    "the bytes of a neighbour": ("pick_bytes(w[2], w[3], 0x5140)", "pick_bytes(w[3], w[2], 0x5140)"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_seen(what, tmp_path):
    faulty = compiled(plant(tmp_path, ("bytes.h", *PLANTED[what])))
    with pytest.raises(AssertionError):
        for x in cases(STEP).values():
            assert worst(x, faulty) <= BOUNDS[STEP]
