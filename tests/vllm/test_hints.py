"""What an orchestrator says of a request's KV is answered, and the node does it. It changes no token."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CHUNK, Daemon, Engine, arguments, prompt, transfer
from processes import until

pytest.importorskip("vllm")

from test_parts import facts  # noqa: E402
from test_quiet_steps import Half  # noqa: E402
from test_reset import a_request  # noqa: E402

from forebay.errors import PeerLostError  # noqa: E402
from forebay.vllm.connector import hints  # noqa: E402
from forebay.vllm.connector.hints import Hints, read  # noqa: E402
from forebay.vllm.connector.load_or_compute import CostModel  # noqa: E402
from forebay.vllm.connector.stats import Counts  # noqa: E402
from forebay.vllm.connector.tenants import Tenants  # noqa: E402
from forebay.vllm.connector.tracked import TrackedRequest  # noqa: E402

SIZE = facts().chunk_tokens


def action(name: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    return {"action_id": name, "action_type": name, "action_version": version, "payload": payload}


def envelope(*actions: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "one", "actions": list(actions)}


# As Dynamo's router makes it, by the types that it has published.
DYNAMO = json.loads(
    '{"protocol_version": "0.1", "message_id": "7b0c", "actions": [{"action_id": "7b0c-0",'
    '"action_type": "kv.fetch", "action_version": "1.0", "payload":'
    '{"source_control_endpoint": "tcp://10.0.0.7:5601", "block_hashes": [123, 456]}}]}'
)


def costs() -> CostModel:
    return CostModel(facts(), None)


class Node:
    """Notes what it is told, and does it at once."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[bytes], int]] = []

    def tell(self, verb: str, ids: list[bytes], ttl_ms: int = 0) -> list[tuple[str, str, str, int]]:
        self.told.append((verb, list(ids), ttl_ms))
        return [("accepted", "none", "memory", 0)] * len(ids)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        return lambda ids, **more: self.tell(verb, ids, **more)


def hinted(said: Any, chunks: int = 4, obeyed: str = "any", salt: str | None = None) -> Any:
    """A request of so many chunks with these hints in its parameters, as it comes and ends."""
    node, counts = Node(), Counts()
    all_hints = Hints(node, facts(), counts, obeyed, Tenants(0, {}), costs())  # type: ignore[arg-type]
    request = a_request("one", chunks * SIZE + 3)
    request.cache_salt, request.kv_transfer_params = salt, {"kv_hint": said}
    request.computed = request.num_tokens
    half = Half()
    half.requests.hints = half.hints = all_hints
    half.request_added(request)
    tracked: TrackedRequest = half.tracked["one"]
    answers = all_hints.finished("one")
    until(lambda: not all_hints.executor.waiting)
    all_hints.close()
    return SimpleNamespace(node=node, tracked=tracked, answers=answers, counts=counts.totals)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([], "actions is None; allowed is a list"),
        ({"actions": "kv.pin"}, "actions is 'kv.pin'; allowed is a list"),
        (envelope(7), "action_type is None; allowed are kv.fetch,"),
        (envelope(action("kv.burn")), "action_type is 'kv.burn'; allowed are kv.fetch,"),
        (envelope(action("kv.pin", "2.0")), "action_version is '2.0'; allowed is 1.0"),
        (envelope(action("kv.pin")), "payload: ttl_ms is None; allowed is a whole number from 1"),
        (envelope(action("kv.pin", ttl_ms=-1)), "payload: ttl_ms is -1; allowed is a whole number from 1"),
        (envelope(action("kv.pin", ttl_ms=True)), "payload: ttl_ms is True"),
        (envelope({**action("kv.demote"), "payload": []}), "payload is []; allowed is an object"),
        (envelope(action("kv.demote", tokens=5)), "payload: tokens is 5; allowed is [FIRST, END]"),
        (envelope(action("kv.demote", tokens=[5, 4])), "payload: tokens[1] is 4; allowed is a whole number"),
        (envelope(action("kv.share", tokens=[1, 2])), "tokens of kv.share must be [0, END]"),
        (envelope(action("kv.share")), "tokens of kv.share must be [0, END]"),
        (envelope(action("kv.prefetch", back_in_ms="1")), "payload: back_in_ms is '1'; allowed is"),
    ],
)
def test_a_malformed_hint_is_rejected_with_what_is_allowed_and_does_nothing(said: Any, reason: str) -> None:
    done = hinted(said)
    (answer,) = done.answers
    assert answer["verdict"] == "rejected" and answer["reason"].startswith(reason), answer
    assert done.node.told == [] and done.counts == {"hints_rejected": 1}
    assert done.tracked.shared_tokens == 0


@pytest.mark.smoke
def test_no_hint_whatever_it_is_raises_an_error() -> None:
    rng = random.Random(7)
    words = [*hints.VERBS, "1.0", "tokens", "ttl_ms", "actions", "action_type", "action_version", "payload"]

    def anything(depth: int) -> Any:
        some = [None, True, -1, 1 << 70, 0.5, "", rng.choice(words), float("nan")]
        deeper = [[anything(depth - 1)], {rng.choice(words): anything(depth - 1)}] if depth else []
        return rng.choice([*some, *deeper])

    for _ in range(3000):
        like = action(rng.choice(words), **{rng.choice(words): anything(2)})
        read(
            rng.choice([anything(4), envelope(anything(3)), envelope(like), envelope(like | {"payload": 1})])
        )


@pytest.mark.smoke
def test_what_dynamos_router_sends_has_the_prompt_fetched_when_it_comes() -> None:
    done = hinted(DYNAMO)
    assert done.answers == [{"action_id": "7b0c-0", "verdict": "accepted", "reason": "none"}]
    assert done.node.told == [("prefetch", done.tracked.ids.ranks[0], 0)]
    assert done.counts == {"hints_accepted": 1}


@pytest.mark.smoke
def test_vllms_own_hints_are_obeyed_and_a_clients_are_not_unless_they_may() -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    typed = KvHintsEnvelope("0.1", "one", [KvHintAction("a", "kv.pin", "1.0", {"ttl_ms": 5})])
    request = a_request("one", 3 * SIZE)
    all_hints = Hints(Node(), facts(), Counts(), "typed", Tenants(0, {}), costs())  # type: ignore[arg-type]
    request.kv_hints = typed
    all_hints.added(request)
    ((found, _),) = all_hints.of["one"].actions
    assert (found.verb, found.ttl_ms) == ("pin", 5)
    refused = hinted(envelope(action("kv.forget"), action("kv.burn")), obeyed="typed")
    assert [answer["verdict"] for answer in refused.answers] == ["rejected", "rejected"]
    assert refused.answers[0]["reason"].startswith("not_allowed") and refused.node.told == []
    assert hinted(DYNAMO, obeyed="off").answers == []


@pytest.mark.smoke
def test_what_is_said_of_the_time_after_a_request_is_done_when_its_stores_have_ended() -> None:
    node, half = Node(), Half()
    all_hints = Hints(node, half.facts, half.counts, "any", Tenants(0, {}), costs())  # type: ignore[arg-type]
    half.requests.hints = half.hints = all_hints
    request = a_request("one", 4 * SIZE)
    request.kv_transfer_params = {
        "kv_hint": envelope(action("kv.pin", ttl_ms=1 << 40), action("kv.forget", tokens=[SIZE, 3 * SIZE]))
    }
    request.computed = 4 * SIZE
    half.request_added(request)
    tracked = half.tracked["one"]
    tracked.stores.add(1)
    answers = all_hints.finished("one")
    time.sleep(0.2)
    assert node.told == []
    tracked.stores.clear()
    until(lambda: len(node.told) == 2)
    all_hints.close()
    (ids,) = tracked.ids.ranks
    assert sorted(node.told) == [("forget", ids[1:3], 0), ("pin", ids, 24 * 3600 * 1000)]
    assert [(answer["verdict"], answer["reason"]) for answer in answers] == [
        ("clipped", "ttl_cut"),
        ("accepted", "none"),
    ]


@pytest.mark.smoke
def test_a_shared_beginning_has_the_same_names_for_all_salts_and_the_rest_has_not() -> None:
    said = envelope(action("kv.share", tokens=[0, 2 * SIZE + 1]))
    (one,), (other,), (without,) = (hinted(said, salt=salt).tracked.ids.ranks for salt in ("a", "b", None))
    assert one[:2] == other[:2] == without[:2]
    assert not set(one[2:]) & set(other[2:]) and not set(one[2:]) & set(without[2:])
    (private,) = hinted(envelope(), salt="a").tracked.ids.ranks
    assert not set(private) & set(one), "what is behind a shared beginning is named by it"


@pytest.mark.smoke
def test_a_storm_of_hints_is_answered_busy_and_one_with_too_many_actions_is_cut() -> None:
    node = Node()
    all_hints = Hints(node, facts(), Counts(), "any", Tenants(0, {}), costs())  # type: ignore[arg-type]
    busy = 0
    for number in range(hints.WAITING_MAX + 10):
        request = SimpleNamespace(num_computed_tokens=SIZE)
        tracked: Any = SimpleNamespace(name=str(number), stores={1}, is_stored=False, request=request)
        all_hints.of[str(number)] = one = read(envelope(action("kv.prefetch", back_in_ms=60_000)))
        one.tracked = tracked
        (answer,) = all_hints.finished(str(number))
        busy += answer == {"action_id": "kv.prefetch", "verdict": "rejected", "reason": "busy"}
    all_hints.close()
    assert busy == 10
    many = read(envelope(*[action("kv.unpin")] * 40))
    assert len(many.actions) == hints.ACTIONS_MAX and len(many.answers) == hints.ACTIONS_MAX + 1
    assert many.answers[-1]["reason"] == "there are 40 actions; allowed are 16"


@pytest.mark.smoke
def test_a_session_is_fetched_as_long_before_it_comes_back_as_its_disk_needs() -> None:
    model = costs()
    all_hints = Hints(Node(), facts(), Counts(), "any", Tenants(0, {}), model)  # type: ignore[arg-type]
    request = SimpleNamespace(num_computed_tokens=2000 * SIZE)
    tracked: Any = SimpleNamespace(request=request)
    whole = hints.Action("prefetch", back_in_ms=60_000)
    # 2,000 chunks of 1 MiB.
    assert all_hints.ahead_s(whole, tracked) == pytest.approx(2.62, abs=0.01), (
        "of 1 GB/s, if nothing is known"
    )
    for _ in range(50):
        model.note_rates([("disk", 100_000_000, 0.2)])
    assert all_hints.ahead_s(whole, tracked) == pytest.approx(5.24, abs=0.3)
    part = hints.Action("prefetch", first_token=1000 * SIZE, end_token=1100 * SIZE, back_in_ms=60_000)
    assert all_hints.ahead_s(part, tracked) == hints.AHEAD_S, "a short one 2 s before"
    request.num_computed_tokens = 1 << 30
    assert all_hints.ahead_s(whole, tracked) == hints.AHEAD_MOST_S


@pytest.mark.smoke
def test_an_accepted_hint_is_done_whatever_comes_meanwhile_and_an_error_harms_no_other() -> None:
    node, half = Node(), Half()
    all_hints = Hints(node, half.facts, half.counts, "any", Tenants(0, {}), costs())  # type: ignore[arg-type]
    half.requests.hints = half.hints = all_hints
    request = a_request("one", 2 * SIZE)
    request.computed = 2 * SIZE
    request.kv_transfer_params = {"kv_hint": envelope(action("kv.pin", ttl_ms=5))}
    half.request_added(request)
    tracked = half.tracked["one"]
    tracked.stores.add(1)
    all_hints.finished("one")
    broken: Any = SimpleNamespace(name="broken", stores=set(), is_stored=True)
    unlikely = hints.Job(hints.Action("pin"), {}, broken, 0.0)
    with all_hints.executor.changed:
        for _ in range(2 * hints.WAITING_MAX):
            all_hints.executor.wait(unlikely, 60)
        all_hints.executor.wait(unlikely, 0)
    time.sleep(0.1)
    tracked.stores.clear()
    until(lambda: [verb for verb, _, _ in node.told] == ["pin"], 10)
    all_hints.close()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("said", "trouble"),
    [
        (action("kv.forget"), "busy"),
        (action("kv.forget"), "away"),
        (action("kv.forget"), "peers_unreached"),
        (action("kv.prefetch", back_in_ms=0), "busy"),
        (action("kv.prefetch", back_in_ms=0), "away"),
    ],
)
def test_a_node_that_is_in_trouble_is_asked_again_until_it_has_done_what_was_accepted(
    said: dict[str, Any], trouble: str
) -> None:
    class Busy(Node):
        def tell(self, verb: str, ids: list[bytes], ttl_ms: int = 0) -> list[tuple[str, str, str, int]]:
            done = super().tell(verb, ids, ttl_ms)
            if len(self.told) > 2:
                return done
            if trouble == "away":
                raise PeerLostError("the node is not there")
            return [("clipped", trouble, "disk", 0)] * len(ids)

    node, half = Busy(), Half()
    all_hints = Hints(node, half.facts, half.counts, "any", Tenants(0, {}), costs())  # type: ignore[arg-type]
    half.requests.hints = half.hints = all_hints
    request = a_request("one", 2 * SIZE)
    request.computed = 2 * SIZE
    request.kv_transfer_params = {"kv_hint": envelope(said)}
    half.request_added(request)
    all_hints.finished("one")
    until(lambda: len(node.told) == 3, 10)
    time.sleep(2 * hints.BUSY_AGAIN_S)
    all_hints.close()
    assert len(node.told) == 3, "it is not asked again once it is done"


@pytest.mark.smoke
def test_a_request_that_is_left_alone_says_so_of_its_hints() -> None:
    all_hints = Hints(Node(), facts(), Counts(), "any", Tenants(0, {}), costs())  # type: ignore[arg-type]
    request = a_request("one", SIZE)
    request.kv_transfer_params = {"kv_hint": envelope(action("kv.forget"))}
    all_hints.added(request)
    (answer,) = all_hints.finished("one")
    assert (answer["verdict"], answer["reason"]) == ("rejected", "left_alone")
    assert all_hints.of == {}, "nothing is kept of a request that has ended"


def test_a_node_does_what_a_request_of_vllm_hints_and_no_token_is_another(
    model: Path, tmp_path: Path
) -> None:
    node, tokens = Daemon(tmp_path / "node"), prompt(90, 4 * CHUNK + 5)
    with node, Engine(arguments(model, transfer(node.socket, kv_hints="any")), tmp_path / "log") as engine:

        def ask(*actions: Any, **more: Any) -> Any:
            params = {"kv_hint": envelope(*actions)} if actions else None
            (said,) = engine.generate(prompts=[tokens], tokens=2, params=params, **more)
            engine.settle()
            answers = [] if said["params"] is None else said["params"]["kv_hint_answers"]
            assert all(answer["verdict"] == "accepted" for answer in answers), answers
            return said

        def counted(verb: str) -> float:
            return node.metric(f'forebay_control_chunks_total{{verb="{verb}",verdict="accepted"')

        share, pin = action("kv.share", tokens=[0, 2 * CHUNK]), action("kv.pin", ttl_ms=60_000)
        first = ask(share, pin, salt="one")
        until(lambda: node.metric("forebay_pinned_chunks") == 4)
        engine.forget()
        other = ask(share, salt="two")
        assert other["cached"] == 2 * CHUNK, "the beginning is shared, the rest is not"
        assert other["tokens"] == first["tokens"]
        ask(action("kv.unpin"), action("kv.demote"), share, salt="one")
        until(lambda: counted("demote") >= 2)  # the other request continues the shared beginning
        ask(action("kv.prefetch", back_in_ms=0), DYNAMO["actions"][0], share, salt="one")
        until(lambda: counted("prefetch") >= 8)
        ask(action("kv.forget"), share, salt="one")
        until(lambda: counted("forget") >= 4)
        engine.forget()
        assert ask(share, salt="one")["cached"] == 0, "it is forgotten, with the shared beginning"
        assert ask(share, salt="two")["tokens"] == first["tokens"]
