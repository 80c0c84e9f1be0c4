"""Layers with states, where steps are scheduled ahead of tokens or have drafts: tokens are those of a plain
run, and states within what was generated are found by the next turn.

The model has short convolutions. With drafts these keep a window in one block, or (`columns`) what is behind
each draft in a block of its own, as recurrent layers do. Some drafts are right and others are wrong. On CPUs
vLLM has no kernels for this: `driver_drafts.py` stands in for them.
"""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, CHUNK, HERE, ON_GPU, PYTHON, Daemon, Engine, arguments, prompt, transfer
from processes import until

pytestmark = pytest.mark.long

STEP, SAID, DRAFTS = 512, 150, 3
SEEN = ["--seen", "4"] if ON_GPU else []
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
AS_DRAFTED = {"speculative_config": NGRAMS, "drafts": True}
KINDS: dict[str, dict[str, Any]] = {
    "ahead": {} if ON_GPU else {"ahead": True},
    "window": AS_DRAFTED if ON_GPU else AS_DRAFTED | {"drafts_over_states": "window"},
    **({} if ON_GPU else {"columns": AS_DRAFTED | {"drafts_over_states": "columns"}}),
}
# Enough for one request as long as the model allows, too few for all of them.
BLOCKS = 2560 // BLOCK
TALKS = [prompt(200 + seed, 150 + 61 * seed) for seed in range(5)]
CROWD = [prompt(300 + seed, 420) for seed in range(6)]
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def goes_on(tokens: list[int], said: list[int]) -> list[int]:
    """The next turn of a talk."""
    return tokens + said + prompt(9, 30)


@dataclass
class Place:
    """An engine with a node, and what is said to each prompt by one without."""

    engine: Engine
    node: Daemon
    plain: dict[tuple[int, ...], list[int]]

    def ask(self, *prompts: list[int], tokens: int = SAID, **more: Any) -> list[dict[str, Any]]:
        """All of them together. What they say is right."""
        answers = self.engine.generate(prompts=prompts, tokens=tokens, **more)
        for asked, said in zip(prompts, answers, strict=True):
            assert said["tokens"] == self.plain[tuple(asked)][:tokens]
        self.engine.settle()
        return answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([PYTHON, str(HERE / "tiny_model.py"), str(folder), "--states", *SEEN], check=True)
    return folder


@pytest.fixture(scope="module")
def places(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    folder = tmp_path_factory.mktemp("drafts")
    more = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": STEP}
    nodes = {kind: Daemon(folder / kind, memory="128MiB").start() for kind in KINDS}
    given = {"plain": arguments(model, enable_prefix_caching=False, **more)}
    for kind, how in KINDS.items():
        connector = transfer(nodes[kind].socket)
        given[kind] = arguments(model, connector, enable_prefix_caching=True, **more, **how)
    with ThreadPoolExecutor() as threads:  # Starting one takes most of the time.
        starts = {name: threads.submit(Engine, one, folder / f"{name}.log") for name, one in given.items()}
    engines = {name: start.result() for name, start in starts.items() if start.exception() is None}
    try:
        assert engines.keys() == starts.keys(), [start.exception() for start in starts.values()]
        plain = answers(engines.pop("plain"))
        for engine in engines.values():
            engine.know(sequences=[[*asked, *said] for asked, said in plain.items()])
        yield {kind: Place(engine, nodes[kind], plain) for kind, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.end()
        for node in nodes.values():
            node.kill()


def answers(engine: Engine) -> dict[tuple[int, ...], list[int]]:
    """What it says to all prompts and to the talks' next turns. It ends then."""
    with engine:
        found = {}
        for tokens in TALKS + CROWD:
            (said,) = engine.generate(prompts=[tokens], tokens=SAID)
            found[tuple(tokens)] = said["tokens"]
            more = goes_on(tokens, said["tokens"])
            (said,) = engine.generate(prompts=[more], tokens=SAID)
            found[tuple(more)] = said["tokens"]
        return found


@pytest.fixture(params=KINDS)
def place(places: dict[str, Place], request: pytest.FixtureRequest) -> Place:
    found = places[request.param]
    assert found.engine.forget()
    return found


def last(tokens: int) -> int:
    """Where the last state is that is of use to a prompt: one token at least is computed."""
    return (tokens - 1) // CHUNK * CHUNK


def test_steps_are_scheduled_ahead_or_have_drafts_of_which_some_are_right(places: dict[str, Place]) -> None:
    for kind, one in places.items():
        assert one.engine.is_ahead() == (kind == "ahead")
        if kind != "ahead":
            counted = one.engine.drafts()
            one.ask(TALKS[0], salt="drafts")
            both = zip(one.engine.drafts(), counted, strict=True)
            drafted, accepted = (now - before for now, before in both)
            assert drafted > 1.2 * accepted > SAID / 2


def test_states_within_what_was_generated_are_found_by_the_next_turn(place: Place) -> None:
    lost = place.engine.stats().get("totals_states_lost", 0)
    for tokens in TALKS:
        (said,) = place.ask(tokens)
        assert place.engine.forget()
        more = goes_on(tokens, said["tokens"])
        assert last(len(tokens)) < last(len(tokens) + SAID - DRAFTS), "no chunk ends in what was generated"
        for _ in range(2):  # It is right the second time too: what it stored itself is right.
            (again,) = place.ask(more)
            assert again["cached"] >= last(len(tokens) + SAID - DRAFTS)
            assert place.engine.forget()
    assert place.engine.stats().get("totals_states_lost", 0) == lost


def test_many_talks_that_take_each_others_blocks_say_the_same(place: Place) -> None:
    before = place.engine.preemptions()
    for _ in range(2):
        said = place.ask(*TALKS, *CROWD)
        assert place.engine.forget()
    turns = [goes_on(tokens, one["tokens"]) for tokens, one in zip(TALKS + CROWD, said, strict=True)]
    hits = sum(one["cached"] for one in place.ask(*turns))
    assert hits > sum(last(len(tokens)) for tokens in TALKS + CROWD), "only prompts are found"
    assert place.engine.preemptions() > before, "there was room for all"


def test_what_comes_from_the_disk_is_the_same(place: Place) -> None:
    (said,) = place.ask(TALKS[1])
    more = goes_on(TALKS[1], said["tokens"])
    place.node.written(1)
    place.node.kill()
    place.node.start()
    until(place.engine.connected)
    assert place.engine.forget()
    disk = place.engine.stats().get("totals_tokens_disk", 0)
    assert place.ask(more)[0]["cached"] >= last(len(TALKS[1]) + SAID - DRAFTS)
    assert place.engine.stats()["totals_tokens_disk"] > disk


@pytest.mark.parametrize("fault", ["some chunks", "a lost state", "a spoiled state"])
def test_a_load_that_fails_is_computed(place: Place, fault: str) -> None:
    (said,) = place.ask(TALKS[2])
    more = goes_on(TALKS[2], said["tokens"])
    assert place.engine.forget()
    failed = place.engine.stats().get("totals_loads_failed", 0)
    try:
        if fault == "a lost state":
            place.engine.lose_states()
        else:
            place.engine.spoil(tokens=2 * CHUNK * (fault == "some chunks"), states=fault != "some chunks")
        place.ask(more)
    finally:
        place.engine.heal()
    assert place.engine.stats()["totals_loads_failed"] > failed
    assert place.engine.forget()
    assert place.ask(more)[0]["cached"] >= last(len(TALKS[2]) + SAID - DRAFTS)


def test_cancelled_talks_leave_nothing_behind(place: Place) -> None:
    for steps in (3, 20, 45):
        place.engine.cancel(prompts=TALKS[3:], tokens=SAID, after_steps=steps)
    (said,) = place.ask(TALKS[3])
    assert place.engine.forget()
    place.ask(goes_on(TALKS[3], said["tokens"]))


@pytest.mark.parametrize("tokens", [TALKS[0], TALKS[4], prompt(210, 4 * CHUNK + 1)], ids=["0", "4", "even"])
def test_a_decoder_goes_on_from_the_state_of_a_prefiller(place: Place, tokens: list[int]) -> None:
    more = {"salt": f"hand-over {len(tokens)}"}
    (first,) = place.engine.generate(prompts=[tokens], tokens=9, params=PREFILL, **more)
    place.engine.settle()
    assert place.engine.forget()
    (said,) = place.engine.generate(prompts=[tokens], tokens=SAID, params=first["params"], **more)
    assert said["cached"] == len(tokens) - 1
    place.engine.settle()
    assert place.engine.forget()
    (cold,) = place.engine.generate(prompts=[tokens], tokens=SAID, salt="nobody else")
    assert said["tokens"] == place.plain.get(tuple(tokens), cold["tokens"]) == cold["tokens"]
