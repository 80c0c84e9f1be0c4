"""MLA: all tensor-parallel ranks have the same KV, so one of them stores it, and all load that.

So it is cut alike for any number of ranks, and an engine of one rank finds what one of two has stored without
being told of its shape.
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import (
    ASKED,
    BLOCK,
    CHUNK,
    HERE,
    ON_GPU,
    PYTHON,
    VLLM,
    Daemon,
    Engine,
    arguments,
    ask,
    need_gpus,
    transfer,
    whole,
)

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import facts  # noqa: E402

from forebay.errors import InvalidError  # noqa: E402
from forebay.vllm.connector.config import Shape  # noqa: E402
from forebay.vllm.connector.finder import Finder  # noqa: E402
from forebay.vllm.connector.groups import Group  # noqa: E402
from forebay.vllm.connector.metadata import Report, Step, Store, StoreResult  # noqa: E402
from forebay.vllm.connector.namespace import ContextParallel, refuse_shape  # noqa: E402
from forebay.vllm.connector.policies import State  # noqa: E402
from forebay.vllm.connector.stores import Stores  # noqa: E402
from forebay.vllm.connector.worker import WorkerHalf  # noqa: E402

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LATENT = Group(BLOCK, 1, shared=True)
TOKENS, COUNT = ASKED["short"]


def test_one_rank_of_each_stage_stores_and_all_load() -> None:
    mla = facts(heads=1, groups=(LATENT,), ranks=4, pp=2)
    parts: Any = [["first stage"], ["second stage"]]
    assert Stores(mla, workers=8).for_workers(parts) == [[parts[0]], [], [], [], [parts[1]], [], [], []]
    finder = Finder(SimpleNamespace(), mla, lambda: 0.0)  # type: ignore[arg-type]
    loaded = [[name for name, *_ in of_rank] for of_rank in finder.sources(mla.shape, [[b"a"], [b"b"]])]
    assert loaded == [[[b"a"]]] * 4 + [[[b"b"]]] * 4
    plain = facts(shape=Shape(4, BLOCK), pp=2)
    every: Any = [[number] for number in range(8)]
    assert Stores(plain, workers=8).for_workers(every) == [[one] for one in every]


def loaded_by(engine: Any, ids: list[list[bytes]]) -> list[list[bytes]]:
    """The chunks that each worker loads."""
    finder = Finder(SimpleNamespace(), engine, lambda: 0.0)  # type: ignore[arg-type]
    return [
        [name for names, *_ in of_rank for name in names] for of_rank in finder.sources(engine.shape, ids)
    ]


def test_ranks_that_share_the_tokens_of_a_block_store_and_load_their_own() -> None:
    # Four ranks, of which two share the tokens of each head.
    four, context = Shape(4, BLOCK), ContextParallel(decode=2)
    engine = facts(heads=4, groups=(Group(BLOCK, 1),), shape=four, context=context, pp=2)
    every: Any = [[number] for number in range(8)]
    assert Stores(engine, workers=8).for_workers(every) == [[one] for one in every]
    assert loaded_by(engine, [[bytes([number])] for number in range(8)]) == [[bytes([n])] for n in range(8)]
    with pytest.raises(InvalidError, match="tp=2.*; allowed is .*tp=4.*, since ranks share the tokens"):
        refuse_shape("here", Shape(2, BLOCK), engine)
    spread = (ContextParallel(), context, ContextParallel(4), ContextParallel(2, interleave=8))
    assert len({facts(context=one).identity() for one in spread}) == 4, "other ranks have other tokens"


def test_ranks_that_prefill_the_same_kv_together_store_it_once() -> None:
    engine = facts(shape=Shape(2, BLOCK), ranks=4, context=ContextParallel(prefill=2), pp=2)
    parts: Any = [[number] for number in range(4)]
    assert Stores(engine, workers=8).for_workers(parts) == [[[0]], [[1]], [], [], [[2]], [[3]], [], []]
    ids = [[bytes([number])] for number in range(4)]
    assert loaded_by(engine, ids) == [[ids[0][0]], [ids[1][0]]] * 2 + [[ids[2][0]], [ids[3][0]]] * 2
    assert engine.identity() == facts(pp=2).identity(), "an engine without that has the same KV"


def test_kv_is_cut_over_ranks_unless_all_of_it_is_shared() -> None:
    eight, one = Shape(8, BLOCK), Shape(1, BLOCK)
    assert facts(groups=(LATENT, LATENT)).cut(eight) == one
    for other in (Group(BLOCK, 1), Group(BLOCK, 1, State())):
        assert facts(groups=(LATENT, other)).cut(eight) == eight


def test_a_page_is_one_part_where_other_layers_of_its_group_have_no_such_heads() -> None:
    half: Any = object.__new__(WorkerHalf)
    planned: Any = [([b"a"], 0, 0, 4)]  # by the one layer that vLLM tells the scheduler of
    for cuts, taken in ((True, planned), (False, [([b"a"], 0, 0, 1)])):
        half.cuts_heads = cuts
        assert half.sources(planned) == taken
    of_others: Any = [([b"a"], 0, 0, 2), ([b"b"], 0, 2, 2)]
    assert half.sources(of_others) == of_others, "the cache refuses what does not fit"


def test_a_rank_that_has_nothing_to_store_says_at_once_that_it_has() -> None:
    stored: list[Any] = []
    half: Any = object.__new__(WorkerHalf)
    half.cache = SimpleNamespace(store=lambda job, parts, pages, stream: stored.append(job))
    half.device, half.stores, half.with_states = SimpleNamespace(type="cpu"), set(), []
    for rank, reported, begun in ((0, {}, [7]), (1, {7: StoreResult(1)}, [7])):
        half.rank, half.report = rank, Report(1)
        half.step = Step(1, idle=False, stores=[Store(7, [[[(bytes(32), None, CHUNK)]], []], [])])
        half.start_stores()
        assert half.report.stores == reported and stored == begun


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine, Daemon]]:
    """An engine with one rank, one with two, and their node."""
    need_gpus(2)
    if VLLM < (0, 32) and not ON_GPU:
        pytest.skip('SKIPPED: vLLM 0.26 says "MLA is not supported on CPU"')
    folder = tmp_path_factory.mktemp("replicas")
    model = folder / "model"
    subprocess.run([PYTHON, str(HERE / "tiny_model.py"), str(model), "--latent"], check=True)
    with Daemon(folder / "node") as node, ExitStack() as engines:
        made: list[Engine] = []
        for tp in (1, 2):
            ranks = {"tensor_parallel_size": tp, "distributed_executor_backend": "mp" if tp > 1 else "uni"}
            own = {"block_size": 16, "num_gpu_blocks_override": 160}
            own |= {"dtype": "bfloat16"} if ON_GPU else {}
            given = arguments(model, transfer(node.socket), **ranks, **own)
            made.append(engines.enter_context(Engine(given, folder / f"log{tp}")))
        yield made[0], made[1], node


def test_what_two_ranks_share_is_stored_once_and_found_by_one_rank(
    place: tuple[Engine, Engine, Daemon],
) -> None:
    one, two, node = place
    assert ask(two, "short")["cached"] == 0
    chunks = (len(TOKENS) + COUNT - 1) // CHUNK
    assert node.metric('forebay_chunks{tier="memory"') == chunks
    before = two.stats()
    for engine in (two, one):
        assert ask(engine, "short")["cached"] == whole("short")
    after = two.stats()
    assert after["loads"] == before["loads"] + 2 and after["loads_short"] == before["loads_short"]
    with two.spoiled(tokens=3 * CHUNK, rank=1):
        ask(two, "short")
    assert two.stats()["totals_loads_failed"] == before.get("totals_loads_failed", 0) + 1


def test_a_prefill_of_two_ranks_is_loaded_to_its_end_by_one(place: tuple[Engine, Engine, Daemon]) -> None:
    one, two, _ = place
    tokens, count = ASKED["handed"]
    (first,) = two.generate(prompts=[tokens], tokens=1, params=PREFILL)
    two.settle()
    assert first["params"]["tp_size"] == 2
    (said,) = one.generate(prompts=[tokens], tokens=count, params=first["params"])
    assert said["cached"] >= len(tokens) - 1
