"""Prefill in one vLLM, decode in another: the tokens are those of a plain run.

The engines are processes of their own with a node each, and the nodes are peers: all that the decoder knows
of the prefiller is what a proxy carries, which is here what vLLM's own toy proxy does with it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ASKED, CHUNK, Engine, arguments, prompt, transfer
from nodes import Node, two_peers

pytestmark = pytest.mark.smoke

# What a proxy asks a prefiller for: nothing is known of the decoder yet.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class Pair:
    """Who prefills and who decodes, and their nodes."""

    prefiller: Engine
    decoder: Engine
    nodes: tuple[Node, Node]

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """The ticket that the prefiller gives. Its chunks are stored when this returns."""
        (said,) = self.prefiller.generate(prompts=[tokens], tokens=1, params=PREFILL)
        self.prefiller.settle()
        return said["params"]

    def decode(self, tokens: list[int], count: int, ticket: dict[str, Any]) -> dict[str, Any]:
        (said,) = self.decoder.generate(prompts=[tokens], tokens=count, params=ticket)
        return said


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("handover")
    nodes = two_peers(folder)
    with ExitStack() as ends:
        engines = []
        for number, node in enumerate(nodes):
            ends.callback(node.kill)
            waits = transfer(node.socket, handover_wait_s=60)
            engines.append(Engine(arguments(model, waits), folder / f"log{number}"))
            ends.callback(engines[-1].kill)
        yield Pair(*engines, nodes)


@pytest.mark.parametrize("name", ["short", "even", "long"])
def test_the_decoder_goes_on_where_the_prefiller_stopped(
    pair: Pair, plain: dict[str, list[int]], name: str
) -> None:
    tokens, count = ASKED[name]
    ticket = pair.prefill(tokens)
    assert ticket["do_remote_prefill"] and not ticket["do_remote_decode"]
    said = pair.decode(tokens, count, ticket)
    assert said["tokens"] == plain[name]
    # The last token is computed again for its logits, and no other.
    assert said["cached"] >= len(tokens) - 1


def test_a_decoder_that_is_asked_at_the_same_time_takes_over_when_all_is_there(pair: Pair) -> None:
    tokens = prompt(94, 11 * CHUNK + 5)
    ticket = {"do_remote_prefill": True, "do_remote_decode": False}
    with ThreadPoolExecutor(1) as asked:
        decoding = asked.submit(pair.decode, tokens, 16, ticket)
        pair.prefill(tokens)
        said = decoding.result()
    assert pair.prefiller.forget()
    (alone,) = pair.prefiller.generate(prompts=[tokens], tokens=16)
    assert said["tokens"] == alone["tokens"] and said["cached"] >= len(tokens) - 1


def test_a_prompt_shorter_than_a_chunk_is_handed_over_too(pair: Pair) -> None:
    tokens = prompt(90, CHUNK // 2 + 3)
    (alone,) = pair.prefiller.generate(prompts=[tokens], tokens=16)
    said = pair.decode(tokens, 16, pair.prefill(tokens))
    assert said["tokens"] == alone["tokens"] and said["cached"] >= len(tokens) - 1


def test_a_prompt_of_one_token_is_computed_and_not_loaded_for_ever(pair: Pair) -> None:
    tokens = prompt(96, 1)
    ticket = pair.prefill(tokens)
    (alone,) = pair.prefiller.generate(prompts=[tokens], tokens=8)
    loads = pair.decoder.stats()["loads"]
    said = pair.decode(tokens, 8, ticket)
    assert said["tokens"] == alone["tokens"]
    assert pair.decoder.stats()["loads"] == loads


def test_an_engine_takes_over_from_itself_over_its_own_node(pair: Pair, plain: dict[str, list[int]]) -> None:
    tokens, count = ASKED["left"]
    ticket = pair.prefill(tokens)
    assert pair.prefiller.forget()
    (said,) = pair.prefiller.generate(prompts=[tokens], tokens=count, params=ticket)
    assert said["tokens"] == plain["left"] and said["cached"] >= len(tokens) - 1


@pytest.mark.parametrize("tokens", [450, 37])
def test_a_hand_over_whose_tail_is_bad_is_computed_from_there(pair: Pair, tokens: int) -> None:
    asked = prompt(tokens, tokens)
    (alone,) = pair.prefiller.generate(prompts=[asked], tokens=16)
    with pair.decoder.spoiled(tokens=-1):
        said = pair.decode(asked, 16, pair.prefill(asked))
    assert said["tokens"] == alone["tokens"] and said["cached"] == tokens // CHUNK * CHUNK


def test_a_ticket_for_what_is_not_there_is_computed(pair: Pair, plain: dict[str, list[int]]) -> None:
    tokens, count = ASKED["right"]
    ticket = pair.prefill(prompt(91, len(tokens)))
    pair.decoder.wait_for_handovers(seconds=1)
    said = pair.decode(tokens, count, ticket)
    pair.decoder.wait_for_handovers(seconds=60)
    assert said["tokens"] == plain["right"]


def test_a_ticket_of_another_model_is_computed(pair: Pair, plain: dict[str, list[int]]) -> None:
    tokens, count = ASKED["middle"]
    ticket = pair.prefill(tokens)
    ticket["forebay"]["identity"] = "0" * 64
    said = pair.decode(tokens, count, ticket)
    assert said["tokens"] == plain["middle"]


def test_a_dead_prefiller_does_not_matter_once_its_chunks_are_stored(
    pair: Pair, plain: dict[str, list[int]]
) -> None:
    tokens, count = ASKED["talk"]
    ticket = pair.prefill(tokens)
    pair.prefiller.kill()
    said = pair.decode(tokens, count, ticket)
    assert said["tokens"] == plain["talk"] and said["cached"] >= len(tokens) - 1


def test_the_death_of_the_prefillers_node_costs_a_prefill(pair: Pair) -> None:
    tokens = prompt(92, 500)
    (alone,) = pair.decoder.generate(prompts=[tokens], tokens=16)
    pair.decoder.forget()
    pair.nodes[0].kill()
    fresh = prompt(93, 500)
    ticket = {"do_remote_prefill": True, "do_remote_decode": False}
    pair.decoder.wait_for_handovers(seconds=1)
    first = pair.decode(fresh, 16, ticket)
    (again,) = pair.decoder.generate(prompts=[fresh], tokens=16)
    assert first["tokens"] == again["tokens"]
    (warm,) = pair.decoder.generate(prompts=[tokens], tokens=16)
    assert warm["tokens"] == alone["tokens"]
