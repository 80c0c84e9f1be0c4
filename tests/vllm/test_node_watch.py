"""What the log says of the node: found, lost and found again, once each."""

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from forebay.vllm.connector import node_watch  # noqa: E402

pytestmark = pytest.mark.smoke


class Watched:
    """A watch, with a node and a clock in the test's hands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.is_there, self.said = 0.0, False, []
        for level in ("info", "warning"):
            monkeypatch.setattr(node_watch.logger, level, self.say)
        self.watch = node_watch.NodeWatch("rank 0", "node.sock", lambda: self.is_there, lambda: self.now)

    def say(self, message: str, *args: object) -> None:
        self.said.append(message % args)

    def after(self, seconds: float, is_there: bool) -> list[str]:
        """What is said within so many seconds, in steps of a tenth."""
        self.is_there, self.said = is_there, []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.watch.look()
        return self.said


def test_a_node_that_goes_and_comes_is_told_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    assert watched.after(5, False) == [], "it may still be about to come"
    assert watched.after(5, True) == ["rank 0: found the node at node.sock"]
    assert watched.after(60, True) == []
    (line,) = watched.after(30, False)
    assert "rank 0: lost the node at node.sock" in line
    (line,) = watched.after(60, True)
    assert "found the node at node.sock again after 30 s" in line


def test_a_node_that_never_comes_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = Watched(monkeypatch).after(600, False)
    assert line == "rank 0: no node at node.sock after 11 s: all is computed"
