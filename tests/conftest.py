"""Markers, skips, and how Triton runs where there is no GPU.

Triton decides when it is imported whether its kernels are compiled or interpreted, and every test of a
process shares that import. Without a GPU they are interpreted; tests of the compiler compile in a process
of their own (test_triton_compile.py).
"""

import importlib
import logging
import os
from pathlib import Path

import pytest

os.environ.pop("COLUMNS", None)  # tables obey it, and pytest-xdist sets it for its processes
HOST = Path(__file__).parent / "host"
NO_SKIPS = os.environ.get("KOG_TESTS_NO_SKIPS") == "1"
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
if not any(Path(driver).exists() for driver in GPU_DRIVERS):
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def own_log_levels():
    """No test runs at the log levels of another: a command that runs in the test's process sets them."""
    yield
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "kog_triton" and isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def one_thread():
    """One torch thread, for modules of small models: the processes of a run share the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint for the backend without a model; a module can have another of the same name."""
    from tests.lib.fake_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    """A folder that, on the path, offers that backend by its entry point."""
    from tests.lib.fake_backend import install

    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture
def llm(folder):
    """That backend's engine, with two slots."""
    from tests.lib.fake_backend import open_llm

    with open_llm(folder, num_slots=2) as llm:
        yield llm


@pytest.fixture
def narrow(folder):
    """That backend's engine, with one slot."""
    from tests.lib.fake_backend import open_llm

    with open_llm(folder) as llm:
        yield llm


def pytest_collection_modifyitems(config, items):
    """Tests of tests/host are marked so, but for slow ones; GPU tests are skipped with a reason where there is none."""
    for item in items:
        if HOST in item.path.parents and "slow" not in item.keywords:
            item.add_marker("host")
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: torch sees none"))


def fail_skip(report):
    """Turn a report of a skip that is about no GPU into one of a failure, where none may be."""
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2])
        if "GPU" not in reason:
            report.outcome, report.longrepr = "failed", f"KOG_TESTS_NO_SKIPS: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return fail_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return fail_skip((yield))


@pytest.fixture
def cli(folder, plugins, monkeypatch, capsys):
    """`kog generate` in this process, on that backend: (exit code, stdout, stderr)."""
    from kog_triton import generate
    from kog_triton.cli import activity

    monkeypatch.setattr(activity, "PATIENCE_S", 60)  # a slow machine tells what it is doing
    monkeypatch.syspath_prepend(str(plugins))
    importlib.invalidate_caches()

    def call(*argv, backend="fake", model=folder):
        try:
            code = generate.main(["--model", str(model), "--backend", backend, *argv])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return call
