"""One copy for all TP sizes: an engine stores a chunk for each KV head, which any number of ranks reads.

The engines run one after another on one node, so what each finds was stored by an engine that is gone. Sums
of several ranks are added in another order than those of one, so tokens could differ without any fault; with
these models they do not, and plain runs are of one rank.
"""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import (
    ASKED,
    BLOCK,
    CHUNK,
    HERE,
    PYTHON,
    Daemon,
    Engine,
    answers,
    arguments,
    ask,
    need_gpus,
    transfer,
    whole,
)

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import facts  # noqa: E402

from forebay.errors import InvalidError  # noqa: E402
from forebay.vllm.connector import handover  # noqa: E402
from forebay.vllm.connector.config import Shape, settings_of  # noqa: E402
from forebay.vllm.connector.finder import Finder  # noqa: E402
from forebay.vllm.connector.groups import Group  # noqa: E402
from forebay.vllm.connector.metadata import Report, Step, Store, StoreResult  # noqa: E402
from forebay.vllm.connector.namespace import ContextParallel, refuse_one_copy, refuse_shape  # noqa: E402
from forebay.vllm.connector.policies import State, Window  # noqa: E402
from forebay.vllm.connector.stores import Stores  # noqa: E402
from forebay.vllm.connector.worker import WorkerHalf  # noqa: E402

pytestmark = pytest.mark.long

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def engine_of(ranks: int, **more: Any) -> Any:
    """An engine with one copy of a model with 4 KV heads."""
    own = {"heads": 4, "ranks": ranks, "groups": (Group(BLOCK, max(1, 4 // ranks)),)}
    return facts(**(own | {"shape": Shape(4, BLOCK)} | more))


def stored_and_loaded(engine: Any) -> tuple[list[Any], list[Any]]:
    """Which heads each worker stores, and from which it loads which of its own."""
    heads: Any = [[b"%d" % number] for number in range(4 * engine.pp)]
    finder = Finder(SimpleNamespace(), engine, lambda: 0.0)  # type: ignore[arg-type]
    loaded = [
        [(int(name), there, here, count) for (name,), there, here, count in of_rank]
        for of_rank in finder.sources(engine.shape, heads)
    ]
    stored = Stores(engine, workers=engine.ranks * engine.pp).for_workers(heads)
    return [[int(name) for (name,) in of_rank] for of_rank in stored], loaded


@pytest.mark.smoke
def test_each_head_is_stored_once_and_loaded_by_each_rank_that_has_it() -> None:
    assert stored_and_loaded(engine_of(1)) == ([[0, 1, 2, 3]], [[(head, 0, head, 1) for head in range(4)]])
    two = [(0, 0, 0, 1), (1, 0, 1, 1)], [(2, 0, 0, 1), (3, 0, 1, 1)]
    second = [[(head + 4, *rest) for head, *rest in of_rank] for of_rank in two]
    assert stored_and_loaded(engine_of(2, pp=2)) == ([[0, 1], [2, 3], [4, 5], [6, 7]], [*two, *second])
    assert stored_and_loaded(engine_of(4)) == ([[0], [1], [2], [3]], [[(n, 0, 0, 1)] for n in range(4)])
    eight = [[(rank // 2, 0, 0, 1)] for rank in range(8)]
    assert stored_and_loaded(engine_of(8)) == ([[0], [], [1], [], [2], [], [3], []], eight)


@pytest.mark.smoke
def test_engines_of_all_tp_sizes_have_the_same_names_and_others_are_told_their_shape() -> None:
    engines = [engine_of(ranks) for ranks in (1, 2, 4, 8)]
    names = [engine.namespaces(None, engine.shape) for engine in engines]
    assert all(one == names[0] for one in names) and len(set(names[0])) == 4
    plain = facts(heads=4, groups=(Group(BLOCK, 4),))
    assert plain.namespaces(None, plain.shape)[0] not in names[0], "whole pages have a name of their own"
    request = SimpleNamespace(request_id="one", num_prompt_tokens=100)
    params = handover.answer(request, ([1],), "engine", engines[0])
    for reader in (*engines, plain, facts(heads=4, shape=Shape(2, BLOCK))):
        ticket = handover.ticket_of(params, 100, reader)
        assert ticket is not None and ticket.shape == Shape(4, BLOCK)
    for engine in engines:
        for tp in (1, 2, 4, 8):
            refuse_shape("here", Shape(tp, BLOCK), engine)
        with pytest.raises(InvalidError, match="tp is 3; allowed are divisors of the model's 4 KV heads"):
            refuse_shape("here", Shape(3, BLOCK), engine)


@pytest.mark.smoke
def test_one_copy_is_refused_where_kv_cannot_be_cut_into_heads() -> None:
    latent = Group(BLOCK, 1, shared=True)
    for taken in (
        facts(),
        facts(groups=(Group(BLOCK, 4), Group(BLOCK, 4, Window(40)))),
        facts(groups=(latent,)),
    ):
        refuse_one_copy(taken)
    for refused, why in (
        (facts(layout="NHD"), "with the layout NHD: the bytes of a head are not in one piece"),
        (facts(groups=(Group(BLOCK, 8), Group(BLOCK, 1, State()))), "for a model with states: they have no"),
        (facts(groups=(Group(BLOCK, 8), Group(BLOCK, 4))), "whose layers have different numbers of KV heads"),
        (facts(groups=(latent, Group(BLOCK, 8))), "whose layers have different numbers of KV heads"),
        (facts(context=ContextParallel(decode=2)), "with context parallelism"),
        (facts(context=ContextParallel(prefill=2)), "with context parallelism"),
    ):
        with pytest.raises(InvalidError, match=f"one_copy is True; allowed is False .*{why}"):
            refuse_one_copy(refused)
    with pytest.raises(InvalidError, match="one_copy is 1; allowed is true or false"):
        settings_of({"one_copy": 1})


@pytest.mark.smoke
def test_a_chunk_of_which_one_head_is_refused_is_not_stored() -> None:
    half: Any = object.__new__(WorkerHalf)
    half.device, half.stores, half.with_states = SimpleNamespace(type="cpu"), set(), []
    half.rank, half.report = 0, Report(0)

    def store(job: int, parts: Any, pages: Any, stream: int) -> None:
        raise InvalidError("no")

    half.cache = SimpleNamespace(store=store)
    chunks = [(bytes(32), None, 64), (bytes([1]) * 32, bytes(32), 64)]
    half.step = Step(1, idle=False, stores=[Store(7, [[chunks, chunks]], [])])
    half.start_stores()
    assert half.report.stores == {7: StoreResult(1, {0, 1})}


class Place:
    """A model, a node, and engines that come and go."""

    def __init__(self, folder: Path, node: Daemon, kv_heads: int) -> None:
        self.folder, self.node = folder, node
        self.model = folder / "model"
        tiny = [PYTHON, str(HERE / "tiny_model.py"), str(self.model), "--kv-heads", str(kv_heads)]
        subprocess.run(tiny, check=True)
        with Engine(arguments(self.model, enable_prefix_caching=False), folder / "plain") as engine:
            self.plain = answers(engine, {name: ASKED[name] for name in ("short", "even", "left", "handed")})

    def engine(self, ranks: int, **more: Any) -> Engine:
        given = transfer(self.node.socket, **({"one_copy": True} | more))
        own = {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp" if ranks > 1 else "uni"}
        return Engine(arguments(self.model, given, **own), self.folder / f"log{ranks}")

    def find(self, engine: Engine, *names: str) -> None:
        """The engine loads all whole chunks of these, and says what vLLM alone does."""
        before = engine.stats()["loads_short"]
        for name in names:
            said = ask(engine, name)
            assert said["tokens"] == self.plain[name], name
            assert said["cached"] in (whole(name), min(whole(name), len(ASKED[name][0]) - 1)), name
        assert engine.stats()["loads_short"] == before

    def compute(self, engine: Engine, name: str) -> None:
        """The engine finds nothing of it, and stores it."""
        said = ask(engine, name)
        assert said["tokens"] == self.plain[name] and said["cached"] == 0


def test_what_ranks_of_any_number_store_ranks_of_any_number_load(tmp_path: Path) -> None:
    need_gpus(4)
    with Daemon(tmp_path / "node") as node:
        place = Place(tmp_path, node, kv_heads=4)
        with place.engine(1) as one:
            place.compute(one, "short")
            place.find(one, "short")
        with place.engine(4) as four:
            place.find(four, "short")
            place.compute(four, "even")
            place.find(four, "even")
        with place.engine(2) as two:
            place.find(two, "short", "even")
            place.compute(two, "left")
            (prefilled,) = two.generate(prompts=[ASKED["handed"][0]], tokens=1, params=PREFILL)
            two.settle()
        with place.engine(4) as four:
            place.find(four, "left", "short")
        # Started again; and a decoder with whole pages that only knows the ticket.
        with place.engine(1) as one:
            place.find(one, "short", "even", "left")
        with place.engine(1, one_copy=False, also_read=[{"tp": 4, "block_tokens": BLOCK}]) as plain:
            said = ask(plain, "handed", prefilled["params"])
            assert said["tokens"] == place.plain["handed"]
            assert said["cached"] >= len(ASKED["handed"][0]) - 1
            place.find(plain, "left")


def test_of_ranks_with_the_same_head_one_stores_it_and_each_loads_it(tmp_path: Path) -> None:
    need_gpus(4)
    with Daemon(tmp_path / "node") as node:
        place = Place(tmp_path, node, kv_heads=2)
        with place.engine(4) as four:
            place.compute(four, "short")
            place.find(four, "short")
            assert four.stats()["stores_done"] == 2 * whole("short") // CHUNK, "each head once"
        with place.engine(1) as one:
            place.find(one, "short")
            place.compute(one, "left")
        with place.engine(4) as four:
            place.find(four, "left", "short")
