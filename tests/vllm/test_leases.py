"""A lease that ends while vLLM is inside a step: the tokens are right, and soon there.

A process that lives renews its leases from a thread of its own, however long a step takes. So the whole of
vLLM is stopped here, as in a machine that sleeps, for longer than the node keeps a lease that is not renewed;
meanwhile others fill the node's memory, and what the lease was for is overwritten.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ASKED, CHUNK, Engine, arguments, prompt, transfer
from nodes import Node
from processes import until

LEASE_S = 1
# What a load may take at most.
LOAD_US = 30_000_000
MIB = 1 << 20


@dataclass
class Place:
    """An engine, and a node with memory alone."""

    engine: Engine
    node: Node

    def fill(self, seed: int) -> None:
        """When no lease is left, others store more than there is room for."""
        forebay = pytest.importorskip("forebay")
        other = forebay.Node(self.node.socket)
        until(lambda: other.stats()["leases"] == 0)
        source = other.register_memory(bytearray(2 * MIB))
        for name in forebay.chunk_ids(forebay.namespace_key(NAMESPACE), prompt(seed, 64 * CHUNK), CHUNK):
            assert other.store(name, None, [[(source.address, 2 * MIB, 0)]]).wait()
        other.close()


# Of somebody else.
NAMESPACE = {
    "weights": bytes(32),
    "dtype": "float32",
    "order": "LBHNC",
    "block_tokens": 16,
    "tp": (0, 1),
    "pp": (0, 1),
    "attention": {},
    "lora": None,
    "salt": b"others",
}


@pytest.fixture(scope="module")
def place(
    model: Path, plain: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("leases")
    with ExitStack() as ends:
        node = Node(folder, more=f"[limits]\nlease_s = {LEASE_S}\n")
        ends.callback(node.kill)
        engine = Engine(arguments(model, transfer(node.socket)), folder / "log")
        ends.callback(engine.kill)
        yield Place(engine, node)
        engine.end()


def is_stopped(process: int) -> bool:
    """Whether the kernel says so."""
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def is_warm(engine: Engine) -> bool:
    """Whether the prompt comes from the node."""
    tokens, count = ASKED["long"]
    assert engine.forget()
    (said,) = engine.generate(prompts=[tokens], tokens=count)
    return said["cached"] == len(tokens) // CHUNK * CHUNK


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("when", ["planned", "begun"])
def test_a_lease_that_ends_in_a_step_costs_time_and_no_token(
    place: Place, plain: dict[str, list[int]], when: str, layerwise: bool
) -> None:
    engine, (tokens, count) = place.engine, ASKED["long"]
    engine.layerwise(possible=layerwise)
    until(lambda: is_warm(engine))
    assert engine.forget()
    before, process = engine.stats(), engine.stop(when=when)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(engine.generate, prompts=[tokens], tokens=count)
        try:
            until(lambda: is_stopped(process))
            place.fill(seed=60 + 2 * layerwise + (when == "begun"))
        finally:
            os.kill(process, signal.SIGCONT)
        (said,) = answer.result()
    assert said["tokens"] == plain["long"]
    after = engine.stats()
    assert after["load_us"] - before["load_us"] < LOAD_US, "it was given up, and not found out"
    assert after["loads"] == before["loads"] + 1 and after["chunks_corrupt"] == before["chunks_corrupt"]
    if when == "planned":  # One that has begun may have brought all of it before the process stopped.
        assert after["loads_short"] > before["loads_short"], "what the lease was for was still there"
