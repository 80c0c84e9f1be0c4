"""Nodes that are not there, die, or have bad bytes cost time, never a token and never an engine.

The engine schedules ahead: when it hears that a load has failed in a step, the next one is under way.
"""

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import AHEAD, ASKED, CHUNK, Daemon, Engine, arguments, prompt, transfer
from processes import freeze, until

# As often as the scheduler may ask for a request whose load fails: at first, once again, and some
# to spare.
ASKS = 20


class Place:
    """An engine and a node, each of which can be killed."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.node = Daemon(folder / "node")
        self.engine = self.start()

    def start(self) -> Engine:
        """An engine."""
        return Engine(arguments(self.model, transfer(self.node.socket), **AHEAD), self.folder / "log")

    def ask(self, name: str) -> dict[str, Any]:
        """One of the prompts."""
        tokens, count = ASKED[name]
        (said,) = self.engine.generate(prompts=[tokens], tokens=count)
        return said

    def again(self, name: str) -> dict[str, Any]:
        """The same when vLLM itself has kept nothing."""
        assert self.engine.forget()
        return self.ask(name)

    def loaded(self, name: str, plain: dict[str, list[int]]) -> bool:
        """Whether the prompt came from the node. In any case the tokens are right."""
        said = self.again(name)
        assert said["tokens"] == plain[name]
        return said["cached"] == len(ASKED[name][0]) // CHUNK * CHUNK

    def restart_node(self) -> None:
        """What it had in memory is gone."""
        self.node.kill()
        self.node.start()


@pytest.fixture(scope="module")
def place(
    model: Path, plain: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    made = Place(model, tmp_path_factory.mktemp("failures"))
    try:
        yield made
        made.engine.end()
    finally:
        made.node.kill()


def test_an_engine_without_a_node_works_and_finds_it_when_it_comes(
    place: Place, plain: dict[str, list[int]]
) -> None:
    assert place.ask("short")["tokens"] == plain["short"]
    place.node.start()
    until(lambda: place.loaded("short", plain))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("good", [0, CHUNK * 3])
def test_a_load_that_fails_is_computed_or_is_an_error_and_never_loops(
    place: Place, plain: dict[str, list[int]], recompute: bool, layerwise: bool, good: int
) -> None:
    engine = place.engine
    until(lambda: place.loaded("long", plain))
    engine.policy(recompute=recompute)
    engine.layerwise(possible=layerwise)
    assert engine.forget()
    engine.spoil(tokens=good)
    engine.asks()
    before = engine.stats()["stores"]
    said = place.ask("long")
    asked = engine.asks()
    engine.settle()
    stored = engine.stats()["stores"] - before
    engine.heal()
    engine.policy(recompute=True)
    engine.layerwise(possible=None)
    if recompute:
        assert said["tokens"] == plain["long"]
        behind = (len(ASKED["long"][0]) - good) // CHUNK
        assert stored >= behind, "what did not come is not stored again"
    else:
        assert said["reason"] == "error"
    assert asked <= ASKS, "it asks for the same again and again"
    until(lambda: place.loaded("long", plain))


@pytest.mark.parametrize("good", [0, CHUNK * 3])
def test_a_load_that_fails_under_a_prompt_of_several_steps_leaves_no_token_of_any(
    place: Place, good: int
) -> None:
    engine, (beginning, _) = place.engine, ASKED["even"]
    place.ask("even")
    engine.settle()
    tokens = beginning + prompt(70 + good, 900)  # A step is 512 tokens.
    assert engine.forget()
    failed = engine.stats().get("totals_loads_failed", 0)
    with engine.spoiled(layerwise=True, tokens=good):
        (said,) = engine.generate(prompts=[tokens], tokens=16)
    assert engine.stats()["totals_loads_failed"] == failed + 1
    engine.aside(on=True)
    assert engine.forget()
    (plain,) = engine.generate(prompts=[tokens], tokens=16)
    engine.aside(on=False)
    assert said["tokens"] == plain["tokens"]


@pytest.mark.parametrize("good", [0, CHUNK * 3])
def test_those_that_share_what_failed_to_load_start_over_too(
    place: Place, plain: dict[str, list[int]], good: int
) -> None:
    names = ["left", "right", "middle"]
    prompts, engine = [ASKED[name][0] for name in names], place.engine
    engine.generate(prompts=prompts, tokens=16)
    engine.settle()
    assert engine.forget()
    failed = engine.stats().get("totals_loads_failed", 0)
    with engine.spoiled(layerwise=True, tokens=good):
        answers = engine.generate(prompts=prompts, tokens=16)
    assert engine.stats()["totals_loads_failed"] > failed
    assert [said["tokens"] for said in answers] == [plain[name] for name in names]


@pytest.mark.parametrize("how", ["aborted", "preempted"])
@pytest.mark.parametrize("good", [0, CHUNK * 3])
def test_who_leaves_the_step_of_a_load_that_fails_leaves_nothing_wrong(
    place: Place, plain: dict[str, list[int]], how: str, good: int
) -> None:
    engine, (tokens, count) = place.engine, ASKED["long"]
    if how == "preempted" and not engine.is_ahead():
        pytest.skip("SKIPPED: the next step is scheduled when the last one's output is known")
    until(lambda: place.loaded("long", plain))
    assert engine.forget()
    with engine.spoiled(layerwise=True, tokens=good):
        said = engine.leaves(prompt=tokens, tokens=count, how=how)
    assert said is None if how == "aborted" else said["tokens"] == plain["long"]
    assert place.ask("long")["tokens"] == plain["long"], "vLLM's own cache has what was not loaded"
    assert place.again("long")["tokens"] == plain["long"], "the node has it"


def test_a_node_that_dies_is_a_miss_and_what_is_on_its_disk_comes_back_with_it(
    place: Place, plain: dict[str, list[int]]
) -> None:
    until(lambda: place.loaded("short", plain) and place.loaded("long", plain))
    place.engine.settle()
    place.node.written(place.node.metric('forebay_chunks{tier="memory"'))
    place.node.kill()
    assert not place.loaded("short", plain), "there is no node"
    place.node.start()
    until(place.engine.connected)
    before = place.engine.stats().get("totals_tokens_disk", 0)
    assert place.loaded("long", plain)
    tokens = len(ASKED["long"][0]) // CHUNK * CHUNK
    assert place.engine.stats()["totals_tokens_disk"] == before + tokens, "it was in memory only"


def test_a_frozen_node_holds_up_no_step(place: Place, plain: dict[str, list[int]]) -> None:
    process, slowest_s = place.node.process, []
    assert process is not None
    for _ in range(3):  # A step computes too, and others may have the processors meanwhile.
        assert place.engine.forget()
        place.engine.slowest()
        freeze(process)
        try:
            said = place.ask("right")
        finally:
            process.send_signal(signal.SIGCONT)
        slowest_s.append(place.engine.slowest())
        assert said["tokens"] == plain["right"]
        until(lambda: place.loaded("right", plain))
        if slowest_s[-1] < 1.5:
            break
    assert min(slowest_s) < 1.5, "a client takes a node for dead after two seconds"


def test_what_was_stored_outlives_the_engine_and_the_node(place: Place, plain: dict[str, list[int]]) -> None:
    place.engine.kill()
    place.restart_node()
    place.engine = place.start()
    said = place.ask("long")
    assert said["tokens"] == plain["long"] and said["cached"] == len(ASKED["long"][0]) // CHUNK * CHUNK
    assert place.engine.stats()["totals_tokens_disk"] > 0


def test_bad_bytes_on_disk_are_a_miss(place: Place, plain: dict[str, list[int]]) -> None:
    place.node.kill()
    log = place.node.log
    data = bytearray(log.read_bytes())
    noise = random.Random(5)
    # In the middle of every 64 KiB: no chunk is spared, the log's own records mostly are.
    for at in range(1 << 20, len(data) - 64, 64 << 10):
        data[at : at + 64] = noise.randbytes(64)
    log.write_bytes(data)
    place.node.start()
    place.engine.asks()
    for _ in range(3):
        for name in ("short", "long"):
            assert place.again(name)["tokens"] == plain[name]
    assert place.engine.asks() <= 6 * ASKS
    until(lambda: place.loaded("short", plain))
