"""One rank and two: KV that the one kind of engine stored is read by the other, and the tokens are right.

The engine with two ranks has a worker in a process of its own for each; they meet over loopback. Each has one
of the model's two KV heads. Their sums are added in another order than one rank adds them, so tokens could
differ from those of one rank without any fault; with this model they do not, and plain runs are of one rank.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ASKED, BLOCK, CHUNK, Daemon, Engine, arguments, ask, need_gpus, transfer, whole

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Place:
    """Both kinds of engine on one node."""

    one: Engine
    two: Engine
    node: Daemon


@pytest.fixture(scope="module")
def place(
    model: Path, plain: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    need_gpus(2)
    folder = tmp_path_factory.mktemp("ranks")
    with Daemon(folder / "node") as node, ExitStack() as engines:
        made = []
        for tp, theirs in ((1, 2), (2, 1)):
            reads = transfer(node.socket, also_read=[{"tp": theirs, "block_tokens": BLOCK}])
            ranks = {"tensor_parallel_size": tp, "distributed_executor_backend": "mp" if tp > 1 else "uni"}
            engine = Engine(arguments(model, reads, **ranks), folder / f"log{tp}")
            made.append(engines.enter_context(engine))
        yield Place(*made, node)


@pytest.mark.parametrize("layerwise", [True, False])
def test_two_ranks_load_what_they_have_stored(
    place: Place, plain: dict[str, list[int]], layerwise: bool
) -> None:
    name = "long" if layerwise else "talk"
    place.two.layerwise(possible=layerwise)
    cold, before = ask(place.two, name), place.two.stats()
    warm, after = ask(place.two, name), place.two.stats()
    place.two.layerwise(possible=None)
    assert cold["tokens"] == plain[name] and cold["cached"] == 0
    assert warm["tokens"] == plain[name] and warm["cached"] == whole(name)
    assert after["loads"] == before["loads"] + 2 and after["loads_short"] == before["loads_short"]


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("stored_by", ["one", "two"])
def test_either_loads_what_the_other_has_stored(
    place: Place, plain: dict[str, list[int]], stored_by: str, layerwise: bool
) -> None:
    storer, reader = (place.one, place.two) if stored_by == "one" else (place.two, place.one)
    name = {("one", True): "short", ("one", False): "even", ("two", True): "left", ("two", False): "never"}[
        stored_by, layerwise
    ]
    reader.layerwise(possible=layerwise)
    before = reader.stats()["loads_short"]
    first, then = ask(storer, name), ask(reader, name)
    reader.layerwise(possible=None)
    assert first["tokens"] == plain[name] == then["tokens"]
    assert then["cached"] in (whole(name), min(whole(name), len(ASKED[name][0]) - 1))
    assert reader.stats()["loads_short"] == before


@pytest.mark.parametrize("prefilled_by", ["one", "two"])
def test_either_goes_on_where_the_other_stopped(
    place: Place, plain: dict[str, list[int]], prefilled_by: str
) -> None:
    prefiller, decoder = (place.one, place.two) if prefilled_by == "one" else (place.two, place.one)
    name = "handed" if prefilled_by == "one" else "right"
    tokens = ASKED[name][0]
    (prefilled,) = prefiller.generate(prompts=[tokens], tokens=1, params=PREFILL)
    prefiller.settle()
    said = ask(decoder, name, prefilled["params"])
    assert said["tokens"] == plain[name]
    # The tokens behind the last whole chunk come too, and only who shows the ticket finds them.
    assert said["cached"] >= len(tokens) - 1


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_at_one_rank_has_failed_at_both(
    place: Place, plain: dict[str, list[int]], rank: int, layerwise: bool
) -> None:
    ask(place.two, "long")  # Stored, if it was not.
    before = place.two.stats()
    with place.two.spoiled(layerwise=layerwise, tokens=3 * CHUNK, rank=rank):
        said = ask(place.two, "long")
    after = place.two.stats()
    assert said["tokens"] == plain["long"]
    assert after["totals_loads_failed"] == before.get("totals_loads_failed", 0) + 1
    assert ask(place.two, "long")["cached"] == whole("long")
