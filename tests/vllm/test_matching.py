"""What the matcher says there is for a request, without an engine and without a node."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import BLOCK, CHUNK, a_request, facts  # noqa: E402

import forebay  # noqa: E402
from forebay.vllm.connector import handover  # noqa: E402
from forebay.vllm.connector.config import Shape, settings_of  # noqa: E402
from forebay.vllm.connector.groups import Group  # noqa: E402
from forebay.vllm.connector.matcher import Matcher  # noqa: E402
from forebay.vllm.connector.policies import FULL, Window  # noqa: E402
from forebay.vllm.connector.stats import Counts  # noqa: E402
from forebay.vllm.connector.tracked import Found, TrackedRequest  # noqa: E402

pytestmark = pytest.mark.smoke

OTHER = Shape(2, BLOCK)


class Finder:
    """Of a node that has so many chunks of each shape. It may be slow: then it says nothing yet."""

    def __init__(self) -> None:
        self.memory: dict[Shape, int] = {}
        self.peers: dict[Shape, int] = {}
        self.is_slow = False
        self.traces: list[str | None] = []

    def ask(
        self,
        shape: Shape,
        ids: list[list[bytes]],
        tokens: int,
        trace: str | None = None,
        tenant: int | None = None,
    ) -> Any:
        self.traces.append(trace)
        return shape, ids, tokens

    def answer(self, asked: Any) -> Found | None:
        shape, ids, tokens = asked
        in_memory = min(self.memory.get(shape, 0), len(ids[0]))
        chunks = min(in_memory + self.peers.get(shape, 0), len(ids[0]))
        if self.is_slow:
            return None
        tokens = tokens if chunks == len(ids[0]) else chunks * CHUNK
        return Found(shape, [of_rank[:chunks] for of_rank in ids], tokens, in_memory, 0, chunks - in_memory)

    def first(self, found: Found, chunks: int) -> Found:
        return found


class Place:
    """A matcher, its node and its clock."""

    def __init__(self, windows: bool = False, **settings: Any) -> None:
        groups = (Group(BLOCK, 8, Window(40) if windows else FULL),)
        self.finder, self.facts, self.now = Finder(), facts(groups=groups), 100.0
        cost_model: Any = SimpleNamespace(chunks_to_load=lambda found, *_: found.chunks)
        finder: Any = self.finder
        made = settings_of({"handover_wait_s": 3} | settings)
        self.counts = Counts()
        self.matcher = Matcher(self.facts, made, finder, cost_model, self.counts, lambda: self.now)

    def found(self, one: TrackedRequest, after_s: float = 0.1) -> Found | None:
        self.now += after_s
        return self.matcher.found(one, 0)

    def handed(self, shape: Shape) -> TrackedRequest:
        """A request with a ticket for ten chunks."""
        one = self.request()
        one.ticket = handover.Ticket(10 * CHUNK, shape)
        return one

    def request(self, chunks: int = 10) -> TrackedRequest:
        one = a_request(chunks * CHUNK, 0)
        one.request.cache_salt = None
        return one


def chunks(found: Found | None) -> int | None:
    return None if found is None else found.chunks


def test_a_traced_request_is_looked_up_as_part_of_its_trace() -> None:
    place = Place()
    traced, plain = place.request(), place.request()
    traced.request.trace_headers = {"traceparent": "00-1-2-01", "tracestate": "a=b"}
    for one in (traced, plain):
        place.finder.traces.clear()
        place.found(one)
        wanted = "00-1-2-01" if one is traced else None
        assert place.finder.traces and set(place.finder.traces) == {wanted}


def test_what_was_handed_over_is_asked_for_again_as_everything_else_is() -> None:
    place = Place()
    one = place.handed(place.facts.shape)
    place.finder.memory[place.facts.shape] = 10
    assert chunks(place.found(one)) == 10
    place.finder.memory.clear()
    assert chunks(place.found(one)) == 0, "the node was started again while it waited for room"


def test_who_gives_up_a_ticket_of_another_shape_takes_what_there_is_in_its_own() -> None:
    place = Place()
    one = place.handed(OTHER)
    place.finder.memory[place.facts.shape] = 8
    answers = [chunks(place.found(one, 1.0)) for _ in range(8)]
    assert answers[0] is None and answers[-1] == 8
    assert place.counts.totals["handovers_late"] == 1


def test_who_waits_for_room_keeps_its_place_while_the_node_is_asked_again() -> None:
    place = Place()
    one = place.request()
    place.finder.memory[place.facts.shape] = 10
    assert chunks(place.found(one)) == 10
    place.finder.is_slow = True
    assert chunks(place.found(one, 0.1)) == 10
    assert place.found(one, 0.2) is None, "that was long ago"
    one.held, place.finder.is_slow = CHUNK, False
    assert chunks(place.found(one)) == 10


@pytest.mark.parametrize(("step_s", "holds"), [(0.01, True), (0.5, True), (1.5, True), (2.5, False)])
def test_who_waits_for_room_keeps_its_place_also_where_steps_are_long(step_s: float, holds: bool) -> None:
    place = Place()
    one, asked = place.request(), 0
    place.finder.memory[place.facts.shape] = 10
    assert chunks(place.found(one)) == 10
    for _ in range(4):  # The node's answer is heard of a step after it was asked for.
        place.finder.is_slow = True
        asked += chunks(place.found(one, step_s)) == 10
        place.finder.is_slow = False
        assert chunks(place.found(one, step_s)) == 10
    assert asked == (4 if holds else 0)


@pytest.mark.parametrize(("windows", "known"), [(False, 4), (True, 10)])
def test_what_only_peers_have_is_stored_here_too(windows: bool, known: int) -> None:
    place = Place(windows)
    place.finder.memory[place.facts.shape], place.finder.peers[place.facts.shape] = 4, 6
    for one in (place.request(), place.handed(place.facts.shape)):
        assert chunks(place.found(one)) == 10
        assert one.known == known


def test_a_prompt_that_waits_is_named_once_in_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    place, named = Place(also_read=[{"tp": 2, "block_tokens": BLOCK}]), []
    name: Callable[..., Any] = forebay.chunk_ids

    def count(key: bytes, tokens: list[int], *rest: Any, **more: Any) -> Any:
        named.append(len(tokens))
        return name(key, tokens, *rest, **more)

    monkeypatch.setattr(forebay, "chunk_ids", count)
    one = place.request()
    for _ in range(3):
        assert place.found(one) is not None
    assert len(named) == 3, "for one rank of its own shape, and two of the other"
    one.forget()
    assert place.found(one) is not None and len(named) == 5, "by its new names"
