"""How the CUDA kernel's source becomes a cubin: by nvcc where there is no NVRTC, kept by content, refusals told.

The nvcc here is a script that writes down its arguments; what it makes of a source is the source.
"""

import functools
import os
import re
import sys
import time
import types
from pathlib import Path

import pytest

from kog_triton.backends.cuda import compile_child, jit, kernel_cache, toolchain
from kog_triton.backends.cuda.compile_child import Refused
from kog_triton.backends.cuda_archs import HOPPER
from kog_triton.errors import DeviceError
from tests.lib import nvrtc
from tests.lib.cuda_planting import plant
from tests.lib.cuda_walk import INCLUDE

NVCC = r"""#!/bin/sh
if [ "$1" = --version ]; then
  printf 'nvcc: NVIDIA (R) Cuda compiler driver\nBuild cuda_%s\n' "$(cat {folder}/version)"
  exit
fi
echo "$@" >> {folder}/calls
for last; do out=$last; case $last in *.cu) source=$last;; esac; done
if grep -q REFUSED "$source"; then
  echo 'decode.cu(7): error: expected a ";"' >&2
  exit 2
fi
cp "$source" "$out"
"""
FLAGS = toolchain.flags_for(HOPPER)


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """A folder with the version and the calls of a fake nvcc, the only compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "version").write_text("13.0")
    (folder / "calls").touch()
    script = folder / "nvcc"
    script.write_text(NVCC.replace("{folder}", str(folder)))
    script.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda: None)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_cache, "_unwritten", {})
    return folder


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def kept() -> list[str]:
    return sorted(path.name for path in kernel_cache.cache_folder().iterdir())


def test_nvcc_compiles_where_there_is_no_nvrtc(nvcc):
    assert toolchain.compiler_name() == "nvcc Build cuda_13.0"
    header = "constexpr int kBlocks = 3;\n"
    assert jit.compile_cubin(header).decode() == header + (toolchain.FOLDER / "decode.cu").read_text()
    (call,) = calls(nvcc)
    for flag in ("-cubin", "-std=c++20", "--gpu-architecture=sm_90a", f"-I{toolchain.INCLUDE}"):
        assert flag in call.split()
    assert toolchain.INCLUDE.samefile(INCLUDE)


def test_a_cubin_is_kept_by_content(nvcc, tmp_path, monkeypatch):
    first = jit.compile_cubin("// a\n")
    assert jit.compile_cubin("// a\n") == first and len(calls(nvcc)) == 1
    jit.compile_cubin("// b\n")
    jit.compile_cubin("// a\n", "stage.cu")
    assert len(calls(nvcc)) == 3
    (nvcc / "version").write_text("13.1")
    jit.compile_cubin("// a\n")
    assert len(calls(nvcc)) == 4
    monkeypatch.setattr(toolchain, "INCLUDE", plant(tmp_path, ("block.h", "#pragma once", "#pragma once ")))
    jit.compile_cubin("// a\n")  # a header that it may include is another
    assert len(calls(nvcc)) == 5 and f"-I{toolchain.INCLUDE}" in calls(nvcc)[-1].split()
    jit.compile_cubin("// a\n")
    assert len(calls(nvcc)) == 5
    names = kept()  # and nothing beside them
    assert len(names) == 5 and all(re.fullmatch(r"[0-9a-f]{32}\.cubin", name) for name in names)


def test_a_compiler_that_does_not_say_its_version_is_one_line(nvcc, monkeypatch):
    def broken():
        raise OSError("libnvrtc.so.13: cannot open\nmore")

    (nvcc / "nvcc").write_text("#!/bin/sh\necho no licence >&2\nexit 3\n")
    with pytest.raises(DeviceError, match=r"^\S*/nvcc --version fails: no licence$"):
        toolchain.compiler_name()
    monkeypatch.setattr(toolchain, "SAY_S", 0.2)
    (nvcc / "nvcc").write_text("#!/bin/sh\nexec sleep 5\n")
    with pytest.raises(DeviceError, match=r"^\S*/nvcc --version does not end within 0\.2 s$"):
        toolchain.compiler_name()
    monkeypatch.setattr(toolchain, "find_nvrtc", broken)
    with pytest.raises(DeviceError, match=r"^NVRTC does not load: libnvrtc.so.13: cannot open: "):
        toolchain.compiler_name()


def test_the_compilers_words_are_told_and_nothing_is_kept(nvcc):
    with pytest.raises(DeviceError, match=r"nvcc refuses the kernel:\ndecode.cu\(7\): error: expected"):
        jit.compile_cubin("// REFUSED\n")
    assert not kernel_cache.cache_folder().exists() or kept() == []
    with pytest.raises(DeviceError):
        jit.compile_cubin("// REFUSED\n")
    assert len(calls(nvcc)) == 2  # asked again


def test_the_log_tells_when_a_compiler_starts_and_how_long_it_took(nvcc, caplog):
    caplog.set_level("INFO", "kog_triton.compilers")
    jit.compile_cubin("// a\n")
    started, ended = caplog.messages
    assert started == "compiling decode.cu by nvcc Build cuda_13.0, once for this model"
    assert re.fullmatch(r"compiled decode.cu in \d+\.\d s", ended)
    caplog.clear()
    jit.compile_cubin("// a\n")
    assert caplog.messages == []


def test_without_a_compiler_the_error_says_what_to_install(nvcc, monkeypatch):
    (nvcc / "nvcc").unlink()
    monkeypatch.setenv("PATH", str(nvcc))
    with pytest.raises(DeviceError, match="pip install cupy-cuda13x, or put nvcc on the PATH"):
        toolchain.compiler_name()


def test_what_was_begun_is_waited_for_and_compiled_once(nvcc):
    jit.begin_cubin("// a\n")
    jit.begin_cubin("// a\n")
    assert jit.compile_cubin("// a\n").startswith(b"// a\n")
    assert len(calls(nvcc)) == 1 and len(kept()) == 1 and not jit._begun
    jit.begin_cubin("// a\n")  # it is kept
    assert not jit._begun and jit.compile_cubin("// a\n").startswith(b"// a\n")
    assert len(calls(nvcc)) == 1


def test_what_was_begun_and_refused_is_told_to_who_asks(nvcc):
    jit.begin_cubin("// REFUSED\n")
    for count in (1, 2):  # the second time it is compiled again
        with pytest.raises(DeviceError, match="nvcc refuses the kernel"):
            jit.compile_cubin("// REFUSED\n")
        assert len(calls(nvcc)) == count


def test_what_was_begun_and_failed_is_begun_again(nvcc):
    for count in (1, 2):
        jit.begin_cubin("// REFUSED\n")
        (begun,) = jit._begun.values()
        assert begun.exception(60) is not None and len(calls(nvcc)) == count
    jit._begun.clear()


@pytest.fixture
def library(monkeypatch):
    """NVIDIA's own, of the wheel that torch brings, where no cupy says where it is."""
    library = nvrtc.needed()
    monkeypatch.setattr(compile_child, "find_nvrtc", lambda: library)
    return compile_child.nvrtc_name(library)


@pytest.mark.parametrize("source", ["decode.cu", "columns.cu", "stage.cu"])
def test_nvrtc_calls_a_program_by_its_source(library, source):
    """Its errors and the machine code's lines name it."""
    text = 'extern "C" __global__ void kog_kernel(int* p) { *p = 3; }\n'
    cubin = compile_child.translate(text, source, FLAGS, library)
    assert cubin.startswith(b"\x7fELF") and source.encode() in cubin and b"kog_kernel" in cubin
    says = rf"NVRTC refuses the kernel: nvrtcCompileProgram: NVRTC_ERROR_COMPILATION \(6\)\n{source}\(1\): error"
    with pytest.raises(Refused, match=says):
        compile_child.translate(text.replace("= 3", "= q"), source, FLAGS, library)


def test_another_nvrtc_than_was_named_compiles_nothing(library):
    """It would be kept under the other's name."""
    with pytest.raises(Refused, match=rf"^a compiler's process finds {library}, and the one that asks nvrtc 12\.9: "):
        compile_child.translate("", "decode.cu", FLAGS, "nvrtc 12.9")


def test_a_library_that_went_away_is_told(monkeypatch):
    monkeypatch.setattr(compile_child, "find_nvrtc", lambda: None)
    with pytest.raises(Refused, match=r"libnvrtc\.so is not there any more"):
        compile_child.translate("// a\n", "decode.cu", FLAGS, "nvrtc 13.0")


def pathfinder(monkeypatch, find):
    """cupy's finder of libraries, as far as it is asked here."""
    module = types.ModuleType("cuda.pathfinder")
    module.DynamicLibNotFoundError = type("DynamicLibNotFoundError", (RuntimeError,), {})
    module.load_nvidia_dynamic_lib = functools.partial(find, module)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", module)


def test_nvrtc_is_where_cupy_finds_it(monkeypatch, library):
    asked = []

    def find(module, name):
        asked.append(name)
        return types.SimpleNamespace(abs_path=nvrtc.place())

    monkeypatch.undo()
    pathfinder(monkeypatch, find)
    assert re.fullmatch(r"nvrtc 1\d\.\d", toolchain.compiler_name()) and asked == ["nvrtc"]


def test_without_the_library_nvcc_compiles(monkeypatch, nvcc):
    def find(module, name):
        raise module.DynamicLibNotFoundError(name)

    pathfinder(monkeypatch, find)
    monkeypatch.setattr(toolchain, "find_nvrtc", compile_child.find_nvrtc)
    assert toolchain.compiler_name().startswith("nvcc ")


def test_a_library_that_does_not_load_is_one_line(monkeypatch):
    """cupy's finder has an error of its own for it."""

    def find(module, name):
        raise RuntimeError("Failed to dlopen /x/libnvrtc.so.13: no such file\nmore")

    pathfinder(monkeypatch, find)
    said = r"^NVRTC does not load: Failed to dlopen /x/libnvrtc.so.13: no such file: install cupy"
    with pytest.raises(DeviceError, match=said):
        toolchain.compiler_name()


# ---- a cache that does not do its work ----


def no_room(*arguments):
    raise OSError(28, "No space left on device")


def no_home():
    raise RuntimeError("Could not determine home directory.")


def make_unwritable(how, patched):
    """A cache whose folder cannot be made, or has no room, of a kernel's first byte or of its last."""
    if how == "no home":
        patched.delenv("XDG_CACHE_HOME")
        patched.setattr(Path, "home", no_home)
    elif how in ("fdopen", "replace"):
        patched.setattr(os, how, no_room)
    else:
        patched.setenv("XDG_CACHE_HOME", how)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("how", ["/proc/none", __file__, "no home", "fdopen", "replace"])
def test_a_cache_that_cannot_be_written_costs_a_compilation(nvcc, tmp_path, monkeypatch, caplog, how, begun):
    with monkeypatch.context() as patched:
        make_unwritable(how, patched)
        if begun:
            jit.begin_cubin("// a\n")
        for _ in range(2):  # in this process once
            assert jit.compile_cubin("// a\n").startswith(b"// a\n") and len(calls(nvcc)) == 1
        jit.compile_cubin("// b\n")
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "kept, so" in r.message]
    assert "set XDG_CACHE_HOME to a folder that can be written to" in said and "\n" not in said
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.cubin"))
    monkeypatch.setattr(kernel_cache, "_unwritten", {})  # as in the next process
    jit.compile_cubin("// a\n")
    assert len(calls(nvcc)) == 3 and len(kept()) == 1


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "a folder"])
def test_a_damaged_kernel_is_compiled_again(nvcc, caplog, damage, begun):
    whole = jit.compile_cubin("// a\n")
    (place,) = kernel_cache.cache_folder().iterdir()
    data = place.read_bytes()
    place.unlink()
    if damage == "a folder":
        place.mkdir()
    else:
        place.write_bytes({"empty": b"", "cut": data[:-9], "changed": b"#" + data[1:]}[damage])
    caplog.clear()
    if begun:
        jit.begin_cubin("// a\n")
    assert jit.compile_cubin("// a\n") == whole and len(calls(nvcc)) == 2
    assert any("damaged" in line or "no kept kernel can be read" in line for line in caplog.messages)
    if damage != "a folder":
        assert jit.compile_cubin("// a\n") == whole and len(calls(nvcc)) == 2
        assert place.read_bytes() == data


def test_kernels_that_were_used_longest_ago_make_room(nvcc, monkeypatch):
    places = {}
    for number, name in enumerate("abc"):
        jit.compile_cubin(f"// {name}\n")
        (places[name],) = {*kernel_cache.cache_folder().iterdir()} - {*places.values()}
        os.utime(places[name], (1000 + number, 1000 + number))
    jit.compile_cubin("// a\n")  # is used again, before b and c
    size = places["a"].stat().st_size
    monkeypatch.setattr(kernel_cache, "MOST_BYTES", 3 * size)
    jit.compile_cubin("// d\n")
    assert {name for name, place in places.items() if place.exists()} == {"a", "c"}
    monkeypatch.setattr(kernel_cache, "MOST_BYTES", size)
    jit.compile_cubin("// e\n")
    assert len(kept()) == 1 and jit.compile_cubin("// e\n") and len(calls(nvcc)) == 5


def test_drafts_of_dead_processes_are_removed_and_those_of_others_are_not(nvcc):
    folder = kernel_cache.cache_folder()
    folder.mkdir(parents=True)
    for name, age in (("dead.part", 2 * kernel_cache.DRAFT_S), ("alive.part", 60), ("mine.txt", 1e6)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age,) * 2)
    jit.compile_cubin("// a\n")
    assert [name for name in kept() if not name.endswith(".cubin")] == ["alive.part", "mine.txt"]
