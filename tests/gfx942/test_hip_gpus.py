"""`--backend hip` on several GPUs from end to end on a CPU: its host's side calls a libamdhip64 whose GPUs are the
executor's, on which the ranks' real code objects run beside each other.
"""

import gc
import re
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from kog_triton import LLM, SamplingParams
from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.hip import backend, peers, prebuild, rank_selftest, selftest, toolchain
from kog_triton.backends.hip.backend import HipBackend
from kog_triton.backends.hip.driver import HipRankKernel
from kog_triton.backends.mailbox import Mailbox
from kog_triton.errors import DeviceError
from kog_triton.model.spec import Head, Reduce
from kog_triton.schedule.topology import GPUS
from tests.lib.fake_hip_gpus import FakeGpus
from tests.lib.gfx942.executor import PLAIN, WEAK
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.gfx942.requests import ASKED, reference_tokens, tokens_of
from tests.lib.hip_machine import install, save_model
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.refusals import refusal
from tests.lib.triton_cases import lanes

PROMPT = [3, 42, 12]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=6, ignore_eos=True)
BLOCKS = 4  # of a GPU
EIGHT = {"num_lanes": 8, "num_heads": 8, "num_kv_heads": 8, "intermediate_size": 64, "vocab_size": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its vocabulary divides over four GPUs."""
    return save_model(tmp_path_factory.mktemp("model") / "tiny", 52)


@pytest.fixture
def machine(monkeypatch):
    """So many MI300Xs, each of a few CUs."""

    def opened(gpus, **conditions):
        fake = FakeGpus(gpus, **conditions)
        install(fake, monkeypatch, BLOCKS)
        return fake

    return opened


@pytest.fixture
def several(machine, monkeypatch):
    """Two GPUs, and kernels of two requests a step and of two positions of a prompt."""
    fake = machine(2)
    monkeypatch.setattr(HipBackend, "column_counts", (2,))
    monkeypatch.setattr(HipBackend, "chunk_positions", 2)
    return fake


def open_hip(model, gpus=2, **options):
    return LLM(model, backend="hip", devices=gpus, skip_tokenizer_init=True, **options)


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(model):
    with LLM(model, backend="reference", skip_tokenizer_init=True) as llm:
        yield lambda prompts, params: ids(llm.generate(prompts, params))


@pytest.mark.parametrize("gpus", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_requests_of_all_ranks_are_the_references(machine, model, expected, gpus):
    fake = machine(gpus)
    with open_hip(model, gpus) as llm:
        assert llm.choice.name == "hip" and llm.engine.backend.num_devices == gpus
        for params in (GREEDY, SAMPLED):
            assert ids(llm.generate(PROMPT, params)) == expected(PROMPT, params)
    # self-tests of each GPU and of all together; a request is one launch
    assert fake.launches == gpus + 1 + 2, fake.why
    assert not fake._modules


def test_requests_share_a_step_and_prompts_run_in_chunks(several, model, expected):
    prompts, long = [[3, 42], [7, 30]], [(7 * i + 3) % 50 for i in range(6)]
    with open_hip(model, num_slots=2) as llm:
        hip = llm.engine.backend
        hip.settle()
        before = several.launches
        with llm.engine.paused():  # both have come before one of them runs
            streams = [llm.stream(prompt, SAMPLED) for prompt in prompts]
        made = [[t for delta in stream for t in delta.token_ids] for stream in streams]
        assert made == expected(prompts, SAMPLED), several.why
        assert ids(llm.generate(long, GREEDY)) == expected(long, GREEDY), several.why
        assert several.launches == before + 1 + 2
        steps = [*hip.columns.kernels, hip.chunks.kernel]
        assert [step.layout.chunk for step in steps] == [False, True]
        assert {several.memory[t.data_ptr()][0] for step in steps for t in step.words} == {0, 1}


@pytest.mark.slow
def test_a_laneformer_has_a_lane_a_gpu(machine):
    spec = lanes((Reduce.OWN, Reduce.DELAYED), 1, Head.VOCAB_PARALLEL, **EIGHT)
    fake = machine(8)
    eight = HipBackend(ArrayWeights(spec), BackendOptions(max_context=64, num_gpus=8), 2)
    try:
        mailbox = Mailbox()
        mailbox.post(ASKED["greedy"].request())
        eight.generate(mailbox)
    finally:
        eight.close()
    assert tokens_of(mailbox.read(0, 0)) == reference_tokens(spec, ASKED["greedy"]), fake.why


@pytest.mark.slow
def test_requests_in_a_memory_as_weak_as_amds(machine, model, expected):
    machine(2, memory=WEAK, xcc=lambda group: group * 5 % 7)
    with open_hip(model) as llm:
        assert ids(llm.generate(PROMPT, GREEDY)) == expected(PROMPT, GREEDY)


def test_what_ranks_tell_each_other_is_freed_with_the_model(machine, model):
    fake = machine(2)
    llm = open_hip(model)
    fake.forget()  # the self-tests' memory
    gc.collect()
    assert sorted(gpu for gpu, *_ in fake.memory.values()) == [0, 0, 1, 1]  # words and errors
    assert {flags for _, flags, _ in fake.memory.values()} == {peers.UNCACHED}
    llm.close()
    gc.collect()
    assert not fake.memory


# ---- what goes wrong is one line ----


def test_more_gpus_than_there_are(machine, model):
    machine(2)
    assert refusal(lambda: open_hip(model, 4)) == "4 GPUs were asked for, and HIP sees 2"


def test_more_gpus_than_collectives_take(tmp_path):
    spec, folder = lanes((Reduce.OWN,), 0, Head.VOCAB_PARALLEL, **EIGHT), tmp_path / "objects"
    told = refusal(lambda: prebuild.prebuild(folder, spec, GPUS["mi300x"], num_gpus=9))
    assert told == "9 GPUs: collectives take 8 at most" and not folder.exists()


def test_gpus_that_do_not_reach_each_other(machine, model):
    fake = machine(3)
    fake.apart = {(1, 2)}
    told = refusal(lambda: open_hip(model, 3))
    assert told == (
        "GPU 1 does not reach the memory of GPU 2: choose GPUs that xGMI joins (HIP_VISIBLE_DEVICES; rocm-smi "
        "--showtopo)"
    )
    open_hip(model, 2).close()  # the first two do


def test_a_gpu_that_torch_does_not_describe(monkeypatch):
    of = {0: GPUS["mi300x"], 1: None}
    monkeypatch.setattr(backend, "gpu_of", lambda device: of[device.index])
    told = refusal(lambda: HipBackend._find_gpus(2))
    assert told == "cuda:1 is not a GPU that torch describes"


def test_memory_that_torch_copies(machine, monkeypatch):
    machine(2)
    monkeypatch.setattr(peers.np, "asarray", np.array)
    told = refusal(lambda: peers.uncached(4, torch.device("cpu"), 0))
    assert told.startswith("torch makes a copy of memory that all GPUs see: choose --gpus 1")


def test_gpus_that_are_not_alike(machine, model, monkeypatch):
    machine(2)
    of, unlike = HipBackend._find_gpus(), replace(GPUS["mi300x"], num_sms=228)
    found = [*of, (of[0][0], unlike)]
    monkeypatch.setattr(HipBackend, "_find_gpus", staticmethod(lambda count=1: found[:count]))
    told = refusal(lambda: open_hip(model))
    assert told == "GPU 1 is mi300x with 228 SMs and GPU 0 mi300x with 304: ranks must be alike"


@pytest.mark.parametrize("name", ["hipDeviceEnablePeerAccess", "hipExtMallocWithFlags", "hipDeviceCanAccessPeer"])
def test_a_call_between_gpus_that_fails_is_named(machine, model, name):
    machine(2).failing[name] = 101
    told = refusal(lambda: open_hip(model))
    assert told == f"{name}: hipErrorInvalidDevice (101, invalid device ordinal)"


def test_peers_that_were_reached_before_stay_reached(machine, model):
    fake = machine(2)
    fake.reached = {(0, 1)}
    open_hip(model).close()
    assert fake.reached == {(0, 1), (1, 0)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_that_does_not_launch_fails_the_self_test(machine, model, monkeypatch, rank):
    monkeypatch.setattr(rank_selftest, "WAIT_NS", 1_000_000)
    machine(2).refused[rank] = 720
    told = refusal(lambda: open_hip(model))
    assert told.startswith(
        f"the hip backend's self-test cannot run on GPU {rank}: hipModuleLaunchCooperativeKernel: "
        "hipErrorCooperativeLaunchTooLarge (720, "
    )


@pytest.mark.parametrize(("rank", "memory"), [(0, PLAIN), (1, WEAK)])
def test_a_rank_that_is_not_launched_is_named_and_the_next_request_runs(
    machine, model, expected, monkeypatch, rank, memory
):
    fake = machine(2, memory=memory)
    with open_hip(model) as llm:
        monkeypatch.setattr(llm.engine.backend, "wait_ns", 1_000_000)
        fake.refused[rank] = 720
        told = refusal(lambda: llm.generate(PROMPT, GREEDY))
        assert told.startswith(f"a wait of the kernel expired: rank {1 - rank}, block "), fake.why
        assert f"; the kernel of rank {rank} was not launched: hipModuleLaunch" in told
        fake.refused.clear()
        monkeypatch.undo()
        assert ids(llm.generate(PROMPT, GREEDY)) == expected(PROMPT, GREEDY)


def test_a_rank_whose_end_cannot_be_marked_was_launched(machine, model, monkeypatch):
    fake, launch, made = machine(2), HipRankKernel.launch, []

    def seen(*args):
        made.append(launch(*args))
        return made[-1]

    with open_hip(model) as llm:
        monkeypatch.setattr(HipRankKernel, "launch", seen)
        fake.failing["hipEventRecord"] = 2
        with suppress(DeviceError):  # which a token that has come already is not taken back for
            llm.generate(PROMPT, GREEDY)
    (launched,) = made
    assert not launched.missing and len(launched.ends) == 2
    told = refusal(launched.synchronize)
    assert told.startswith("hipEventRecord: hipErrorOutOfMemory (2, out of memory)")
    assert not fake._queue[-1].is_alive() and not fake.broken, fake.why


def test_doctor_says_whether_gpus_reach_each_other(machine):
    fake = machine(3)
    told = HipBackend.findings()
    assert told["peers"] == "the first 3 GPUs reach each other" and "3 GPUs" in told["runtime"]
    fake.apart = {(2, 0)}
    told = HipBackend.findings()
    assert told["peers"].startswith("GPU 2 does not reach the memory of GPU 0: choose GPUs that")


# ---- faults that the stand-in sees ----


def test_gpus_that_were_not_told_to_reach_each_other_are_seen(machine, model, monkeypatch):
    fake = machine(2)
    monkeypatch.setattr(backend, "reach_all", lambda count: None)
    assert "hipErrorLaunchFailure" in refusal(lambda: open_hip(model))
    assert fake.why == "GPU 1 was not told to reach GPU 0"


def test_words_in_memory_that_is_cached_are_seen(machine, model, monkeypatch):
    fake = machine(2)
    monkeypatch.setattr(peers, "UNCACHED", 0)
    assert "hipErrorLaunchFailure" in refusal(lambda: open_hip(model))
    assert "does not see words of rank" in fake.why


def test_columns_words_in_memory_that_is_cached_are_seen(several, model, monkeypatch):
    monkeypatch.setattr(HipBackend, "_make_columns", CudaBackend._make_columns)
    with open_hip(model) as llm:
        llm.engine.backend.settle()
        with pytest.raises(DeviceError, match="hipErrorLaunchFailure"):
            llm.generate(PROMPT, GREEDY)
    assert "does not see words of rank" in several.why


# ---- the self-test of several GPUs ----


@pytest.fixture
def check(machine, monkeypatch):
    """Run the self-test on GPUs of these conditions."""

    def run(gpus=2, rounds=5, wait_ns=rank_selftest.WAIT_NS, gate=None, refused=(), **conditions):
        fake = run.fake = machine(gpus, **conditions)
        fake.least = {}  # the self-test is what finds a narrow scope
        fake.refused = dict(refused)
        if gate:
            fake.meanwhile = gate.wait
        monkeypatch.setattr(rank_selftest, "ROUNDS", rounds)
        monkeypatch.setattr(rank_selftest, "WAIT_NS", wait_ns)
        found = HipBackend._find_gpus(gpus)
        peers.reach_all(gpus)
        rank_selftest.check_ranks(tuple(device for device, _ in found), found[0][1])
        return fake

    return run


@pytest.mark.parametrize("gpus", [2, 8])
@pytest.mark.parametrize("memory", [PLAIN, WEAK], ids=["plain", "adversarial"])
def test_the_self_test_of_all_gpus_passes(check, memory, gpus):
    assert check(gpus, 2 if gpus > 2 else 5, memory=memory).launches == 1


def test_words_that_stay_on_their_gpu_fail_it(check, monkeypatch, tmp_path):
    text, old = (INCLUDES[0] / "kog/ptx.h").read_text(), "constexpr int kWordScope = kSystem;"
    assert text.count(old) == 1
    (tmp_path / "kog").mkdir()
    (tmp_path / "kog/ptx.h").write_text(text.replace(old, "constexpr int kWordScope = kAgent;"))
    monkeypatch.setattr(toolchain, "INCLUDES", (tmp_path, *INCLUDES))
    told = refusal(lambda: check(wait_ns=20_000_000, memory=WEAK))
    assert re.fullmatch(
        r"the hip backend's self-test fails on 2 x mi300x: words of GPU [01] did not reach GPU [01] \(\d of 4 blocks, "
        r"5 rounds\): choose --gpus 1, and report this",
        told,
    )


def test_pairs_that_are_not_what_was_sent_fail_it(check, monkeypatch, tmp_path):
    text, old = (INCLUDES[0] / "kog/ptx.h").read_text(), "  store_scoped<kWordScope>(p + 1, b);\n}"
    assert text.count(old) == 1
    (tmp_path / "kog").mkdir()
    (tmp_path / "kog/ptx.h").write_text(text.replace(old, old.replace("b)", "b ^ 2)")))
    monkeypatch.setattr(toolchain, "INCLUDES", (tmp_path, *INCLUDES))
    assert "came to GPU 0 in pieces (4 of 4 blocks" in refusal(lambda: check())


def test_a_host_that_is_not_heard_is_said(check, monkeypatch):
    def deaf(mailbox, ended, *_):
        while not ended():
            pass

    monkeypatch.setattr(rank_selftest, "answer", deaf)
    told = refusal(lambda: check(wait_ns=1_000_000))
    assert "GPU 0 did not hear the host, or the host GPU 0, while it ran (1 of 4 blocks" in told


@pytest.mark.parametrize("refused", [{}, {1: 720}])
def test_kernels_that_never_end_are_said(check, monkeypatch, refused):
    gate, kept = threading.Event(), []
    monkeypatch.setattr(selftest, "DEADLINE_S", 0.2)
    monkeypatch.setattr(selftest, "_unended", kept)
    told = refusal(lambda: check(wait_ns=1_000_000, gate=gate, refused=refused))
    assert told == (
        "the hip backend's self-test has not ended in 0.2 s: the host waits for its kernel, and has heard of 0, 0 of 5 "
        "rounds: choose --gpus 1, and report this"
    )
    gate.set()
    check.fake._queue[-1].join()
    assert check.fake._modules and not check.fake.broken, check.fake.why
    assert len(kept) == 1
