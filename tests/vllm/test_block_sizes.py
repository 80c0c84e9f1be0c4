"""Blocks of 16 tokens and of 32: KV that the one kind of engine stored is read by the other, and the tokens
are right, with heads before tokens and with tokens before heads. On GPUs alone: CPUs keep keys transposed
within a block.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ASKED, CHUNK, ON_GPU, ROOM_TOKENS, Daemon, Engine, answers, arguments, ask, transfer

pytestmark = pytest.mark.skipif(not ON_GPU, reason="SKIPPED: CPUs keep keys transposed within a block")

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
SIZES = (16, 32)
LAYOUTS = ("HND", "NHD")


@dataclass
class Place:
    """An engine with blocks of each size, on one node, and what vLLM says with them alone."""

    engines: dict[int, Engine]
    plain: dict[str, list[int]]


def start(model: Path, folder: Path, node: Daemon, layout: str) -> Place:
    """Both engines. Each reads what the other has stored."""

    def engine(size: int) -> Engine:
        (other,) = (one for one in SIZES if one != size)
        reads = transfer(node.socket, layout=layout, also_read=[{"tp": 1, "block_tokens": other}])
        blocks = {"block_size": size, "num_gpu_blocks_override": ROOM_TOKENS // size}
        return Engine(arguments(model, reads, **blocks), folder / f"{layout}{size}")

    with ThreadPoolExecutor() as threads:
        engines = dict(zip(SIZES, threads.map(engine, SIZES), strict=True))
    first = engines[SIZES[0]]
    first.aside(on=True)
    said = answers(first, {name: one for name, one in ASKED.items() if not name.startswith("crowd")})
    first.aside(on=False)
    return Place(engines, said)


@pytest.fixture(scope="module", params=LAYOUTS)
def place(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("sizes")
    with Daemon(folder / "node") as node:
        made = start(model, folder, node, request.param)
        yield made
        for engine in made.engines.values():
            engine.end()


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("stored_in", SIZES)
def test_blocks_of_either_size_are_loaded_into_those_of_the_other(
    place: Place, stored_in: int, layerwise: bool
) -> None:
    storer = place.engines[stored_in]
    (reader,) = (engine for size, engine in place.engines.items() if size != stored_in)
    name = {(16, True): "long", (16, False): "even", (32, True): "left", (32, False): "never"}[
        stored_in, layerwise
    ]
    reader.layerwise(possible=layerwise)
    before = reader.stats()
    first, then = ask(storer, name), ask(reader, name)
    reader.layerwise(possible=None)
    after = reader.stats()
    assert first["tokens"] == place.plain[name] == then["tokens"]
    count = len(ASKED[name][0])
    assert first["cached"] == 0 and then["cached"] in (count // CHUNK * CHUNK, count - 1)
    assert after["loads"] == before["loads"] + 1 and after["loads_short"] == before["loads_short"]


@pytest.mark.parametrize("prefilled_in", SIZES)
def test_a_prefill_in_blocks_of_either_size_goes_on_in_those_of_the_other(
    place: Place, prefilled_in: int
) -> None:
    prefiller = place.engines[prefilled_in]
    (decoder,) = (engine for size, engine in place.engines.items() if size != prefilled_in)
    name = "handed" if prefilled_in == SIZES[0] else "short"
    tokens = ASKED[name][0]
    (prefilled,) = prefiller.generate(prompts=[tokens], tokens=1, params=PREFILL)
    prefiller.settle()
    said = ask(decoder, name, prefilled["params"])
    assert said["tokens"] == place.plain[name]
    assert said["cached"] >= len(tokens) - 1
