"""Forebay's connector beside another one, under vLLM's MultiConnector: tokens are right whoever loads, both
store, and what ours counts is among vLLM's metrics.

The other one is vLLM's example, which comes first and finds only prompts that it has seen whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ASKED, BLOCK, CHUNK, Daemon, Engine, arguments, example, several, transfer


@dataclass
class Place:
    """An engine with both, and where the other one keeps what it stores."""

    engine: Engine
    example: Path

    def ask(self, tokens: list[int], count: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """When vLLM itself has kept nothing. Returns when it is stored."""
        assert self.engine.forget()
        (said,) = self.engine.generate(prompts=[tokens], tokens=count, params=params)
        self.engine.settle()
        return said


@pytest.fixture(scope="module")
def place(
    model: Path, plain: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("beside")
    node, theirs = Daemon(folder / "node"), folder / "example"
    theirs.mkdir()
    both = several(example(theirs), transfer(node.socket))
    with node, Engine(arguments(model, both, disable_log_stats=False), folder / "log") as engine:
        engine.serialize_stats()
        yield Place(engine, theirs)


def test_what_the_other_one_has_is_its_to_load_and_the_rest_is_ours(
    place: Place, plain: dict[str, list[int]]
) -> None:
    tokens, count = ASKED["middle"]
    shared = tokens[:320]  # With another prompt: the other one has never seen this one whole.
    place.ask(shared, 1)
    assert list(place.example.iterdir()), "the other one has stored nothing"
    before = place.engine.stats()
    said = place.ask(tokens, count)
    assert said["tokens"] == plain["middle"] and said["cached"] == 320
    ours = place.engine.stats()
    assert ours["loads"] == before["loads"] + 1
    again = place.ask(tokens, count)
    assert again["tokens"] == plain["middle"] and again["cached"] == (len(tokens) - 1) // BLOCK * BLOCK
    assert place.engine.stats()["loads"] == ours["loads"], "the other one was to load this"


def test_what_is_generated_behind_what_the_other_one_has_loaded_is_not_stored_with_a_gap(
    place: Place, plain: dict[str, list[int]]
) -> None:
    tokens, count = ASKED["talk"]
    for _ in range(2):
        assert place.ask(tokens, count)["tokens"] == plain["talk"]
    more = tokens + plain["talk"] + ASKED["never"][0][:50]
    first, again = place.ask(more, 4), place.ask(more, 4)
    assert first["tokens"] == again["tokens"] and first["cached"] >= len(tokens) // CHUNK * CHUNK


def test_what_ours_counts_is_among_vllms_metrics(place: Place) -> None:
    counted = place.engine.metrics()
    assert counted["vllm:forebay_stores_done"] > 0
    # An engine in the caller's process drops what vLLM counts in steps that give nobody a token.
    assert counted["vllm:forebay_tokens_memory"] > 0 or place.engine.is_ahead()
    assert counted["vllm:forebay_loads"] == place.engine.stats()["loads"]


def test_a_hand_over_under_two_connectors_is_ours(place: Place, plain: dict[str, list[int]]) -> None:
    tokens, count = ASKED["handed"]
    prefill = {"do_remote_decode": True, "do_remote_prefill": False}
    (first,) = place.engine.generate(prompts=[tokens], tokens=1, params=prefill)
    place.engine.settle()
    for stored in place.example.iterdir():
        stored.rename(stored.with_suffix(".gone"))
    said = place.ask(tokens, count, first["params"])
    assert said["tokens"] == plain["handed"] and said["cached"] >= len(tokens) - 1
