"""`forebay.vllm.tiering` under vLLM's own tiering manager, with a real node.

What lies above the manager needs a GPU, since vLLM has its OffloadingConnector there only. Runs in the
Python that has vLLM.
"""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from nodes import Node
from processes import until

pytest.importorskip("vllm.config", reason="SKIPPED: this Python has no vLLM: `make test-vllm`")

from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager  # noqa: E402
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402
from vllm.v1.kv_offload.tiering.manager import (  # noqa: E402
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from forebay.vllm import register  # noqa: E402
from forebay.vllm.tiering import ForebayTierManager  # noqa: E402

TIMEOUT_S = 60.0
ROWS, ROW_BYTES = 8, 65_536
WEIGHTS = "ab" * 32


def spec_of(dtype: str = "bfloat16") -> SimpleNamespace:
    """What the tier reads of an offloading spec."""
    parallel = SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1)
    config = SimpleNamespace(
        model=SimpleNamespace(name="no such model", dtype=dtype),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("layer.0", "layer.1")),),
        parallel=parallel,
    )
    return SimpleNamespace(config=config)


class Engine:
    """vLLM's tiering over a CPU tier of a few rows, without the GPU that would fill them."""

    def __init__(self, node: Any, keep_on_reset: bool = False, **spec: str) -> None:
        register()
        self.rows = np.zeros((ROWS, ROW_BYTES), dtype=np.int8)
        region = MagicMock()
        region.create_kv_memoryview.return_value = memoryview(self.rows)
        self.cpu = CPUPrimaryTierOffloadingManager(ROWS, region)
        config = {"type": "forebay", "node": str(node.socket), "weights_digest": WEIGHTS}
        if keep_on_reset:
            config["keep_on_reset"] = True
        self.tier = SecondaryTierFactory.create_secondary_tier(
            config, self.cpu.get_kv_memoryview(), spec_of(**spec)
        )
        self.tiering = TieringOffloadingManager(primary_tier=self.cpu, secondary_tiers=[self.tier])

    def step(self) -> None:
        """The end of a scheduler's step."""
        self.tiering.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=[]))

    def until_idle(self) -> None:
        end = time.monotonic() + TIMEOUT_S
        while self.tiering.has_pending_work():
            assert time.monotonic() < end, "a job has not ended"
            self.step()
            time.sleep(0.002)

    def store(self, request: ReqContext, blocks: dict[bytes, bytes]) -> None:
        """What happens when a GPU's blocks have been copied to the CPU tier."""
        prepared = self.tiering.prepare_store(list(blocks), request)
        assert prepared is not None and prepared.keys_to_store == list(blocks)
        for row, data in zip(prepared.store_spec.block_ids, blocks.values(), strict=True):
            self.rows[row] = np.frombuffer(data, dtype=np.int8)
        self.tiering.complete_store(list(blocks), request)
        self.until_idle()

    def find(self, request: ReqContext, keys: list[bytes]) -> list[LookupResult]:
        """Asks step by step, as the scheduler does, until each answer is final."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            found = [self.tiering.lookup(key, request) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING}.intersection(found):
                return found
            assert time.monotonic() < end, f"{found} for ever"
            self.step()
            time.sleep(0.002)

    def rows_of(self, request: ReqContext, keys: list[bytes]) -> list[bytes]:
        loaded = self.tiering.prepare_load(keys, request)
        data = [self.rows[row].tobytes() for row in loaded.block_ids]
        self.tiering.complete_load(keys, request)
        return data

    def reset(self) -> None:
        """As vLLM does it. 0.33 brings nothing up from a tier until workers have stopped writing."""
        self.tiering.reset_cache()
        getattr(self.tiering, "on_reset_flushed", lambda: None)()

    def request(self, name: str) -> ReqContext:
        context = ReqContext(req_id=name)
        self.tiering.on_new_request(context)
        return context

    def end(self) -> None:
        self.tiering.shutdown()


def blocks_of(count: int, seed: int = 1) -> dict[bytes, bytes]:
    made = np.random.default_rng(seed)
    return {make_offload_key(made.bytes(32), 0): made.bytes(ROW_BYTES) for _ in range(count)}


def test_it_is_what_vllm_asks_for() -> None:
    assert issubclass(ForebayTierManager, SecondaryTierManager)
    assert not ForebayTierManager.__abstractmethods__
    register()
    register()
    assert SecondaryTierFactory.get_tier_class({"type": "forebay"}) is ForebayTierManager


def test_blocks_that_left_the_cpu_tier_come_back_in_another_engine(node: Node) -> None:
    one, other, stranger = Engine(node), Engine(node), Engine(node, dtype="float16")
    blocks = blocks_of(3)
    one.store(one.request("a"), blocks)
    keys = list(blocks)
    request = other.request("b")
    assert other.find(request, keys) == [LookupResult.HIT] * 3
    assert other.rows_of(request, keys) == list(blocks.values())
    assert stranger.find(stranger.request("c"), keys) == [LookupResult.MISS] * 3
    for engine in (one, other, stranger):
        engine.end()


def test_a_block_behind_one_that_is_missing_is_found(node: Node) -> None:
    engine, fresh = Engine(node), Engine(node)
    first, last = blocks_of(2, seed=3), blocks_of(2, seed=4)
    engine.store(engine.request("a"), first | last)
    (missing,) = blocks_of(1, seed=5)
    found = fresh.find(fresh.request("b"), [*first, missing, *last])
    hit, miss = LookupResult.HIT, LookupResult.MISS
    assert found == [hit, hit, miss, hit, hit]
    engine.end()
    fresh.end()


def test_a_window_at_the_end_of_what_is_stored_is_found_however_long_the_prompt(node: Node) -> None:
    engine, fresh = Engine(node), Engine(node)
    stored, new = np.random.default_rng(6).bytes(32), [b"%032d" % number for number in range(40)]
    full, window = ([make_offload_key(name, group) for name in (stored, *new)] for group in (0, 1))
    engine.store(engine.request("a"), {key: bytes(ROW_BYTES) for key in (full[0], window[0])})
    # As vLLM asks: for full attention from the beginning, for windows from the end.
    found = fresh.find(fresh.request("b"), [*full, *reversed(window)])
    hit, miss = LookupResult.HIT, LookupResult.MISS
    assert found == [hit, *[miss] * 80, hit]
    engine.end()
    fresh.end()


def test_a_block_that_cannot_be_loaded_is_asked_for_once(node: Node) -> None:
    engine, fresh = Engine(node), Engine(node)
    blocks = blocks_of(2)
    engine.store(engine.request("a"), blocks)
    request = fresh.request("b")
    keys = list(blocks)
    load = fresh.tier._pages.load
    loads: list[int] = []

    def gone(keys: list[bytes], places: list[list[tuple[int, int]]]) -> list[bool]:
        loads.append(len(keys))
        node.kill()
        return load(keys, places)

    fresh.tier._pages.load = gone
    assert fresh.find(request, keys) == [LookupResult.MISS] * 2
    assert loads == [2], "the scheduler would ask for ever"
    fresh.until_idle()
    fresh.end()
    engine.end()


def test_it_starts_before_its_node_and_finds_it_when_it_comes(tmp_path: Path) -> None:
    engine = Engine(SimpleNamespace(socket=tmp_path / "node.sock"))
    blocks = blocks_of(3)
    engine.store(engine.request("a"), blocks_of(2, seed=9))
    node = Node(tmp_path)
    until(lambda: engine.tier._node.is_connected)
    engine.store(engine.request("b"), blocks)
    other = Engine(node)
    request = other.request("c")
    assert other.find(request, list(blocks)) == [LookupResult.HIT] * 3
    assert other.rows_of(request, list(blocks)) == list(blocks.values())
    for one in (engine, other):
        one.end()
    node.kill()


def test_without_a_node_every_job_ends_and_finds_nothing(node: Node) -> None:
    engine = Engine(node)
    node.kill()
    blocks = blocks_of(4)
    engine.store(engine.request("a"), blocks)
    assert engine.find(engine.request("b"), list(blocks_of(2, seed=9))) == [LookupResult.MISS] * 2
    # The CPU tier still has them: nothing holds its rows any more.
    assert engine.find(engine.request("c"), list(blocks)) == [LookupResult.HIT] * 4
    engine.end()


def test_reset_waits_until_nothing_touches_the_cpu_tier(node: Node) -> None:
    engine = Engine(node)
    began, may_go_on = threading.Event(), threading.Event()
    store = engine.tier._pages.store

    def slowly(keys: list[bytes], places: list[list[tuple[int, int]]]) -> list[bool]:
        began.set()
        assert may_go_on.wait(TIMEOUT_S)
        return store(keys, places)

    engine.tier._pages.store = slowly
    request, blocks = engine.request("a"), blocks_of(2)
    engine.tiering.prepare_store(list(blocks), request)
    engine.tiering.complete_store(list(blocks), request)
    assert began.wait(TIMEOUT_S)
    reset = threading.Thread(target=engine.tiering.reset_cache)
    reset.start()
    reset.join(0.2)
    assert reset.is_alive()
    may_go_on.set()
    reset.join(TIMEOUT_S)
    assert not reset.is_alive()
    engine.end()


@pytest.mark.parametrize("keep", [False, True])
def test_what_was_stored_before_a_reset_is_found_only_if_weights_never_change(node: Node, keep: bool) -> None:
    engine, other = Engine(node, keep_on_reset=keep), Engine(node)
    before, since = blocks_of(2), blocks_of(2, seed=2)
    asks = engine.request("asks")
    engine.store(engine.request("a"), before)
    engine.reset()
    hit, miss = LookupResult.HIT, LookupResult.MISS
    assert engine.find(asks, list(before)) == [hit if keep else miss] * 2, "one that lived through it"
    assert engine.find(engine.request("b"), list(before)) == [hit if keep else miss] * 2
    engine.store(engine.request("c"), since)
    assert other.find(other.request("d"), list(before)) == [hit] * 2, "what others have is untouched"
    assert other.find(other.request("e"), list(since)) == [hit if keep else miss] * 2
    engine.cpu.reset_cache()
    found = engine.request("f")
    assert engine.find(found, list(since)) == [hit] * 2, "what was stored since"
    assert engine.rows_of(found, list(since)) == list(since.values())
    engine.end()
    other.end()


def test_settings_that_are_not_known_are_refused(node: Node) -> None:
    register()
    config = {"type": "forebay", "node": str(node.socket), "weights_digest": WEIGHTS}
    view = memoryview(np.zeros((2, 4096), dtype=np.int8))
    with pytest.raises(TypeError, match="nod"):
        SecondaryTierFactory.create_secondary_tier(config | {"nod": "x"}, view, spec_of())
    for wrong, why in (
        ({"weights_digest": "ab"}, "weights_digest is 'ab'; allowed are 64 hexadecimal digits"),
        ({"keep_on_reset": "no"}, "keep_on_reset is 'no'; allowed are true and false"),
        ({"node": ""}, "node is ''; allowed is the path of a socket, of 1 to 107 bytes"),
        ({"node": "/x" * 60}, "node is '/x/x.*'; allowed is"),
        ({"node": 5}, "node is 5; allowed is"),
        ({"token_file": 5}, "token_file is 5; allowed is the path of a file"),
        ({"token_file": ""}, "token_file is ''; allowed is the path of a file"),
    ):
        with pytest.raises(ValueError, match=why):
            SecondaryTierFactory.create_secondary_tier(config | wrong, view, spec_of())
    with pytest.raises(TypeError, match="weights_digest"):
        SecondaryTierFactory.create_secondary_tier({"type": "forebay"}, view, spec_of())
