"""Adds each skipped test to the list that `make test` names in FOREBAY_SKIPS, as the Rust tests do.

It knows the form of that list, `TEST<tab>REASON`; `testing/skips.py` reads it.
"""

import gc
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest
from fake_cuda import Cuda
from processes import Daemon

ROOT = pathlib.Path(__file__).parent.parent


def add(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Adds a skipped test, or a file whose tests were all skipped."""
    path = os.environ.get("FOREBAY_SKIPS")
    if not (path and report.skipped and isinstance(report.longrepr, tuple)):
        return
    why = " ".join(report.longrepr[2].removeprefix("Skipped: ").removeprefix("SKIPPED: ").split())
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{report.nodeid}\t{why}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """pytest's hook for each phase of a test."""
    add(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """pytest's hook for each file that was collected: it may be skipped whole."""
    add(report)


@pytest.fixture
def daemon(tmp_path: pathlib.Path) -> Iterator[Daemon]:
    """A node with a little memory."""
    made = Daemon(tmp_path)
    made.start()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def cuda() -> Iterator[Cuda]:
    """The fake driver is what the process loads; it is built unless it is up to date. Nobody misuses it."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    subprocess.run(["cargo", "build", "--quiet", "--package", "fake-cuda"], cwd=ROOT, check=True)
    with pytest.MonkeyPatch.context() as patch:
        path = str(target / "debug" / "libfake_cuda.so")
        patch.setenv("FOREBAY_LIBCUDA", path)
        patch.setenv("FAKE_CUDA_GPUS", "3")
        loaded = Cuda(path)
        yield loaded
        gc.collect()
        assert loaded.misuse() == 0
