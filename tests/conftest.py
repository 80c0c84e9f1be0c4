"""Adds each skipped test to the list that `make test` names in FOREBAY_SKIPS, as the Rust tests do.

It knows the form of that list, `TEST<tab>REASON`; `testing/skips.py` reads it.
"""

import os
import pathlib
from collections.abc import Iterator

import pytest
from processes import Daemon


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
