"""Caches are reset, or vLLM sleeps: what was stored before is used again only where weights never change."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from conftest import ASKED, CHUNK, Daemon, Engine, arguments, transfer  # noqa: E402
from test_parts import BLOCK  # noqa: E402
from test_quiet_steps import Half, Request  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402

from forebay.vllm.connector import compat  # noqa: E402
from forebay.vllm.connector.config import settings_of  # noqa: E402
from forebay.vllm.connector.metadata import Load, Report, StoreResult  # noqa: E402
from forebay.vllm.connector.tracked import Loading  # noqa: E402
from forebay.vllm.connector.worker import WorkerHalf  # noqa: E402


def a_request(name: str, tokens: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        all_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        num_tokens=tokens,
        num_preemptions=0,
        prompt_embeds=None,
        resumable=False,
        mm_features=[],
        lora_request=None,
        pooling_params=None,
        cache_salt=None,
        kv_transfer_params=None,
    )


def test_after_a_reset_nothing_has_its_old_name_and_what_is_in_blocks_gets_no_new_one() -> None:
    half = Half()
    for name in ("waits", "computes"):
        half.request_added(a_request(name, 3 * 64))
    waits, computes = half.tracked["waits"], half.tracked["computes"]
    before, identity = [list(of_rank) for of_rank in waits.ids.ranks], half.facts.identity()
    computes.blocks = [[1, 2, 3]]
    assert half.reset()
    after = waits.ids.ranks
    assert [len(of_rank) for of_rank in after] == [len(of_rank) for of_rank in before]
    assert not {name for ids in after for name in ids} & {name for ids in before for name in ids}
    assert half.facts.identity() != identity, "a decoder that asks under the old names gets nothing"
    assert computes.gap and not waits.gap
    half.request_added(a_request("later", 3 * 64))
    assert half.tracked["later"].ids.ranks == after, "what comes later finds what was stored since"


def test_names_cost_as_little_after_many_resets_as_after_the_first() -> None:
    facts, seen = Half().facts, set()
    for _ in range(1000):
        facts.forget()
        seen.add(facts.identity())
    assert len(seen) == 1000
    assert len(facts.salt) <= 64, "each request with a salt or a ticket has it hashed"


@pytest.mark.parametrize("keep", [False, True])
def test_what_was_on_its_way_at_a_reset_is_told_only_if_it_is_found_under_its_name(keep: bool) -> None:
    half, told = Half(), []
    half.settings = settings_of({"keep_on_reset": keep})
    half.events = SimpleNamespace(chunks_stored=lambda *said: told.append(said[-1]), forget=lambda: None)  # type: ignore[assignment]
    half.request_added(a_request("one", 3 * CHUNK))
    one = half.tracked["one"]
    one.blocks, one.goal = [list(range(1, 3 * CHUNK // BLOCK + 1))], 3
    one.request.computed = one.computed = 3 * CHUNK
    store = half.stores.plan(one, 1)
    assert store is not None
    load = Loading(one, one.ids.ranks, 0, CHUNK, False, {}, [], resets=half.facts.resets, usable=CHUNK)
    half.reset()
    half.step_ended(Report(1, stores={store.job: StoreResult(1)}))
    half.load_ended(one, load)
    assert [list(chunks) for chunks in told] == ([[0, 1, 2], [0]] if keep else [])


def test_what_a_request_that_has_ended_stores_after_a_reset_is_not_told() -> None:
    half, told = Half(), []
    half.events = SimpleNamespace(chunks_stored=lambda *said: told.append(said[-1]), forget=lambda: None)  # type: ignore[assignment]
    half.request_added(a_request("one", 3 * CHUNK))
    one = half.tracked.pop("one")
    one.blocks, one.goal = [list(range(1, 3 * CHUNK // BLOCK + 1))], 3
    one.request.computed = one.computed = 3 * CHUNK
    half.reset()
    store = half.stores.plan(one, 1)
    assert store is not None
    half.step_ended(Report(1, stores={store.job: StoreResult(1)}))
    assert not told, "nobody finds it under that name"


def test_where_weights_never_change_a_reset_changes_no_name() -> None:
    half = Half()
    half.settings = settings_of({"keep_on_reset": True})
    half.request_added(a_request("one", 3 * 64))
    before = [list(of_rank) for of_rank in half.tracked["one"].ids.ranks]
    assert half.reset() and half.tracked["one"].ids.ranks == before


def test_a_reset_says_that_loads_of_before_are_still_coming() -> None:
    half = Half()
    half.loading[1] = SimpleNamespace()  # type: ignore[assignment]
    assert not half.reset()


def a_worker(waited: list[str]) -> Any:
    """The worker's half with a load and a store under way."""
    half: Any = object.__new__(WorkerHalf)
    half.kv = SimpleNamespace(withdraw_offers=lambda: waited.append("offers"))
    half.cache = SimpleNamespace(
        wait_stored=lambda jobs, limit_s: waited.append(f"stored {jobs}") or True,
        wait_loaded=lambda jobs, limit_s: waited.append(f"loaded {jobs}") or True,
    )
    half.loads = {7: Load(7, "one", [], [], 64, None, layerwise=False)}
    half.stores, half.dropped, half.layerwise, half.received = {3}, set(), set(), set()
    half.rank, half.report, half.groups, half.as_one = 0, Report(1), (), False
    half.invalid, half.failed = set(), set()
    return half


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_sleep_waits_for_all_copies_and_what_was_loaded_into_memory_that_goes_is_lost(keeps_kv: bool) -> None:
    waited: list[str] = []
    half = a_worker(waited)
    half.drain(keeps_kv)
    assert waited == ["offers", "stored [3]", "loaded [7]"]
    half.load_ended(7, 64, None)
    assert half.report.loads[7].tokens == (64 if keeps_kv else 0)


@pytest.mark.skipif(
    hasattr(KVConnectorBase_V1, "unregister_kv_caches"),
    reason="SKIPPED: this vLLM tells its connectors itself",
)
def test_connectors_are_quiet_before_the_worker_of_a_gpu_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    order: list[Any] = []
    monkeypatch.setattr(compat, "_before_sleep", [])

    def sleep(self: Any, level: int = 1) -> None:
        order.append(level)

    monkeypatch.setattr(Worker, "sleep", sleep)
    for number in range(2):  # A process may have several connectors, and one wrapper is enough.
        compat.before_sleep(lambda keeps_kv, number=number: order.append((number, keeps_kv)))
    worker = object.__new__(Worker)
    for backend in (SimpleNamespace(), SimpleNamespace(keeps_kv=lambda level: level == 1)):
        worker._sleep_mode_backend = backend  # Found by what this vLLM has for it.
        worker.sleep(1)
    assert order == [(0, False), (1, False), 1, (0, True), (1, True), 1]


@pytest.mark.parametrize("keep", [False, True])
def test_an_engine_finds_what_it_stored_before_a_reset_only_if_weights_never_change(
    model: Path, plain: dict[str, list[int]], tmp_path: Path, keep: bool
) -> None:
    node = Daemon(tmp_path / "node")
    given = arguments(model, transfer(node.socket, keep_on_reset=keep))
    with node, Engine(given, tmp_path / "log") as engine:
        tokens, count = ASKED["long"]
        for _ in range(2):
            (said,) = engine.generate(prompts=[tokens], tokens=count)
            assert said["tokens"] == plain["long"]
            assert engine.forget()
        assert said["cached"] >= len(tokens) // CHUNK * CHUNK - 1, "what was stored is found"
        assert engine.reset()
        (said,) = engine.generate(prompts=[tokens], tokens=count)
        assert said["tokens"] == plain["long"] and (said["cached"] > 0) == keep
        assert engine.forget()
        (said,) = engine.generate(prompts=[tokens], tokens=count)
        assert said["tokens"] == plain["long"] and said["cached"] > 0, "what was stored since is found"
