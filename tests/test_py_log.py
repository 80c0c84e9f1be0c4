"""Log lines that come in storms are counted, not lost."""

import logging

import pytest

pytest.importorskip("forebay._forebay", reason="SKIPPED: no wheel: `make wheel`")

from forebay._log import LimitedLog  # noqa: E402


def test_a_storm_leaves_one_line_and_the_next_one_says_how_many_it_had(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    log = LimitedLog(logging.getLogger("forebay.test"), interval_s=60.0, clock=lambda: now[0])
    for number in range(10):
        log.warning("request %d failed", number)
    log.warning("another kind")
    assert caplog.messages == ["request 0 failed", "another kind"]
    caplog.clear()
    now[0] = 60.0
    for number in range(3):
        log.warning("request %d failed", number)
    log.warning("another kind")
    assert caplog.messages == ["request 0 failed repeated=9", "another kind"]
