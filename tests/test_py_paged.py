"""`forebay.PagedCache` from Python: an engine's pages, a real node, engines of other shapes."""

import json
import pathlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from processes import Daemon, freeze, until

import forebay

LAYERS, PAGES, CHUNK_TOKENS, CELL_BYTES = 3, 64, 64, 24
TIMEOUT_S = 30.0
TOKENS = 3 * CHUNK_TOKENS + 21
NAMESPACE = {
    "weights": bytes(32),
    "dtype": "bfloat16",
    "order": "HND",
    "block_tokens": 16,
    "tp": (0, 1),
    "pp": (0, 1),
    "attention": {"rope_theta": "10000"},
    "lora": None,
    "salt": b"",
}


def truth(tokens: int, heads: range) -> npt.NDArray[np.uint8]:
    """Layers x heads x tokens x bytes, none of them zero."""
    layer, head, token, byte = np.ogrid[:LAYERS, heads.start : heads.stop, :tokens, :CELL_BYTES]
    value = (layer * 7919 + token * 104_729 + head * 1_299_709 + byte * 31 + 1) * 2_654_435_761
    return ((value >> 13) & 0xFF | 1).astype(np.uint8)


@dataclass
class Engine:
    """Some heads of a model in pages of [heads, tokens, bytes]."""

    daemon: Daemon
    heads: range
    page_tokens: int
    kept_pages: int | None = None
    verify: Literal["gpu", "host", "both"] | None = None
    pages: npt.NDArray[np.uint8] = field(init=False)
    cache: forebay.PagedCache = field(init=False)

    def __post_init__(self) -> None:
        self.pages = np.zeros((LAYERS, PAGES, len(self.heads), self.page_tokens, CELL_BYTES), np.uint8)
        layer = self.pages[0]
        rows = [
            (int(self.pages[n].ctypes.data), PAGES, layer[0].nbytes, layer[0].nbytes, 0)
            for n in range(LAYERS)
        ]
        self.cache = forebay.PagedCache(
            self.daemon.socket,
            rows,
            page_tokens=[self.page_tokens],
            chunk_tokens=CHUNK_TOKENS,
            heads=[len(self.heads)],
            name="engine",
            kept_pages=None if self.kept_pages is None else [self.kept_pages],
            verify=self.verify,
        )

    def blocks(self, seed: int, tokens: int = TOKENS) -> npt.NDArray[np.int32]:
        return np.array([(n * 11 + seed) % PAGES for n in range(-(-tokens // self.page_tokens))], np.int32)

    def compute(self, blocks: npt.NDArray[np.int32]) -> None:
        known = truth(len(blocks) * self.page_tokens, self.heads)
        for number, block in enumerate(blocks):
            if block >= 0:
                start = number * self.page_tokens
                self.pages[:, block] = known[:, :, start : start + self.page_tokens]

    def held(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        return np.concatenate([self.pages[:, block] for block in blocks], axis=2)

    def store(
        self, job: int, ids: list[bytes], missing: Sequence[int] = (), tenant: int | None = None
    ) -> None:
        blocks = self.blocks(job)
        self.compute(blocks)
        parents = [None, *ids[:-1]]
        sizes = [min(CHUNK_TOKENS, TOKENS - n * CHUNK_TOKENS) for n in range(len(ids))]
        chunks = list(zip(ids, parents, sizes, strict=True))
        self.cache.store(job, [chunks], [blocks], tenant=tenant)
        assert self.cache.wait_stored([job], TIMEOUT_S)
        assert self.cache.take_ended() == ([], [(job, list(missing))])

    def load(
        self,
        job: int,
        sources: list[tuple[list[bytes], int, int, int]],
        blocks: npt.NDArray[np.int32],
        source_page_tokens: int | None = None,
        tenant: int | None = None,
    ) -> tuple[int, str | None]:
        self.cache.load(
            job,
            sources,
            [blocks],
            tokens=TOKENS,
            source_page_tokens=source_page_tokens,
            layerwise=True,
            tenant=tenant,
        )
        for layer in range(LAYERS):
            self.cache.wait_layer(layer)
        [(ended, tokens, why)], _ = self.cache.take_ended()
        assert ended == job
        return tokens, why

    def is_true(self, blocks: npt.NDArray[np.int32]) -> bool:
        return bool((self.held(blocks)[:, :, :TOKENS] == truth(TOKENS, self.heads)).all())


def ids_of(salt: bytes) -> list[bytes]:
    key = forebay.namespace_key({**NAMESPACE, "salt": salt})
    return forebay.chunk_ids(key, list(range(TOKENS)), CHUNK_TOKENS, tail=True)


def test_ids_go_on_behind_a_chunk_and_a_tail_has_one_too() -> None:
    key = forebay.namespace_key(NAMESPACE)
    tokens = list(range(100))
    ids = forebay.chunk_ids(key, tokens, 32)
    with_tail = forebay.chunk_ids(key, tokens, 32, tail=True)
    assert len(key) == 32 and len(ids) == 3 and with_tail[:3] == ids and len(with_tail) == 4
    assert forebay.chunk_ids(key, tokens[32:], 32, parent=ids[0], tail=True) == with_tail[1:]
    assert forebay.chunk_ids(key, tokens[:96], 32, tail=True) == ids
    assert forebay.namespace_key({**NAMESPACE, "tp": (1, 2)}) != key
    for field_, value in (("dtype", "int3"), ("tp", (2, 2)), ("weights", b"short"), ("order", "XYZ")):
        with pytest.raises(forebay.InvalidError, match=field_):
            forebay.namespace_key({**NAMESPACE, field_: value})
    with pytest.raises(forebay.InvalidError, match="lacks the field tp"):
        forebay.namespace_key({name: value for name, value in NAMESPACE.items() if name != "tp"})
    with pytest.raises(forebay.InvalidError, match="a field typo"):
        forebay.namespace_key({**NAMESPACE, "typo": 1})


def test_heads_are_read_from_the_ranks_that_have_them() -> None:
    assert forebay.head_reads(8, 1, 0, 2) == [(0, 0, 0, 4), (1, 0, 4, 4)]
    assert forebay.head_reads(8, 2, 1, 1) == [(0, 4, 0, 4)]
    with pytest.raises(forebay.InvalidError):
        forebay.head_reads(8, 3, 0, 1)


def test_bytes_come_back_in_the_same_shape_with_tail_and_without_unwanted_pages(daemon: Daemon) -> None:
    writer, reader = Engine(daemon, range(2), 16), Engine(daemon, range(2), 16)
    ids = ids_of(b"same")
    writer.store(3, ids)
    blocks = reader.blocks(9)
    assert reader.load(1, [(ids, 0, 0, 2)], blocks) == (TOKENS, None)
    assert reader.is_true(blocks)
    reader.pages[:] = 0
    wanted = blocks.copy()
    wanted[[0, 5]] = -1
    assert reader.load(2, [(ids, 0, 0, 2)], wanted.astype(np.int64)) == (TOKENS, None)
    assert not reader.pages[:, blocks[[0, 5]]].any(), "what was not wanted was not touched"
    assert (reader.pages[:, blocks[3]] == truth(64, range(2))[:, :, 48:64]).all()
    stats = reader.cache.stats()
    assert (stats["loads"], stats["loads_short"], stats["chunks_memory"]) == (2, 0, 8)
    assert (stats["bytes_memory"], stats["bytes_disk"], stats["bytes_peer"]) == (stats["bytes_loaded"], 0, 0)
    assert stats["bytes_memory"] >= LAYERS * TOKENS * 2 * CELL_BYTES
    bubbles = reader.cache.take_bubbles()
    assert [job for job, _, _ in bubbles] == [1, 2] and reader.cache.take_bubbles() == []
    assert sum(late for _, _, late in bubbles) == stats["layers_late"]
    waited_us = sum(seconds * 1e6 for _, seconds, _ in bubbles)
    assert stats["bubble_us"] == pytest.approx(waited_us, abs=len(bubbles)), "of each less than one is lost"


def test_what_is_stored_for_a_tenant_is_loaded_for_it_alone(daemon: Daemon) -> None:
    writer, reader = Engine(daemon, range(2), 16), Engine(daemon, range(2), 16)
    ids, blocks = ids_of(b"tenant"), reader.blocks(9)
    writer.store(3, ids, tenant=3)
    tokens, why = reader.load(1, [(ids, 0, 0, 2)], blocks)
    assert tokens == 0 and why is not None and not reader.pages.any()
    assert reader.load(2, [(ids, 0, 0, 2)], blocks, tenant=3) == (TOKENS, None)
    assert reader.is_true(blocks)


def test_other_ranks_and_other_blocks_are_only_another_mapping(daemon: Daemon) -> None:
    left, right, both = (
        Engine(daemon, range(2), 16),
        Engine(daemon, range(2, 4), 16),
        Engine(daemon, range(4), 16),
    )
    left.store(1, ids_of(b"left"))
    right.store(2, ids_of(b"right"))
    sources = {0: ids_of(b"left"), 1: ids_of(b"right")}
    reads = forebay.head_reads(4, 1, 0, 2)
    blocks = both.blocks(5)
    found = both.load(1, [(sources[rank], there, here, n) for rank, there, here, n in reads], blocks)
    assert found == (TOKENS, None) and both.is_true(blocks)

    both.store(6, ids_of(b"both"))
    for rank, reader in enumerate((left, right)):
        [(_, there, here, heads)] = forebay.head_reads(4, 2, rank, 1)
        blocks = reader.blocks(30)
        assert reader.load(1, [(ids_of(b"both"), there, here, heads)], blocks) == (TOKENS, None)
        assert reader.is_true(blocks)

    for page_tokens, source in ((32, left), (16, None)):
        reader = Engine(daemon, range(2), page_tokens)
        if source is None:
            source = Engine(daemon, range(2), 32)
            source.store(8, ids_of(b"32"))
        ids = ids_of(b"left") if page_tokens == 32 else ids_of(b"32")
        blocks = reader.blocks(2)
        assert reader.load(1, [(ids, 0, 0, 2)], blocks, source.page_tokens) == (TOKENS, None)
        assert reader.is_true(blocks)


@pytest.mark.parametrize("read_by", [1, 2, 4])
@pytest.mark.parametrize("stored_by", [1, 2, 4])
def test_heads_that_are_stored_one_by_one_are_read_by_ranks_of_any_number(
    daemon: Daemon, stored_by: int, read_by: int
) -> None:
    ids = [ids_of(b"head %d" % head) for head in range(4)]
    sizes = [min(CHUNK_TOKENS, TOKENS - n * CHUNK_TOKENS) for n in range(len(ids[0]))]

    def heads(rank: int, ranks: int) -> range:
        return range(4)[rank * 4 // ranks : (rank + 1) * 4 // ranks]

    for rank in range(stored_by):
        writer = Engine(daemon, heads(rank, stored_by), 16)
        blocks = writer.blocks(rank)
        writer.compute(blocks)
        parts = [list(zip(ids[n], [None, *ids[n][:-1]], sizes, strict=True)) for n in writer.heads]
        writer.cache.store(1, parts, [blocks])
        assert writer.cache.wait_stored([1], TIMEOUT_S)
        assert writer.cache.take_ended() == ([], [(1, [])])
    for rank in range(read_by):
        reader = Engine(daemon, heads(rank, read_by), 16)
        blocks = reader.blocks(9)
        reads = forebay.head_reads(4, read_by, rank, 4)
        sources = [(ids[head], there, here, count) for head, there, here, count in reads]
        assert reader.load(1, sources, blocks) == (TOKENS, None)
        assert reader.is_true(blocks)
    with pytest.raises(forebay.InvalidError, match="the number of parts is 3; allowed: a divisor of 2"):
        Engine(daemon, range(2), 16).cache.store(1, [[]] * 3, [writer.blocks(0)])


def test_a_chunk_keeps_so_many_pages_at_its_end_and_a_store_needs_no_others(daemon: Daemon) -> None:
    writer, reader = (Engine(daemon, range(2), 16, kept_pages=1) for _ in range(2))
    ids, dropped = ids_of(b"kept"), [0, 1, 2, 4, 5, 6, 8, 9, 10]
    blocks = writer.blocks(3)
    blocks[dropped] = -1
    writer.compute(blocks)
    chunks = list(zip(ids, [None, *ids[:-1]], (64, 64, 64, 21), strict=True))
    writer.cache.store(1, [chunks], [blocks])
    assert writer.cache.wait_stored([1], TIMEOUT_S)
    assert writer.cache.take_ended() == ([], [(1, [])])
    page_bytes = 2 * 16 * CELL_BYTES
    # The tail ends within a page, and keeps one more.
    assert writer.cache.stats()["bytes_stored"] == LAYERS * (3 + 2) * page_bytes

    blocks = reader.blocks(9)
    assert reader.load(1, [(ids, 0, 0, 2)], blocks) == (TOKENS, None)
    assert not reader.pages[:, blocks[dropped]].any(), "what a chunk does not keep is not written"
    known = truth(TOKENS, range(2))
    for number in (3, 7, 11, 12, 13):
        start, end = number * 16, min(number * 16 + 16, TOKENS)
        assert (reader.pages[:, blocks[number], :, : end - start] == known[:, :, start:end]).all()

    for table, says in ((3, "page -1 of block 3"), (12, "page -1 of block 12")):
        lacking = blocks.copy()
        lacking[table] = -1
        with pytest.raises(forebay.InvalidError, match=says):
            writer.cache.store(2, [chunks], [lacking])
    with pytest.raises(forebay.InvalidError, match="source_page_tokens is 32; allowed: 16"):
        reader.load(2, [(ids, 0, 0, 2)], blocks, source_page_tokens=32)
    with pytest.raises(forebay.InvalidError, match="kept_pages of group 0 is 0"):
        Engine(daemon, range(2), 16, kept_pages=0)


@pytest.mark.parametrize(
    ("verify", "allowed"), [("cpu", '"gpu", "host" or "both"'), ("gpu", '"host"'), ("both", '"host"')]
)
def test_who_verifies_is_refused_where_it_cannot_be_had(daemon: Daemon, verify: Any, allowed: str) -> None:
    with pytest.raises(forebay.InvalidError, match=f'verify is "{verify}"; allowed: {allowed}'):
        Engine(daemon, range(2), 16, verify=verify)
    Engine(daemon, range(2), 16, verify="host")


def test_a_dead_node_costs_tokens_and_its_successor_is_used(daemon: Daemon) -> None:
    engine, ids = Engine(daemon, range(2), 16), ids_of(b"dead")
    engine.store(1, ids)
    daemon.kill()
    until(lambda: not engine.cache.is_connected)
    blocks = engine.blocks(7)
    tokens, why = engine.load(1, [(ids, 0, 0, 2)], blocks)
    assert tokens == 0 and why is not None
    daemon.start()
    until(lambda: engine.cache.is_connected)
    engine.store(2, ids)
    assert engine.load(2, [(ids, 0, 0, 2)], blocks) == (TOKENS, None)


def test_a_frozen_node_ends_no_load_late(daemon: Daemon) -> None:
    engine, ids = Engine(daemon, range(2), 16), ids_of(b"frozen")
    engine.store(1, ids)
    assert daemon.process is not None
    freeze(daemon.process)
    engine.cache.load(
        1, [(ids, 0, 0, 2)], [engine.blocks(7)], tokens=TOKENS, layerwise=True, limit_us=300_000
    )
    engine.cache.wait_loads()
    [(_, tokens, why)], _ = engine.cache.take_ended()
    assert tokens == 0 and why, "it has waited until somebody thawed the node"
    [(job, seconds, late)] = engine.cache.take_bubbles()
    assert job == 1 and 0.2 < seconds < TIMEOUT_S and late == 1, "what a step waited for it is told"
    daemon.process.send_signal(signal.SIGCONT)


def test_a_frozen_node_ends_all_loads_in_the_background_in_bounded_time(daemon: Daemon) -> None:
    engine, ids = Engine(daemon, range(2), 16), ids_of(b"frozen")
    engine.store(1, ids)
    assert daemon.process is not None
    freeze(daemon.process)
    jobs = list(range(1, 9))
    for job in jobs:
        engine.cache.load(
            job, [(ids, 0, 0, 2)], [engine.blocks(7)], tokens=TOKENS, layerwise=False, limit_us=300_000
        )
    assert engine.cache.wait_loaded(jobs, TIMEOUT_S), "whoever thaws the node"
    loads, _ = engine.cache.take_ended()
    assert sorted(job for job, _, _ in loads) == jobs and {tokens for _, tokens, _ in loads} == {0}
    assert engine.cache.take_bubbles() == [], "no step has waited"
    daemon.process.send_signal(signal.SIGCONT)


def test_without_a_node_a_cache_is_there_and_waits_for_one(tmp_path: pathlib.Path) -> None:
    engine = Engine(Daemon(tmp_path), range(2), 16)
    assert not engine.cache.is_connected
    engine.store(1, ids_of(b"none"), missing=range(4))
    assert engine.cache.stats()["stores_failed"] == 4
    assert engine.load(1, [(ids_of(b"none"), 0, 0, 2)], engine.blocks(1))[0] == 0


def test_a_closed_cache_is_touched_by_nobody(daemon: Daemon) -> None:
    engine, ids = Engine(daemon, range(2), 16), ids_of(b"close")
    engine.store(1, ids)
    for job in range(8):
        engine.cache.load(job, [(ids, 0, 0, 2)], [engine.blocks(3)], tokens=TOKENS, layerwise=job % 2 == 0)
    engine.cache.close()
    engine.pages[:] = 0
    assert engine.cache.wait_loaded(list(range(8)), TIMEOUT_S)
    assert not engine.pages.any()
    with pytest.raises(forebay.PeerLostError, match="closed"):
        engine.cache.load(9, [(ids, 0, 0, 2)], [engine.blocks(3)], tokens=TOKENS, layerwise=True)


def test_what_cannot_be_is_refused_with_field_and_value(daemon: Daemon) -> None:
    engine, ids = Engine(daemon, range(2), 16), ids_of(b"bad")
    blocks = engine.blocks(1)
    good = [(ids, 0, 0, 2)]
    for sources, pages, says in (
        (good, [blocks[:3]], "the pages of group 0 are 3"),
        (good, [blocks, blocks], "pages has 2 tables; allowed: 1"),
        (good, [blocks + 64], "allowed: 0 to 63, or -1"),
        ([(ids[:2], 0, 0, 2)], [blocks], "the number of chunks of a source is 2; allowed: 4"),
        ([(ids, 0, 1, 2)], [blocks], "the number of heads is 2; allowed: 1 to 1"),
        ([], [blocks], "the number of sources is 0"),
        ([([b"x"] * 4, 0, 0, 2)], [blocks], "1 bytes; allowed: 32"),
    ):
        with pytest.raises(forebay.InvalidError, match=says):
            engine.cache.load(1, sources, pages, tokens=TOKENS, layerwise=True)
    with pytest.raises(forebay.InvalidError, match="the tokens of a chunk is 3"):
        engine.cache.store(1, [[(ids[0], None, 3), (ids[1], ids[0], 64)]], [blocks])
    with pytest.raises(forebay.InvalidError, match="page_tokens of group 0 is 24"):
        forebay.PagedCache(daemon.socket, [(64, 1, 48, 48, 0)], page_tokens=[24], chunk_tokens=64, heads=[2])


def test_slack_learns_and_hands_over_what_it_knows() -> None:
    slack = forebay.Slack(32)
    for new in (256, 1024, 4096):
        for prefix in (0, 8192):
            slack.note_step(new, prefix, (60 * new + 0.006 * new * (prefix + new / 2)) / 1e6)
    slack.note_load("memory", 1 << 30, 0.025)
    slack.note_load("disk", 1 << 30, 4.0)
    asked = {"prompt_tokens": 4196, "held_tokens": 0, "chunk_tokens": 256, "chunk_bytes": 256 * 98_304}
    assert slack.worth(**asked, in_memory=16, on_disk=0, on_peers=0) == 16
    assert slack.worth(**asked, in_memory=0, on_disk=16, on_peers=0) == 0
    again = forebay.Slack(32, slack.profile())
    assert json.loads(slack.profile())["version"] == 1
    assert again.layer_us(700, 900) == pytest.approx(slack.layer_us(700, 900))
    with pytest.raises(forebay.InvalidError, match="layers is 32; allowed: 31"):
        forebay.Slack(31, slack.profile())
