"""How the CUDA kernel's source becomes a cubin: by nvcc where there is no NVRTC, kept by content, refusals told.

The nvcc here is a script that writes down its arguments; what it makes of a source is the source.
"""

import os
import re
from pathlib import Path

import pytest
from kog_triton.backends.cuda import jit

from kog_triton.errors import DeviceError
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
    monkeypatch.setattr(jit, "_nvrtc", lambda: None)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def kept() -> list[str]:
    return sorted(path.name for path in jit.cache_folder().iterdir())


def test_nvcc_compiles_where_there_is_no_nvrtc(nvcc):
    assert jit.compiler_name() == "nvcc Build cuda_13.0"
    header = "constexpr int kBlocks = 3;\n"
    assert jit.compile_cubin(header).decode() == header + (jit.FOLDER / "decode.cu").read_text()
    (call,) = calls(nvcc)
    for flag in ("-cubin", "-std=c++20", "--gpu-architecture=sm_90a", f"-I{INCLUDE}"):
        assert flag in call.split()


def test_a_cubin_is_kept_by_content(nvcc, tmp_path, monkeypatch):
    first = jit.compile_cubin("// a\n")
    assert jit.compile_cubin("// a\n") == first and len(calls(nvcc)) == 1
    jit.compile_cubin("// b\n")
    jit.compile_cubin("// a\n", "stage.cu")
    assert len(calls(nvcc)) == 3
    (nvcc / "version").write_text("13.1")
    jit.compile_cubin("// a\n")
    assert len(calls(nvcc)) == 4
    monkeypatch.setattr(
        jit, "INCLUDE", plant(tmp_path, ("block.h", "#pragma once", "#pragma once "))
    )
    jit.compile_cubin("// a\n")  # a header that it may include is another
    assert len(calls(nvcc)) == 5
    jit.compile_cubin("// a\n")
    assert len(calls(nvcc)) == 5
    names = kept()  # and nothing beside them
    assert len(names) == 5 and all(re.fullmatch(r"[0-9a-f]{32}\.cubin", name) for name in names)


def test_the_compilers_words_are_told_and_nothing_is_kept(nvcc):
    with pytest.raises(
        DeviceError, match=r"nvcc refuses the kernel:\ndecode.cu\(7\): error: expected"
    ):
        jit.compile_cubin("// REFUSED\n")
    assert not jit.cache_folder().exists() or kept() == []
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
        jit.compiler_name()


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
