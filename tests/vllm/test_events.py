"""What vLLM tells of KV blocks in the node: whoever follows its events knows what a lookup would find,
however small the node is, and after it has died too. The test takes them where vLLM publishes them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import BLOCK, CHUNK, Daemon, Engine, arguments, example, prompt, several, transfer, until
from nodes import two_peers

EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
PROMPTS = [prompt(100 + number, 300 + 40 * number) for number in range(10)]


class Follower:
    """An index of what is in the node, as a router keeps one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.blocks: dict[int, list[int]] = {}  # with their tokens, from the first one on
        self.removed = 0

    def follow(self) -> None:
        """Takes what was published since."""
        for event in self.engine.published():
            if event["medium"] != "CPU":
                continue
            if event["type"] == "BlockRemoved":
                self.removed += len(event["block_hashes"])
                for one in event["block_hashes"]:
                    del self.blocks[one]  # An error if it was not there, or was told to be gone already.
                continue
            assert event["block_size"] == BLOCK and len(event["block_hashes"]) == CHUNK // BLOCK
            assert event["group_idx"] == 0 and event["kv_cache_spec_kind"] == "full_attention"
            parent = event["parent_block_hash"]
            before = [] if parent is None else self.engine.tokens_of(block=parent)
            for place, one in enumerate(event["block_hashes"]):
                assert one not in self.blocks, "it is told again"
                tokens = before + event["token_ids"][: (place + 1) * BLOCK]
                assert self.engine.tokens_of(block=one) == tokens, "vLLM has another name for these tokens"
                self.blocks[one] = tokens

    def there(self) -> set[int]:
        """What lookups of all chunks find, after what is told by then was followed."""
        self.engine.take_events()
        self.follow()
        return set(self.engine.found())


@pytest.fixture
def small(model: Path, tmp_path: Path) -> Iterator[tuple[Engine, Daemon]]:
    """A node with room for some of the prompts."""
    segments = "segment_size = '1MiB'"
    with Daemon(tmp_path / "node", memory="8MiB", disk="8MiB", more_of_disk=segments) as node:
        given = arguments(model, transfer(node.socket), kv_events_config=EVENTS)
        with Engine(given, tmp_path / "log") as made:
            yield made, node


def test_whoever_follows_the_events_knows_what_a_lookup_finds(small: tuple[Engine, Daemon]) -> None:
    engine, node = small
    follower = Follower(engine)
    engine.record()
    for number, tokens in enumerate(PROMPTS):
        engine.generate(prompts=[tokens], tokens=8)
        assert engine.forget()
        follower.follow()
        if number == 0:
            assert follower.blocks, "what was stored is told in the step in which the store ends"
    until(lambda: follower.there() == set(follower.blocks))
    assert follower.removed and follower.blocks, "there was room for all"
    for tokens in PROMPTS[::-1]:
        engine.generate(prompts=[tokens], tokens=8)
        assert engine.forget()
    until(lambda: follower.there() == set(follower.blocks))
    node.written(1)

    node.kill()
    until(lambda: not follower.there() and not follower.blocks)
    node.start()
    until(lambda: bool(engine.found()))
    for tokens in PROMPTS:
        engine.generate(prompts=[tokens], tokens=8)
        assert engine.forget()
    engine.take_events()
    follower.follow()
    assert follower.blocks, "what the next node has is told"
    # What it has had before and this engine could not load is not told.
    until(lambda: follower.there() >= set(follower.blocks))


def test_what_a_load_has_brought_from_a_peer_is_told(model: Path, tmp_path: Path) -> None:
    nodes = two_peers(tmp_path)
    engines = [
        Engine(arguments(model, transfer(node.socket), kv_events_config=EVENTS), tmp_path / f"log {number}")
        for number, node in enumerate(nodes)
    ]
    try:
        tokens = prompt(90, 5 * CHUNK + 7)
        here, there = engines
        follower = Follower(there)
        there.record()
        here.generate(prompts=[tokens], tokens=1)
        here.settle()
        follower.follow()
        assert not follower.blocks
        until(lambda: there.forget() and there.generate(prompts=[tokens], tokens=1)[0]["cached"] > 0)
        there.settle()
        until(lambda: follower.there() == set(follower.blocks))
        assert len(follower.blocks) == 5 * CHUNK // BLOCK
        for engine in engines:
            engine.end()
    finally:
        for node in nodes:
            node.kill()


@pytest.mark.parametrize("beside", [False, True])
def test_nothing_is_told_unless_vllm_is_asked_to(model: Path, tmp_path: Path, beside: bool) -> None:
    with Daemon(tmp_path / "node") as node:
        connector = transfer(node.socket)
        if beside:
            connector = several(connector, example(tmp_path))
        given = arguments(model, connector, kv_events_config=EVENTS if beside else None)
        with Engine(given, tmp_path / "log") as engine:
            engine.record()
            engine.generate(prompts=[prompt(91, 2 * CHUNK)], tokens=1)
            engine.settle()
            told = [event for event in engine.published() if event["medium"] == "CPU"]
            assert bool(told) is beside, "a MultiConnector passes on what its connectors tell"
