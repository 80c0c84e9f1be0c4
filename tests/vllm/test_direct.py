"""Prefill in one vLLM, decode in another that reads its blocks: the tokens are those of a plain run,
whatever becomes of the prefiller, and blocks that nobody reads come back.

The engines have no node in common: what the decoder has, it has from the prefiller's blocks.
"""

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import ASKED, BLOCK, CHUNK, Engine, arguments, prompt, transfer
from nodes import Node
from test_handover import PREFILL, Pair

# An offer that nobody reads ends after 30 s.
BLOCKS_BACK_S = 20
# Half of them hold the longest prompt.
BLOCKS = 128


def pair_in(folder: Path, model: Path, ends: ExitStack, tp: tuple[int, int] = (1, 1), **more: Any) -> Pair:
    """Two engines, each with a node of its own that knows no other."""
    nodes = Node(folder, "left"), Node(folder, "right")
    engines = []
    for number, node in enumerate(nodes):
        ends.callback(node.kill)
        settings = transfer(node.socket, direct_handover=True, **more)
        ranks = {
            "tensor_parallel_size": tp[number],
            "distributed_executor_backend": "mp" if tp[number] > 1 else "uni",
        }
        of_engine = {"num_gpu_blocks_override": BLOCKS, **ranks}
        engines.append(Engine(arguments(model, settings, **of_engine), folder / f"log{number}"))
        ends.callback(engines[-1].kill)
    return Pair(*engines, nodes)


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as ends:
        yield pair_in(tmp_path_factory.mktemp("direct"), model, ends)


def ticket_of(pair: Pair, tokens: list[int]) -> dict[str, Any]:
    """What the prefiller says as soon as it has computed the prompt."""
    (said,) = pair.prefiller.generate(prompts=[tokens], tokens=1, params=PREFILL)
    params: dict[str, Any] = said["params"]
    return params


def hand_over(
    pair: Pair, tokens: list[int], count: int, ticket: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What the decoder says. Meanwhile the prefiller goes on, as a server does, until it has its blocks."""
    ticket = ticket or ticket_of(pair, tokens)
    with ThreadPoolExecutor(1) as beside:
        settled = beside.submit(pair.prefiller.settle, limit_s=BLOCKS_BACK_S)
        said = pair.decode(tokens, count, ticket)
        settled.result()
    return said


def counted(engine: Engine, name: str) -> int:
    return int(engine.stats().get(f"totals_{name}", 0))


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["short", "even", "long"])
def test_a_decoder_reads_the_prefillers_blocks(pair: Pair, plain: dict[str, list[int]], name: str) -> None:
    tokens, count = ASKED[name]
    before = {each: counted(pair.decoder, each) for each in ("handovers_direct", "loads")}
    said = hand_over(pair, tokens, count)
    assert said["tokens"] == plain[name] and said["cached"] >= len(tokens) - 1
    assert counted(pair.decoder, "handovers_direct") == before["handovers_direct"] + 1
    assert pair.decoder.stats()["loads"] == before["loads"], "nothing came from the node"
    assert pair.decoder.stats()["bytes_read"] > 0


def test_only_what_the_decoder_lacks_is_read(pair: Pair) -> None:
    tokens = prompt(701, 4 * CHUNK)
    pair.decoder.generate(prompts=[tokens[: 3 * CHUNK]], tokens=1)
    before = pair.decoder.stats()["bytes_read"]
    (alone,) = pair.prefiller.generate(prompts=[tokens], tokens=8)
    said = hand_over(pair, tokens, 8)
    part = pair.decoder.stats()["bytes_read"] - before
    whole = prompt(702, 4 * CHUNK)
    hand_over(pair, whole, 8)
    assert said["tokens"] == alone["tokens"]
    assert 0 < part * 3 <= pair.decoder.stats()["bytes_read"] - before - part


def test_of_a_prompt_that_the_decoder_has_one_block_is_read(pair: Pair) -> None:
    tokens = prompt(703, 4 * CHUNK)
    pair.decoder.generate(prompts=[tokens], tokens=1)
    before = pair.decoder.stats()["bytes_read"]
    hand_over(pair, tokens[: 3 * CHUNK], 8)
    block = pair.decoder.stats()["bytes_read"] - before
    before += block
    hand_over(pair, prompt(709, 3 * CHUNK), 8)
    assert (pair.decoder.stats()["bytes_read"] - before) * BLOCK == block * 3 * CHUNK


def chosen(ticket: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """What a proxy tells a decoder of a prompt that the prefiller has yet to compute: all of an earlier
    ticket but its length, with keys of its own."""
    ours = {name: said for name, said in ticket["forebay"].items() if name != "tokens"}
    ranks = [[rank[0], key] for rank, key in zip(ours["direct"]["ranks"], keys, strict=True)]
    ours |= {"at_once": True, "direct": ours["direct"] | {"ranks": ranks}}
    return {"do_remote_prefill": True, "forebay": ours}


@pytest.mark.smoke
@pytest.mark.parametrize("first", ["decoder", "prefiller"])
def test_a_decoder_that_is_asked_at_the_same_time_reads_the_blocks(pair: Pair, first: str) -> None:
    earlier, tokens = prompt(730, CHUNK), prompt(731 + len(first), 6 * CHUNK + 7)
    keys = [secrets.token_hex(16)]
    known = ticket_of(pair, earlier)
    hand_over(pair, earlier, 1, known)
    ticket = chosen(known, keys)
    before = {name: counted(pair.decoder, name) for name in ("handovers_direct", "handovers_direct_failed")}
    with ThreadPoolExecutor(1) as beside:
        if first == "decoder":
            decoding = beside.submit(pair.decode, tokens, 8, ticket)
            time.sleep(0.5)
        pair.prefiller.generate(prompts=[tokens], tokens=1, params=PREFILL | {"forebay": {"keys": keys}})
        if first == "prefiller":
            decoding = beside.submit(pair.decode, tokens, 8, ticket)
        pair.prefiller.settle(limit_s=BLOCKS_BACK_S)
        said = decoding.result()
    assert counted(pair.decoder, "handovers_direct") == before["handovers_direct"] + 1
    assert counted(pair.decoder, "handovers_direct_failed") == before["handovers_direct_failed"]
    pair.prefiller.forget()
    (alone,) = pair.prefiller.generate(prompts=[tokens], tokens=8)
    assert said["tokens"] == alone["tokens"] and said["cached"] >= 0


@pytest.mark.parametrize("keys", [[], ["00" * 15], ["00" * 16, "01" * 16], 5])
def test_keys_that_are_none_are_refused_and_the_prompt_is_handed_over_as_usual(
    pair: Pair, keys: object
) -> None:
    tokens = prompt(740, 2 * CHUNK)
    before = counted(pair.prefiller, "handovers_refused")
    params = PREFILL | {"forebay": {"keys": keys}}
    (said,) = pair.prefiller.generate(prompts=[tokens], tokens=1, params=params)
    assert counted(pair.prefiller, "handovers_refused") == before + 1
    assert len(hand_over(pair, tokens, 2, said["params"])["tokens"]) == 2


@pytest.mark.parametrize("change", ["gone", "key", "host"])
def test_a_ticket_that_leads_nowhere_costs_time_only(pair: Pair, change: str) -> None:
    tokens = prompt(704 + len(change), 4 * CHUNK + 3)
    ticket = ticket_of(pair, tokens)
    direct = ticket["forebay"]["direct"]
    if change == "key":
        direct["ranks"][0][1] = "00" * 16
    elif change == "host":
        direct["host"] = "elsewhere"
    else:
        hand_over(pair, tokens, 1, ticket)
        pair.decoder.forget()
    said = pair.decode(tokens, 8, ticket)
    (alone,) = pair.prefiller.generate(prompts=[tokens], tokens=8)
    assert said["tokens"] == alone["tokens"]


def test_a_ticket_of_another_prompt_is_computed(pair: Pair) -> None:
    tokens, others = prompt(711, 4 * CHUNK), prompt(712, 4 * CHUNK)
    before = counted(pair.decoder, "handovers_direct_failed")
    said = pair.decode(tokens, 8, ticket_of(pair, others))
    assert counted(pair.decoder, "handovers_direct_failed") == before + 1
    (alone,) = pair.prefiller.generate(prompts=[tokens], tokens=8)
    assert said["tokens"] == alone["tokens"]


@pytest.mark.parametrize("direct", [7, {}, {"ranks": [["!", "x"]]}, {"ranks": [["AA==", "00"]]}])
def test_a_ticket_that_is_none_is_refused_and_the_prompt_computed(pair: Pair, direct: object) -> None:
    tokens = prompt(708, 2 * CHUNK)
    ticket = ticket_of(pair, tokens)
    ticket["forebay"]["direct"] = direct
    before = counted(pair.decoder, "handovers_refused")
    assert len(pair.decode(tokens, 2, ticket)["tokens"]) == 2
    assert counted(pair.decoder, "handovers_refused") == before + 1


@pytest.mark.smoke
def test_a_prefiller_that_dies_before_it_is_read_costs_a_prefill(model: Path, tmp_path: Path) -> None:
    with ExitStack() as ends:
        pair = pair_in(tmp_path, model, ends)
        tokens = prompt(720, 4 * CHUNK + 5)
        (alone,) = pair.decoder.generate(prompts=[tokens], tokens=8)
        pair.decoder.forget()
        ticket = ticket_of(pair, tokens)
        pair.prefiller.kill()
        began = time.monotonic()
        said = pair.decode(tokens, 8, ticket)
        assert said["tokens"] == alone["tokens"]
        assert counted(pair.decoder, "handovers_direct_failed") == 1
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("tp", [(1, 2), (2, 1)], ids=["1-2", "2-1"])
def test_a_decoder_reads_the_heads_that_it_needs_of_a_prefiller_of_another_tp_size(
    model: Path, tmp_path: Path, tp: tuple[int, int]
) -> None:
    with ExitStack() as ends:
        pair = pair_in(tmp_path, model, ends, tp)
        for number in range(2):  # Blocks of the first one come back, or there were none for the second.
            tokens = prompt(730 + number, 4 * CHUNK + 5)
            said = hand_over(pair, tokens, 8)
            assert counted(pair.decoder, "handovers_direct") == number + 1
            assert counted(pair.decoder, "handovers_direct_failed") == 0
            assert pair.decoder.stats()["loads"] == 0, "nothing came from the node"
            (alone,) = pair.prefiller.generate(prompts=[tokens], tokens=8)
            assert said["tokens"] == alone["tokens"]
