"""`--backend hip` from end to end on a CPU: its host's side calls a libamdhip64 whose GPU is the executor.

Everything but the library and what torch says of the GPU is what a user of an MI300X runs: choice, compiler, cache,
launches of the real code object, words, serving.
"""

import ctypes
import gc
import logging
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from kog_triton import LLM, SamplingParams
from kog_triton import prebuild as prebuild_command
from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import jit, kernel_cache
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.hip import column_layout, driver, objects, prebuild, selftest, toolchain
from kog_triton.backends.hip.backend import HipBackend
from kog_triton.backends.mailbox import Mailbox
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.errors import DeviceError
from kog_triton.model.shapes import named_shape
from kog_triton.schedule.hip import THREADS
from kog_triton.schedule.topology import GPUS
from tests.lib.compiled import made_once
from tests.lib.fake_hip import FakeHip
from tests.lib.gfx942.executor import WEAK, operations
from tests.lib.gfx942.hip_lives import LIVES
from tests.lib.gfx942.requests import ASKED, tokens_of
from tests.lib.gfx942.requests import expected as expected_of
from tests.lib.gfx942.triton_backend import Conditions
from tests.lib.gfx942.triton_cases import CASES
from tests.lib.hip_machine import install, save_model, see
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.refusals import refusal

PROMPTS = [[3, 42, 12], [7, 7, 30, 1]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=6, ignore_eos=True)
BLOCKS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def hip(monkeypatch):
    fake = FakeHip()
    install(fake, monkeypatch, BLOCKS)
    return fake


def open_hip(model, **options):
    return LLM(model, backend="hip", skip_tokenizer_init=True, **options)


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(model):
    """What the reference makes of prompts and parameters."""
    with LLM(model, backend="reference", skip_tokenizer_init=True) as llm:
        yield lambda prompts, params: ids(llm.generate(prompts, params))


# ---- requests ----


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_requests_one_after_the_other(hip, model, expected, params):
    with open_hip(model) as llm:
        assert llm.choice.name == "hip"
        for prompt in PROMPTS:
            assert ids(llm.generate(prompt, params)) == expected(prompt, params)
    assert hip.launches == 1 + len(PROMPTS)  # the self-test; a request is one launch
    assert not hip._modules  # and nothing stays loaded


def test_requests_beside_each_other(hip, model, expected):
    """The launch ends with the first of them; the other goes on in the next where it stood."""
    params = [replace(GREEDY, max_tokens=3), GREEDY]
    with open_hip(model, num_slots=2) as llm:
        assert ids(llm.generate(PROMPTS, params)) == expected(PROMPTS, params)
    assert hip.launches >= 1 + 2


def test_log_probabilities_are_the_references(hip, model):
    params = replace(GREEDY, logprobs=3)
    told = []
    for backend in ("hip", "reference"):
        with LLM(model, backend=backend, skip_tokenizer_init=True) as llm:
            (output,) = llm.generate(PROMPTS[0], params)
        told.append([{i: one.logprob for i, one in at.items()} for at in output.outputs[0].logprobs])
    for ours, theirs in zip(*told, strict=True):
        assert ours == pytest.approx(theirs, abs=0.02)


def test_masks_of_the_host_are_waited_for(hip):
    case = CASES["llama"]
    backend = HipBackend(ArrayWeights(case.spec), BackendOptions(max_context=64))
    mailbox = Mailbox()
    mailbox.post(ASKED["masks"].request())
    try:
        backend.generate(mailbox)
    finally:
        backend.close()
    assert tokens_of(mailbox.read(0, 0)) == expected_of("llama", "masks")


@pytest.mark.parametrize("life", LIVES)
def test_what_a_request_meets_changes_no_token(life):
    assert LIVES[life](Conditions(WEAK, 1))


def test_tokens_stream_while_the_kernel_runs(hip, model, expected):
    made, beside = [], 0
    with open_hip(model) as llm:
        for delta in llm.stream(PROMPTS[0], GREEDY):
            made += delta.token_ids
            beside += hip._queue[-1].is_alive()
    assert [made] == expected(PROMPTS[0], GREEDY)
    assert beside >= 2


def test_a_cancelled_request_leaves_its_slot_to_the_next(hip, model, expected):
    long = replace(GREEDY, max_tokens=60)
    with open_hip(model) as llm:
        generation = llm.stream(PROMPTS[0], long)
        first = next(iter(generation)).token_ids
        generation.cancel()
        rest = [delta.token_ids for delta in generation]
        generation.close()
        made = [*first, *(token for delta in rest for token in delta)]
        assert 1 <= len(made) < 60
        assert made == expected(PROMPTS[0], long)[0][: len(made)]
        assert ids(llm.generate(PROMPTS[1], GREEDY)) == expected(PROMPTS[1], GREEDY)


def test_an_end_id_ends_a_request(hip, model, expected):
    (tokens,) = expected(PROMPTS[0], GREEDY)
    params = replace(GREEDY, stop_token_ids=(tokens[3],), ignore_eos=False)
    with open_hip(model) as llm:
        (output,) = llm.generate(PROMPTS[0], params)
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) <= tokens.index(tokens[3]) + 1


def test_logits_of_every_position(hip, model):
    tokens = [3, 42, 12, 7, 9]
    with LLM(model, backend="reference", skip_tokenizer_init=True) as llm:
        exact = llm.engine.backend.forward_logits(tokens)
    with open_hip(model) as llm:
        error = llm.engine.backend.forward_logits(tokens) - exact
    assert np.sqrt((error**2).mean()) < 0.006


def test_what_the_kernel_takes_is_told(hip, model):
    with open_hip(model) as llm:
        held = llm.engine.backend.resources()
    assert 0 < held.registers <= 256 and held.local_bytes == 0 and held.shared_bytes <= 64 << 10


@pytest.mark.parametrize("scratch", [0, 464])
def test_scratch_memory_is_told(hip, model, monkeypatch, caplog, scratch):
    def attribute(value, number, function):
        ctypes.c_int.from_address(value).value = scratch if number == driver.LOCAL_BYTES else 8

    monkeypatch.setattr(hip, "hipFuncGetAttribute", attribute)
    open_hip(model).close()
    start = "decode.hip has 464 bytes of scratch memory a thread, and may be slow: clang++: "
    assert [one.startswith(start) for one in caplog.messages if "scratch" in one] == ([True] if scratch else [])


def test_blocks_are_as_many_as_are_asked_for(hip, model, expected):
    """Of prebuilt objects, too."""
    with open_hip(model, num_blocks=6) as llm:
        backend = llm.engine.backend
        assert ids(llm.generate(PROMPTS[0], GREEDY)) == expected(PROMPTS[0], GREEDY)
    assert backend.layout.lowering.num_blocks == 6
    made = [*prebuild.sources(backend.spec, backend.gpu, backend.max_context, 1, 6)]
    assert (render(backend.layout), "decode.hip") in made
    layouts = prebuild.column_layouts(backend.spec, backend.gpu, backend.max_context, num_blocks=6)
    assert {layout.lowering.num_blocks for layout in layouts} == {6}
    assert {(render(layout), "columns.hip") for layout in layouts} <= {*made}


def test_blocks_that_cannot_be_are_refused_first(hip, model):
    assert "9 blocks: this model takes 8 at most" in refusal(lambda: open_hip(model, num_blocks=9))
    told = refusal(lambda: open_hip(model, num_blocks=305))
    assert told == "305 blocks: mi300x has 304 compute units, for one each"
    assert not hip.launches


def test_prebuild_takes_blocks(tmp_path, capsys):
    words = [str(tmp_path), "--shape", "llama-3.2-1b", "--blocks", "304"]
    assert prebuild_command.main(words) == 2
    assert "304 blocks: this model takes 256 at most" in capsys.readouterr().err


# ---- several columns ----


def test_requests_share_steps(hip, model, expected, monkeypatch):
    """In one launch of both, which ends with the first; the other goes on alone."""
    monkeypatch.setattr(HipBackend, "column_counts", (2,))
    params = [replace(GREEDY, max_tokens=3), SAMPLED]
    with open_hip(model, num_slots=2) as llm:
        backend = llm.engine.backend
        backend.settle()
        before = hip.launches
        with llm.engine.paused():  # both have come before one of them runs
            streams = [llm.stream(*asked) for asked in zip(PROMPTS, params, strict=True)]
        made = [[t for delta in stream for t in delta.token_ids] for stream in streams]
        (columns,) = backend.columns.kernels
        assert (columns.layout.columns, hip.launches - before) == (2, 2)
        prebuilt = prebuild.column_layouts(backend.spec, backend.gpu, backend.max_context)
        assert render(columns.layout) in map(render, prebuilt)
    assert made == [expected(p, q)[0] for p, q in zip(PROMPTS, params, strict=True)]


def test_prompts_run_in_chunks(hip, model, expected, monkeypatch):
    monkeypatch.setattr(HipBackend, "chunk_positions", 2)
    prompt = [(7 * i + 3) % 50 for i in range(11)]
    with open_hip(model) as llm:
        llm.engine.backend.settle()
        before = hip.launches
        assert ids(llm.generate(prompt, GREEDY)) == expected(prompt, GREEDY)
        assert hip.launches - before == 2  # the prompt with its first token; what follows
        kernel = llm.engine.backend.chunks.kernel
        assert kernel is not None and kernel.layout.chunk and kernel.layout.columns == 2


def test_a_model_whose_columns_find_no_room_takes_turns(hip, model, expected, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "kog_triton")
    monkeypatch.setattr(HipBackend, "column_counts", (2,))
    monkeypatch.setattr(column_layout, "HELD_WORDS", 0)
    with open_hip(model, num_slots=2) as llm:
        assert llm.engine.backend.columns.counts == ()
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected(PROMPTS, GREEDY)
    told = "no kernel of 2 columns: qkv_proj's activations of 2 requests take 4 registers a thread"
    assert told in caplog.text


# ---- what goes wrong is one line ----


def test_no_gpu(hip, model):
    hip.gpus = 0
    assert "hipGetDeviceCount: hipErrorNoDevice (100, no ROCm-capable device is detected)" in refusal(
        lambda: open_hip(model)
    )


def test_another_architecture(hip, model, monkeypatch):
    see(monkeypatch, "gfx90a")
    told = refusal(lambda: open_hip(model))
    assert "AMD Instinct is gfx90a, and it takes gfx942; choose --backend triton" in told


def test_the_object_is_for_another_gpu(hip, model):
    hip.elf_machine = 0x3F  # gfx90a
    told = refusal(lambda: open_hip(model))
    assert told.startswith("hipModuleLoadData: hipErrorNoBinaryForGpu (209, ")
    assert told.endswith("; the code object is for another GPU")


@pytest.mark.parametrize("name", ["hipModuleLoadData", "hipModuleLaunchCooperativeKernel"])
def test_out_of_memory(hip, model, name):
    def act():
        with open_hip(model) as llm:
            llm.generate(PROMPTS[0], GREEDY)

    open_hip(model).close()  # the self-test has passed
    hip.failing[name] = 2
    assert refusal(act).startswith(f"{name}: hipErrorOutOfMemory (2, out of memory); another ")


def test_blocks_that_cannot_all_be_resident(hip, model):
    with open_hip(model) as llm:
        hip.failing["hipModuleLaunchCooperativeKernel"] = 720
        told = refusal(lambda: llm.generate(PROMPTS[0], GREEDY))
    assert "hipErrorCooperativeLaunchTooLarge" in told


def test_a_launch_that_breaks_off(hip, model):
    with open_hip(model) as llm:
        hip.know = lambda tensors: None  # nothing is mapped: the first access faults
        told = refusal(lambda: llm.generate(PROMPTS[0], GREEDY))
    assert "hipErrorLaunchFailure (719, unspecified launch failure)" in told


def test_without_an_event_nothing_is_launched(hip, model):
    with open_hip(model) as llm:
        before, hip.failing["hipEventCreate"] = hip.launches, 2
        told = refusal(lambda: llm.generate(PROMPTS[0], GREEDY))
        assert told == "hipEventCreate: hipErrorOutOfMemory (2, out of memory); " + driver.ADVICE[2]
        assert hip.launches == before


def begun(hip):
    """A launch of the self-test, which runs once its gate is opened; the gate."""
    gate = threading.Event()
    hip.meanwhile = gate.wait
    code = objects.code_object(selftest.HEADER, "selftest.hip", "gfx942")
    kernel = driver.HipKernel(code, "kog_selftest", 0, torch.device("cpu"), 0)
    sizes = {"words": (1,), "rows": (1, 64), "mailbox": (4,), "found": (1, 2)}
    tensors = {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()}
    return kernel.launch(1, THREADS, selftest.argument(tensors, 1, 0)), gate


def test_an_event_of_a_launch_that_failed_is_released(hip):
    hip.failing["hipModuleLaunchCooperativeKernel"] = 720
    assert "hipErrorCooperativeLaunchTooLarge" in refusal(lambda: begun(hip))
    gc.collect()
    assert not hip._events and not hip.launches


@pytest.mark.parametrize("name", ["hipEventRecord", "hipSetDevice"])
def test_what_fails_behind_a_launch_is_told_when_it_has_ended(hip, monkeypatch, name):
    """As the end of its stream: it runs."""
    launch = hip.hipModuleLaunchCooperativeKernel

    def then_fails(*arguments):
        hip.failing[name] = 2
        return launch(*arguments)

    monkeypatch.setattr(hip, "hipModuleLaunchCooperativeKernel", then_fails)
    launched, gate = begun(hip)
    del hip.failing[name]
    assert hip.launches == 1 and not launched.query()
    gate.set()
    for ask in (launched.synchronize, launched.query):
        assert refusal(ask).startswith(f"{name}: hipErrorOutOfMemory (2, out of memory)")
    assert not hip._queue[-1].is_alive() and not hip.broken, hip.why


def test_no_runtime(hip, model, monkeypatch, tmp_path):
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    told = refusal(lambda: open_hip(model))
    assert "no HIP runtime: libamdhip64.so is not there; install ROCm, or set ROCM_PATH" in told


def test_no_compiler(hip, model, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    told = refusal(lambda: open_hip(model))
    assert "no compiler for AMD GPUs, none of clang++, hipcc, hipRTC: install ROCm, set ROCM_PATH" in told


def test_what_the_kernel_does_not_do_is_refused(hip, model):
    told = refusal(lambda: open_hip(model, devices=2))
    assert told == "2 GPUs were asked for, and HIP sees 1"
    assert "hip backend reads 16-bit weights" in refusal(lambda: open_hip(model, dtype="fp32"))
    assert "choose --prefill kernel" in refusal(lambda: open_hip(model, prefill="library"))


# ---- compiled once ----


def compilations(caplog):
    return sum(text.startswith("compiling decode.hip by clang++: ") for text in caplog.messages)


def test_a_code_object_is_kept_and_a_damaged_one_is_compiled_again(hip, model, expected, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "kog_triton.compilers")
    # clang once for all processes of tests: what it made is handed out here
    made, compile_apart = [], jit.compile_apart

    def handed_out(text, source, *others):
        made.append(source)
        return made_once(
            [text.encode(), *(path.read_bytes() for path in toolchain.headers())],
            lambda draft: draft.write_bytes(compile_apart(text, source, *others)),
        ).read_bytes()

    monkeypatch.setattr(jit, "compile_apart", handed_out)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_hip(model).close()
    open_hip(model).close()
    assert made == ["selftest.hip", "decode.hip"] and compilations(caplog) == 1
    for kept in kernel_cache.cache_folder().iterdir():
        kept.write_bytes(kept.read_bytes()[:-100])
    with open_hip(model) as llm:
        assert ids(llm.generate(PROMPTS[0], GREEDY)) == expected(PROMPTS[0], GREEDY)
    assert compilations(caplog) == 2 and "is damaged: it is compiled again" in caplog.text


def test_what_the_runtime_takes_for_no_object_is_told(hip, model, monkeypatch):
    open_hip(model).close()
    monkeypatch.setattr(HipBackend, "_compile", lambda self, source, layout: b"no object" * 20)
    told = refusal(lambda: open_hip(model))
    assert "hipModuleLoadData: hipErrorInvalidImage (200, " in told and "of the same ROCm" in told


def test_the_compilers_words(hip, model, monkeypatch):
    monkeypatch.setattr(toolchain, "FLAGS", ("-no-such-flag",))
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    with pytest.raises(DeviceError, match=r"clang\S* refuses the kernel:\n.*no-such-flag"):
        open_hip(model)


# ---- code objects that another machine has made ----


def test_prebuilt_objects_are_taken_by_path(hip, model, expected, monkeypatch, tmp_path):
    spec, gpu = Checkpoint.open(model).spec, HipBackend._find_gpus()[0][1]
    # What the check of a new GPU takes is asked for in test_hip_request_check.py.
    monkeypatch.setattr(prebuild, "small_model", lambda spec, num_gpus: spec)
    monkeypatch.setattr(prebuild, "column_layouts", lambda *_: [])
    sources = prebuild.sources
    monkeypatch.setattr(prebuild, "sources", lambda *of: [s for s in sources(*of) if s[1] != "stage.hip"])
    made = prebuild.prebuild(tmp_path / "objects", spec, gpu)
    assert {path.name.partition("-")[0] for path in made} == {"selftest", "decode"}
    monkeypatch.setenv(objects.FOLDER, str(tmp_path / "objects"))
    operations()  # the stand-in for a GPU is made by a compiler, too
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no compiler
    with open_hip(model) as llm:
        assert ids(llm.generate(PROMPTS[0], GREEDY)) == expected(PROMPTS[0], GREEDY)
    for path in made:
        path.unlink(missing_ok=True)
    selftest.check_gpu.cache_clear()
    told = refusal(lambda: open_hip(model))
    assert "KOG_HIP_OBJECTS has no selftest-gfx942-" in told and "kog_triton.prebuild" in told
    monkeypatch.setenv(objects.FOLDER, str(tmp_path / "nowhere"))
    assert "which is no folder; set it to one" in refusal(lambda: open_hip(model))


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Prebuilt objects, which hold no code; what prebuild writes."""
    monkeypatch.setattr(prebuild, "compile_cubin", lambda *_, **__: b"machine code")
    monkeypatch.setattr(prebuild, "column_layouts", lambda *_: [])
    monkeypatch.setenv(objects.FOLDER, str(tmp_path / "objects"))
    spec = named_shape("llama-3.2-1b")
    return lambda: prebuild.prebuild(tmp_path / "objects", spec, GPUS["mi300x"], 64)


def taken():
    return objects.code_object(selftest.HEADER, "selftest.hip", "gfx942")


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-9], lambda data: b"#" + data[1:]])
def test_a_prebuilt_object_that_is_damaged_is_refused(folder, damage):
    path = folder()[0]
    assert taken() == b"machine code"
    path.write_bytes(damage(path.read_bytes()))
    told = refusal(taken)
    assert told.startswith(f"{path} is damaged: make it with python -m kog_triton.prebuild of")
    assert told.endswith("or take KOG_HIP_OBJECTS away to compile here")
    folder()
    assert taken() == b"machine code"


def test_an_objects_name_is_of_its_flags_too(folder, monkeypatch):
    before = {path.name for path in folder()}
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-O2"))
    assert "KOG_HIP_OBJECTS has no selftest-gfx942-" in refusal(taken)
    assert before.isdisjoint(path.name for path in folder())


def test_no_object_is_ever_half_written(folder, monkeypatch, tmp_path):
    path = folder()[0]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode  # others may read both
    whole, there = path.read_bytes(), {*path.parent.iterdir()}
    monkeypatch.setattr(prebuild, "compile_cubin", lambda *_, **__: b"other code")

    def fails(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(os, "replace", fails)
        folder()
    assert path.read_bytes() == whole and {*path.parent.iterdir()} == there


# ---- kog doctor ----


def test_doctor_explains(hip, capsys, monkeypatch):
    from kog_triton import doctor

    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "  hip       ready\n" in said.replace("ready  ", "ready")
    assert "\nhip\n  driver    no /dev/kfd, and HIP does without\n" in said
    assert "libamdhip64.so, 1 GPU\n  peers     none: one GPU\n  compiler  clang++: " in said
    assert "hipcc: not found, hipRTC: not found\n" in said
    assert "  self-test passed; 8 blocks on 8 XCDs: 1 on 0, 1 on 1" in said and "one GPU's words, rows" in said
    hip.gpus = 0
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "hipGetDeviceCount: hipErrorNoDevice (100" in said and "  self-test not run\n" in said
    assert "no /dev/kfd: install the amdgpu driver\n" in said


def test_doctor_says_nothing_of_hip_on_other_machines(hip, capsys, monkeypatch, tmp_path):
    from kog_triton import doctor

    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert doctor.findings() == {} and "\nhip\n" not in doctor.report(doctor.examine())
