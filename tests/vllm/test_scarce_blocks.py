"""Requests without room, before and beside those that are loaded in the background: all of them end, rightly.

The pool of blocks is too small for two of them. vLLM stops looking at requests that wait at the first
one without room, and blocks of a load come back when its request ends (`admission.py`).
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, ROOM_TOKENS, Daemon, Engine, arguments, prompt, transfer

# One that is stuck stays so. A test takes a few seconds on an idle machine.
LIMIT_S = 90.0
SAID = 8
LARGE, LARGER = prompt(3, 1400), prompt(50, 1500)
PREFILL = {"do_remote_decode": True}
COMES_NEVER = {"do_remote_prefill": True}

DRAFTS = {"method": "draft_model", "num_speculative_tokens": 3}


class Engines:
    """One engine of each kind, with a node for all of them, started when it is asked for."""

    def __init__(self, model: Path, folder: Path, node: Daemon, ends: ExitStack) -> None:
        self.model, self.folder, self.node, self.ends = model, folder, node, ends
        self.started: dict[str, Engine] = {}

    def of(self, policy: str, drafts: bool = False) -> Engine:
        """One with this policy, which has forgotten all."""
        name = f"{policy} {drafts}"
        if name not in self.started:
            more: dict[str, Any] = {"scheduling_policy": policy}
            if drafts:
                more["speculative_config"] = {**DRAFTS, "model": str(self.model)}
            given = arguments(self.model, transfer(self.node.socket), **more)
            self.started[name] = Engine(given, self.folder / f"log {name}")
            self.ends.callback(self.started[name].kill)
        assert self.started[name].forget()
        return self.started[name]


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("room")
    with ExitStack() as ends:
        node = Daemon(folder / "node").start()
        ends.callback(node.kill)
        yield Engines(model, folder, node, ends)


def alone(engine: Engine, *prompts: list[int]) -> list[list[int]]:
    """What vLLM says to each by itself. They are in the node afterwards, and nowhere else."""
    engine.aside(on=True)
    said = []
    for tokens in prompts:
        said.append(engine.generate(prompts=[tokens], tokens=SAID)[0]["tokens"])
        assert engine.forget()
    engine.aside(on=False)
    for tokens in prompts:
        engine.generate(prompts=[tokens], tokens=1)
        assert engine.forget()
    return said


def ticket_for(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    """What a decoder is told when the prompt was prefilled."""
    (said,) = engine.generate(prompts=[tokens], tokens=1, params=PREFILL)
    assert engine.forget()
    return dict(said["params"])


def test_a_load_that_has_ended_behind_a_request_without_room_is_promoted(engines: Engines) -> None:
    """First come, first served. In front is one whose hand-over does not come, and that computes then."""
    engine = engines.of("fcfs")
    right = alone(engine, LARGER, LARGE)
    ticket = ticket_for(engine, LARGE)
    engine.slow(seconds=2.0)
    never = {"prompts": [prompt(51, len(LARGER))], "tokens": SAID, "params": COMES_NEVER}
    there = {"prompts": [LARGE], "tokens": SAID, "params": ticket}
    _, said = engine.one_by_one(asked=[never, there], limit_s=LIMIT_S)
    assert said["tokens"] == right[1] and said["cached"] >= len(LARGE) - 1
    engine.heal()
    assert engine.forget()
    (said,) = engine.generate(prompts=[LARGER], tokens=SAID)
    assert said["tokens"] == right[0], "the engine goes on"


@pytest.mark.parametrize("handed", [True, False])
def test_an_urgent_request_without_room_beside_a_load_gets_it_when_that_has_ended(
    engines: Engines, handed: bool
) -> None:
    engine = engines.of("priority")
    right = alone(engine, LARGER, LARGE)
    params = ticket_for(engine, LARGE) if handed else None
    engine.layerwise(possible=False)
    loads = engine.stats()["loads"]
    patient = {"prompts": [LARGE], "tokens": SAID, "params": params, "priority": 5, "loads": True}
    urgent = {"prompts": [LARGER], "tokens": SAID, "priority": 0}
    said = engine.one_by_one(asked=[patient, urgent], limit_s=LIMIT_S)
    assert [one["tokens"] for one in said] == right[::-1]
    assert engine.stats()["loads"] > loads
    engine.layerwise(possible=None)


def test_loads_that_fill_the_pool_leave_room_for_what_a_drafter_writes(engines: Engines) -> None:
    engine = engines.of("fcfs", drafts=True)
    blocks = ROOM_TOKENS // BLOCK - 1
    prompts = [prompt(60, blocks // 2 * BLOCK), prompt(61, (blocks - blocks // 2) * BLOCK)]
    right = alone(engine, *prompts)
    loads = engine.stats()["loads"]
    asked = [{"prompts": [tokens], "tokens": SAID} for tokens in prompts]
    said = engine.one_by_one(asked=asked, limit_s=LIMIT_S)
    assert [one["tokens"] for one in said] == right
    assert engine.stats()["loads"] == loads + 2, "both are loaded, one after the other"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_crowd_that_is_loaded_ends_with_right_tokens(engines: Engines, policy: str) -> None:
    """Some large and some small, some handed over, some of whose hand-over does not come, some urgent."""
    engine = engines.of(policy)
    prompts = [prompt(70 + number, 300 + 397 * (number % 4)) for number in range(8)]
    right = alone(engine, *prompts)
    tickets = [
        ticket_for(engine, tokens) if number % 3 == 0 else None for number, tokens in enumerate(prompts)
    ]
    engine.layerwise(possible=False)
    engine.slow(seconds=0.3)
    asked: list[dict[str, Any]] = [
        {"prompts": [tokens], "tokens": SAID, "params": ticket, "priority": number % 3}
        for number, (tokens, ticket) in enumerate(zip(prompts, tickets, strict=True))
    ]
    never = {"prompts": [prompt(90, 1700)], "tokens": SAID, "params": COMES_NEVER, "priority": 0}
    if policy == "fcfs":
        asked = [{**one, "priority": 0} for one in asked]
    said = engine.one_by_one(asked=[*asked[:2], never, *asked[2:]], limit_s=LIMIT_S)
    assert [one["tokens"] for one in said[:2] + said[3:]] == right
    engine.layerwise(possible=None)
    engine.heal()
