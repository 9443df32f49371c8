"""What compiles for an AMD GPU: clang++, hipcc or hipRTC, whichever is there, makes the same machine code, ROCm's
headers before our text or not."""

import re
import shutil
import subprocess
import time

import pytest

from kog_triton.backends.cuda import compile_child, jit, kernel_cache
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.hip import selftest, toolchain
from kog_triton.backends.hip.column_layout import lay_out_columns
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.backends.hip.toolchain import MI300
from kog_triton.errors import DeviceError
from kog_triton.schedule.hip import lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib import nvrtc
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.hip_nvidia import Toolchain as OnNvidia
from tests.lib.ring_walker import f16_spec

CLANG = "clang++-19"
# What hipRTC and hipcc put before a text declares types and macros; these stand for those whose names are ours too.
BEFORE = """
struct uint2 { unsigned a; };
struct uint4 { unsigned a; };
struct float2 { float a; };
struct float4 { float a; };
struct ulonglong2 { unsigned long long a; };
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
__device__ inline unsigned __lane_id() { return __builtin_amdgcn_mbcnt_lo(~0u, 0); }
"""
# A libhiprtc that hands its text to clang, with BEFORE before it; 6 is its own HIPRTC_ERROR_COMPILATION.
HIPRTC = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static char text[1 << 24], code[1 << 24], said[1 << 16];
static size_t size;
static size_t read_all(const char* path, char* to, size_t most) {
  FILE* f = fopen(path, "rb");
  size_t n = f ? fread(to, 1, most - 1, f) : 0;
  if (f) fclose(f);
  to[n] = 0;
  return n;
}
int hiprtcVersion(int* major, int* minor) { *major = 7; *minor = 1; return 0; }
const char* hiprtcGetErrorString(int e) { return e == 6 ? "HIPRTC_ERROR_COMPILATION" : "?"; }
int hiprtcCreateProgram(void** p, const char* s, const char* name, int n, const char** h, const char** i) {
  snprintf(text, sizeof text, "%s%s", BEFORE, s);
  *p = text;
  return 0;
}
int hiprtcCompileProgram(void* p, int n, const char** options) {
  static char command[1 << 14];
  FILE* f = fopen(FOLDER "/text.hip", "w");
  fputs(text, f);
  fclose(f);
  strcpy(command, CLANG " -x hip --offload-device-only --no-gpu-bundle-output -nogpuinc -nogpulib");
  for (int i = 0; i < n; i++) strcat(strcat(command, " "), options[i]);
  strcat(command, " " FOLDER "/text.hip -o " FOLDER "/code 2> " FOLDER "/said");
  int status = system(command);
  read_all(FOLDER "/said", said, sizeof said);
  size = read_all(FOLDER "/code", code, sizeof code);
  return status ? 6 : 0;
}
int hiprtcGetCodeSize(void* p, size_t* n) { *n = size; return 0; }
int hiprtcGetCode(void* p, char* to) { memcpy(to, code, size); return 0; }
int hiprtcGetProgramLogSize(void* p, size_t* n) { *n = strlen(said) + 1; return 0; }
int hiprtcGetProgramLog(void* p, char* to) { strcpy(to, said); return 0; }
int hiprtcDestroyProgram(void** p) { return 0; }
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Where nothing of AMD's is to be found; what a test puts into its folder `bin` is on the PATH."""
    if shutil.which(CLANG) is None:
        pytest.skip(f"{CLANG} is not there: apt-get install clang-19 lld-19")
    monkeypatch.setattr(kernel_cache, "_unwritten", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    usual = shutil.which(CLANG)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path, usual


def code() -> CodeObject:
    return CodeObject(jit.compile_cubin(selftest.HEADER, "selftest.hip", MI300, tools=toolchain))


def as_clang(machine, name="clang++-19"):
    folder, clang = machine
    (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {clang} $KOG_TEST_FLAGS "$@"\n')
    (folder / "bin" / name).chmod(0o755)


def by_clang(machine) -> str:
    as_clang(machine)
    made = code().sha256
    (machine[0] / "bin/clang++-19").unlink()
    return made


def test_clang_then_hipcc_then_hiprtc(machine):
    assert toolchain.compilers() == {"clang++": "", "hipcc": "", "hipRTC": ""}
    with pytest.raises(DeviceError, match=r"none of clang\+\+, hipcc, hipRTC: install ROCm"):
        toolchain.compiler_name()
    hiprtc(machine)
    assert toolchain.compiler_name() == f"hipRTC: 7.1 of {machine[0]}/lib/libhiprtc.so"
    as_clang(machine, "hipcc")
    assert toolchain.compiler_name().startswith("hipcc: ")
    as_clang(machine)
    assert toolchain.compiler_name().startswith("clang++: ")


def stand_in(place, version, lld="/bin/true"):
    """A clang++ that says a version, and where it finds lld."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f'#!/bin/sh\necho "some clang version {version}.1.0 (x)" >&2\necho {lld}\n')
    place.chmod(0o755)


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """Two folders on the PATH, with nothing in them, nor in ROCm's."""
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    both = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("PATH", ":".join(map(str, both)))
    return both


def test_the_newest_clang_of_18_or_newer_is_taken(folders):
    """By what it says, whatever its name and wherever on the PATH."""
    first, second = folders
    stand_in(first / "clang++", 14)
    stand_in(first / "clang++-18", 18)
    stand_in(second / "clang++", 21)
    stand_in(second / "clang++-19", 19)
    stand_in(second / "clang++-25", 25, lld="lld")  # which is nowhere
    stand_in(second / "clang++-wrapper", 26)
    name = "clang++: some clang version 21.1.0 (x) of"
    assert toolchain.compiler_name() == f"{name} {second}/clang++"
    (second / "clang++").unlink()
    assert toolchain.compiler_name().endswith("/second/clang++-19")
    stand_in(second / "clang++-25", 25)
    assert toolchain.compiler_name().endswith("/second/clang++-25")


def test_rocms_clang_is_taken_before_a_newer_one(folders):
    rocm = folders[0].parent / "rocm/llvm/bin/clang++"
    stand_in(folders[0] / "clang++", 21)
    stand_in(rocm, 18)
    assert toolchain.compiler_name().endswith(f" of {rocm}")
    stand_in(rocm, 17)
    assert toolchain.compiler_name().endswith("/first/clang++")


def test_a_clang_that_is_of_no_use_is_named(folders):
    first, second = folders
    stand_in(first / "clang++-14", 14)
    (first / "clang++").symlink_to("clang++-14")  # said once
    stand_in(second / "clang++-19", 19, lld="lld")
    (second / "clang++").write_text("no program")
    (second / "clang++").chmod(0o755)
    why = (
        f"clang++ 19 at {second}/clang++-19 finds no lld, "
        f"clang++ 14 at {first}/clang++ is older than 18, "
        f"clang++ at {second}/clang++ does not say its version"
    )
    with pytest.raises(DeviceError) as told:
        toolchain.compiler_name()
    assert f"none of clang++, hipcc, hipRTC ({why}): install ROCm" in str(told.value)
    assert toolchain.compilers_in_words() == f"clang++: {why}, hipcc: not found, hipRTC: not found"
    stand_in(second / "hipcc", 6)
    assert toolchain.compiler_name() == f"hipcc: /bin/true of {second}/hipcc"


def test_a_compiler_that_hangs_is_named(folders, monkeypatch):
    monkeypatch.setattr(toolchain.cuda, "SAY_S", 0.2)
    folder, begun = folders[0], time.monotonic()
    for name in ("clang++", "hipcc"):
        stand_in(folder / name, 0)
        (folder / name).write_text("#!/bin/sh\nexec /bin/sleep 5\n")
    why = (f"{name} at {folder}/{name} does not say its version" for name in ("clang++", "hipcc"))
    with pytest.raises(DeviceError, match=re.escape(f" ({', '.join(why)}): install ROCm")):
        toolchain.compiler_name()
    assert time.monotonic() - begun < 4


def test_a_compiler_is_run_where_it_lies(folders, monkeypatch):
    clang = folders[0] / "kit of tools" / "clang++"
    stand_in(clang, "21 of a vendor")
    made = 'for last; do :; done\ncase $last in /*) echo made > "$last";; esac\n'
    clang.write_text(clang.read_text() + made)
    monkeypatch.setenv("PATH", str(clang.parent))
    assert compile_child.translate("", "a.hip", [], toolchain.compiler_name()) == b"made\n"


def test_hipcc_makes_what_clang_makes(machine, monkeypatch):
    expected = by_clang(machine)
    as_clang(machine, "hipcc")
    (machine[0] / "before.h").write_text(BEFORE)
    monkeypatch.setenv("KOG_TEST_FLAGS", "")
    assert toolchain.compiler_name().startswith("hipcc: ")
    monkeypatch.setenv("KOG_TEST_FLAGS", f"-include {machine[0]}/before.h")
    assert code().sha256 == expected


def hiprtc(machine):
    folder, clang = machine
    before = BEFORE.replace("\n", "\\n")
    how = [f'-DFOLDER="{folder}"', f'-DCLANG="{clang}"', f'-DBEFORE="{before}"']
    gcc = ["/usr/bin/gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", folder / "lib/libhiprtc.so", *how]
    subprocess.run(gcc, input=HIPRTC.encode(), check=True, env={"PATH": "/usr/bin:/bin"})


def test_hiprtc_makes_what_clang_makes(machine):
    expected = by_clang(machine)
    hiprtc(machine)
    assert toolchain.compiler_name().startswith("hipRTC: ")
    assert code().sha256 == expected


def test_what_hiprtc_says_is_told(machine, monkeypatch):
    hiprtc(machine)
    monkeypatch.setattr(toolchain, "FLAGS", ("-no-such-flag",))
    with pytest.raises(DeviceError, match=r"hipRTC refuses the kernel: hiprtcCompileProgram(.|\n)*no-such-flag"):
        code()


@pytest.mark.parametrize("source", ["decode", "columns", "stage"])
def test_nvrtc_compiles_the_source_for_an_nvidia_gpu(source):
    """Over another seam, for tests/gpu/test_hip_nvidia.py."""
    library = nvrtc.load()
    if library is None:
        pytest.skip("the wheel nvidia-cuda-nvrtc is not there")
    lowering = lower_hip(build(f16_spec()), GPUS["mi300x"], 8)
    columns = source == "columns"
    layout = lay_out_columns(lowering, 64, 2) if columns else lay_out_hip(lowering, 64)
    text = render(layout) + (toolchain.FOLDER / f"{source}.hip").read_text()
    cubin = nvrtc.compile_cubin(library, text, OnNvidia().flags_for("sm_90a"))
    assert cubin.startswith(b"\x7fELF") and f"kog_{source}".encode() in cubin
