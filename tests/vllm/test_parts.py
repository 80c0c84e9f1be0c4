"""The parts of the connector that decide, without an engine."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from forebay.errors import InvalidError  # noqa: E402
from forebay.vllm.connector import compat, handover, namespace, step_recovery, stores  # noqa: E402
from forebay.vllm.connector.config import Shape, settings_of  # noqa: E402
from forebay.vllm.connector.groups import Group  # noqa: E402
from forebay.vllm.connector.hints import Hints  # noqa: E402
from forebay.vllm.connector.load_mode import layerwise_is_possible, runs_layerwise  # noqa: E402
from forebay.vllm.connector.load_or_compute import CostModel  # noqa: E402
from forebay.vllm.connector.matcher import Matcher  # noqa: E402
from forebay.vllm.connector.media import TEXT  # noqa: E402
from forebay.vllm.connector.metadata import LoadResult, Report, StoreResult  # noqa: E402
from forebay.vllm.connector.namespace import Facts  # noqa: E402
from forebay.vllm.connector.offers import Offers  # noqa: E402
from forebay.vllm.connector.outcomes import Outcomes  # noqa: E402
from forebay.vllm.connector.policies import Local, Window  # noqa: E402
from forebay.vllm.connector.requests import Requests  # noqa: E402
from forebay.vllm.connector.scheduler import SchedulerHalf  # noqa: E402
from forebay.vllm.connector.stats import Counts  # noqa: E402
from forebay.vllm.connector.tenants import Tenants  # noqa: E402
from forebay.vllm.connector.tracked import ChunkIds, Found, Loading, TrackedRequest  # noqa: E402
from forebay.vllm.connector.worker import WorkerHalf  # noqa: E402

pytestmark = pytest.mark.smoke

CHUNK, BLOCK = 64, 16


def facts(**different: Any) -> Facts:
    same: dict[str, Any] = {
        "weights": bytes(32),
        "dtype": "bfloat16",
        "attention": {"head": "64"},
        "salt": b"",
        "heads": 8,
        "shape": Shape(1, BLOCK),
        "ranks": different.get("shape", Shape(1, BLOCK)).tp,
        "pp": 1,
        "layers": 2,
        "chunk_tokens": CHUNK,
        "chunk_bytes": 1 << 20,
        "state_bytes": 0,
        "on_cpu": False,
        "groups": (Group(BLOCK, 8),),
        "media": None,
    }
    return Facts(**(same | different))


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"nod": "x"}, "nod is 'x'; allowed is only node, "),
        ({"node": ""}, "node is ''; allowed is text"),
        ({"node": "/x" * 60}, "allowed is the path of a socket, of 1 to 107 bytes"),
        ({"tenant": -1}, "tenant is -1; allowed is a whole number from 0 to 65534"),
        ({"verify": "cpu"}, "verify is 'cpu'; allowed is gpu, host or both"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0; allowed is a whole number from 1"),
        ({"chunk_tokens": True}, "chunk_tokens is True"),
        ({"weights_digest": "abc"}, "weights_digest is 'abc'; allowed is 64 hexadecimal digits"),
        ({"handovers": "no"}, "handovers is 'no'; allowed is true or false"),
        ({"handover_wait_s": "5"}, "handover_wait_s is '5'; allowed is a number of seconds"),
        ({"also_read": {"tp": 2}}, "also_read is {'tp': 2}; allowed is a list"),
        ({"also_read": [{"tp": 0, "block_tokens": 16}]}, "tp is 0; allowed is a whole number from 1"),
        ({"token_file": "/nowhere/token"}, "token_file is '/nowhere/token', which cannot be read"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidError, match="allowed|cannot") as caught:
        assert settings_of(extra).token is None
    assert says in str(caught.value)


@pytest.mark.parametrize(("ranks", "engines", "devices"), [(1, 1, 1), (4, 1, 4), (2, 4, 8), (2, 0, 2)])
def test_workers_know_the_gpus_of_all_workers_of_the_host(ranks: int, engines: int, devices: int) -> None:
    parallel = SimpleNamespace(local_world_size=ranks, data_parallel_size_local=engines)
    assert compat.devices_of_ranks(SimpleNamespace(parallel_config=parallel)) == range(devices)


@pytest.mark.parametrize(
    ("possible", "handed", "others", "load_s", "compute_s", "in_memory", "layerwise"),
    [
        (True, False, 0, None, 0.0, True, True),
        (True, False, 0, None, 9.0, False, False),
        (True, False, 0, 0.4, 0.0, False, True),
        (True, False, 0, 9.0, 0.0, True, False),
        (True, False, 0, 9.0, 8.8, False, True),
        (True, False, 1, None, 9.0, True, False),
        (True, False, 1, 0.001, 0.0, True, True),
        (True, False, 7, 0.1, 9.0, True, False),
        (True, True, 0, 0.001, 9.0, True, False),
        (False, False, 0, 0.001, 9.0, True, False),
    ],
)
def test_others_are_not_held_up_by_a_long_load(
    possible: bool,
    handed: bool,
    others: int,
    load_s: float | None,
    compute_s: float,
    in_memory: bool,
    layerwise: bool,
) -> None:
    said = runs_layerwise(
        layerwise_possible=possible,
        handed_over=handed,
        others=others,
        load_s=load_s,
        compute_s=compute_s,
        in_memory=in_memory,
    )
    assert said is layerwise


@pytest.mark.parametrize(
    ("recovers_steps", "stages", "fails_whole", "possible"),
    [
        (True, 1, False, True),
        (False, 1, False, False),
        (True, 2, False, False),
        (True, 1, True, False),
    ],
)
def test_a_step_that_cannot_be_undone_loads_nothing_itself(
    recovers_steps: bool, stages: int, fails_whole: bool, possible: bool
) -> None:
    said = layerwise_is_possible(
        recovers_steps=recovers_steps, pipeline_ranks=stages, fails_whole=fails_whole
    )
    assert said is possible


def test_a_load_is_as_good_as_at_the_worker_where_it_is_worst() -> None:
    one = Report(3, {7: LoadResult(1, 256), 8: LoadResult(1, 64)}, {5: StoreResult(1, {0})})
    both = one.aggregate(Report(3, {7: LoadResult(1, 128)}, {5: StoreResult(1, {2}), 6: StoreResult(1)}))
    assert both == Report(
        3, {7: LoadResult(2, 128), 8: LoadResult(1, 64)}, {5: StoreResult(2, {0, 2}), 6: StoreResult(1)}
    )


def test_ids_grow_with_the_tokens_and_a_tail_has_one_of_its_own() -> None:
    tokens = list(range(200))
    ranks = [bytes(32), bytes(31) + b"1"]
    grown, whole = (ChunkIds(Shape(2, BLOCK), ranks, CHUNK, TEXT) for _ in range(2))
    for end in (10, 70, 130, 200):
        grown.grow(tokens[:end])
    whole.grow(tokens)
    assert grown.ranks == whole.ranks and [len(ids) for ids in whole.ranks] == [3, 3]
    tailed = whole.with_tail(tokens, 3)
    assert [ids[:3] for ids in tailed] == whole.ranks and [len(ids) for ids in tailed] == [4, 4]
    assert whole.with_tail(tokens[:192], 3) == whole.ranks


def test_chunks_are_counted_by_where_they_are() -> None:
    found = Found(Shape(1, BLOCK), [[bytes(32)] * 10], 640, in_memory=4, on_disk=3, on_peers=3)
    assert found.tiers(0) == {"memory": 4, "disk": 3, "peer": 3}
    assert found.tiers(5) == {"memory": 0, "disk": 2, "peer": 3}
    assert found.tiers(10) == {"memory": 0, "disk": 0, "peer": 0}


GOOD = {"version": 1, "chunk_tokens": CHUNK, "tp": 2, "block_tokens": 32, "tokens": 600}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda said: said | {"version": 2},
        lambda said: said | {"identity": "0" * 32},
        lambda said: said | {"chunk_tokens": 128},
        lambda said: said | {"tp": 0},
        lambda said: said | {"tp": "2"},
        lambda said: said | {"tp": 3},  # It divides no 8 heads.
        lambda said: said | {"tp": 64},  # Each head eight times: each rank's chunks would have to be named.
        lambda said: said | {"tp": 1024},
        lambda said: said | {"block_tokens": None},
        lambda said: said | {"tokens": -1},
        lambda said: said | {"tokens": 1 << 40},
        lambda said: [said],
        lambda said: "ticket",
        lambda said: 7,
    ],
)
def test_a_ticket_is_not_believed(spoil: Callable[[dict[str, Any]], object]) -> None:
    mine = facts()
    said = GOOD | {"identity": mine.identity()}
    params = {"do_remote_prefill": True, "forebay": said}
    assert handover.ticket_of(params, 600, mine) == handover.Ticket(600, Shape(2, 32))
    assert handover.ticket_of(None, 600, mine) is None
    assert handover.ticket_of({"do_remote_prefill": True}, 600, mine) == handover.Ticket(600, mine.shape)
    assert handover.ticket_of(params | {"do_remote_prefill": False}, 600, mine) is None
    with pytest.raises(InvalidError, match="kv_transfer_params: .* allowed"):
        handover.ticket_of(params | {"forebay": spoil(said)}, 600, mine)
    with pytest.raises(InvalidError, match="block_tokens is 32; allowed on CPUs is 16"):
        handover.ticket_of(params, 600, facts(on_cpu=True))


def test_after_a_reset_nobody_waits_for_what_no_other_engine_can_name() -> None:
    mine = facts()
    mine.forget()
    assert handover.ticket_of({"do_remote_prefill": True}, 600, mine) is None


@pytest.mark.parametrize("params", ["x", 5, 1.5, ["do_remote_prefill"], True])
def test_parameters_that_are_no_mapping_are_nobodys(params: Any) -> None:
    """A client may have vLLM pass on anything, and an error in the scheduler ends the engine."""
    assert not handover.is_prefill(params)
    assert handover.ticket_of(params, 600, facts()) is None


class Prefiller:
    """Stores a chunk of each rank in each `pace_s`. Stands for the node that is asked for them."""

    def __init__(self, pace_s: float, chunks: int) -> None:
        self.pace_s, self.chunks, self.now = pace_s, chunks, 0.0
        self.asked = 0
        self.brought: list[bytes] = []

    def ask(self, shape: Shape, ids: list[list[bytes]], tokens: int, **more: Any) -> tuple[Any, ...]:
        self.asked += 1
        return shape, ids, tokens

    def answer(self, asked: tuple[Any, ...]) -> Found:
        shape, ids, tokens = asked
        there = min(int(self.now / self.pace_s), self.chunks)
        tokens = min(tokens, there * CHUNK)
        return Found(shape, [of_rank[:there] for of_rank in ids], tokens, on_peers=there)

    def hold(self, ids: list[list[bytes]], tenant: int | None = None, *, bring: bool = False) -> list[object]:
        self.brought += ids[0]
        return [object()]


@pytest.mark.parametrize(("stored", "comes"), [(10, True), (6, False)])
def test_a_decoder_waits_as_long_as_chunks_come_and_has_them_brought_meanwhile(
    stored: int, comes: bool
) -> None:
    mine, prefiller, counts = facts(), Prefiller(1.0, stored), Counts()
    settings = settings_of({"handover_wait_s": 3})
    matcher = Matcher(mine, settings, prefiller, Any, counts, lambda: prefiller.now)  # type: ignore[arg-type]
    one = a_request(10 * CHUNK, 0)
    one.request.cache_salt = None
    one.ticket = handover.Ticket(10 * CHUNK, mine.shape)
    while (found := matcher.found(one, 0)) is None:
        prefiller.now += 0.001
    assert found.chunks == stored and counts.totals == {"handovers" if comes else "handovers_late": 1}
    assert prefiller.now == pytest.approx(10 if comes else 6 + 3, abs=0.1)
    assert prefiller.asked < 600, "in some 10,000 steps"
    # When the last one is there, the load begins, which has it brought itself.
    assert prefiller.brought == found.ids[0][: 9 if comes else 6], "each was brought once, in order"


class FarPrefiller(Prefiller):
    """Answers late, with what was there when it was asked."""

    def ask(self, shape: Shape, ids: list[list[bytes]], tokens: int, **more: Any) -> tuple[Any, ...]:
        return *super().ask(shape, ids, tokens), self.now

    def answer(self, asked: tuple[Any, ...]) -> Found | None:  # type: ignore[override]
        *what, then = asked
        now, self.now = self.now, then
        found = super().answer(tuple(what))
        self.now = now
        return found if now > then else None


def test_an_answer_that_an_engine_without_room_looks_at_late_ends_no_hand_over() -> None:
    mine, prefiller, counts = facts(), FarPrefiller(1.0, 10), Counts()
    settings = settings_of({"handover_wait_s": 3})
    matcher = Matcher(mine, settings, prefiller, Any, counts, lambda: prefiller.now)  # type: ignore[arg-type]
    one = a_request(10 * CHUNK, 0)
    one.request.cache_salt = None
    one.ticket = handover.Ticket(10 * CHUNK, mine.shape)
    assert matcher.found(one, 0) is None
    prefiller.now = 60.0  # vLLM asks for nobody as long as as many run as may.
    while (found := matcher.found(one, 0)) is None:
        prefiller.now += 0.001
    assert found.chunks == 10 and counts.totals == {"handovers": 1}


def a_request(tokens: int, computed_chunks: int) -> TrackedRequest:
    """A request of which so much is computed, with the blocks 1, 2, 3 ..."""
    request = SimpleNamespace(
        request_id="one", all_token_ids=list(range(tokens)), num_prompt_tokens=tokens, num_tokens=tokens
    )
    one = TrackedRequest(request, ChunkIds(Shape(1, BLOCK), [bytes(32)], CHUNK, TEXT))
    one.blocks = [list(range(1, 1 + -(-tokens // BLOCK)))]
    one.goal = computed_chunks
    one.ids.grow(request.all_token_ids)
    return one


def test_what_there_is_no_room_for_is_stored_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "IN_FLIGHT_BYTES", 3 << 20)
    planner, one = stores.Stores(facts(), workers=2), a_request(600, 9)
    one.tail = True
    first = planner.plan(one, 1)
    assert first is not None and len(first.chunks[0][0]) == 3
    assert first.pages[0].tolist() == list(range(1, 13))
    assert planner.plan(one, 2) is None, "three are on their way"
    assert planner.ended(1, StoreResult(1)) is None
    assert planner.plan(one, 2) is None, "one worker still stores"
    sizes = []
    while not one.is_stored:
        planner.ended(1 + len(sizes), StoreResult(2))
        store = planner.plan(one, 2 + len(sizes))
        assert store is not None
        sizes.append([tokens for _, _, tokens in store.chunks[0][0]])
    assert sizes == [[64] * 3, [64] * 3, [24]]
    names = one.ids.with_tail(one.request.all_token_ids, 9)[0]
    assert store is not None and store.chunks[0] == [[(names[9], names[8], 24)]]


def test_stores_that_read_a_block_are_known_until_they_end() -> None:
    planner, one = stores.Stores(facts(), workers=1), a_request(128, 2)
    assert planner.plan(one, 7) is not None
    assert planner.touched([1]) == [7] and planner.touched([8]) == [7] and planner.touched([9]) == []
    planner.ended(7, StoreResult(1))
    assert planner.touched([1]) == [] and one.stores == set()


def test_a_chunk_whose_blocks_went_to_others_is_not_stored_and_nothing_behind_it() -> None:
    both = facts(groups=(Group(BLOCK, 8), Group(BLOCK, 8, Window(40))))
    planner, one = stores.Stores(both, workers=1), a_request(256, 2)
    one.blocks = [one.blocks[0], list(range(101, 117))]
    one.planned, one.computed = 1, 120  # Token 120 sees those from 81 on.
    store = planner.plan(one, 1)
    assert store is not None and store.pages[0].tolist() == [5, 6, 7, 8]
    assert store.pages[1].tolist() == [108, 106, 107, 108]
    one.goal, one.computed = 4, 250
    assert planner.plan(one, 2) is None and one.is_stored


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 64, 65, 100, 200])
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_a_chunk_is_whole_in_the_step_that_ends_it_and_never_lacks_what_a_load_asks_for(
    window: int, block_tokens: int
) -> None:
    for group in (Group(block_tokens, 8, Window(window)), Group(block_tokens, 8, Local(window))):
        table = list(range(1, 512 // block_tokens + 1))

        def from_token(token: int, group: Group = group, table: list[int] = table) -> list[int]:
            """The table when nothing that this token does not see is there any more."""
            unseen = int(group.first_seen(token)) // group.block_tokens
            return [0] * unseen + table[unseen:]

        for end in (64, 128, 448, 431):  # a chunk's; the last one is of a tail
            start = (end - 1) // 64 * 64
            for computed in range(end + 70):  # before the step
                stored = group.blocks_to_store(from_token(computed), start, end, 64, computed)
                if stored is None:
                    assert computed >= end, "it is whole in the step that ends it"
                    continue
                assert set(stored.tolist()) <= set(table)
                for loaded in (end - 1, end, end + 1, end + 15, end + 63, end + 64):  # at least all but one
                    wanted = group.blocks_to_load(from_token(loaded), start, end, 0)
                    assert all(ask in (-1, has) for ask, has in zip(wanted, stored, strict=True))
                    most = group.kept_pages(64) + (end % block_tokens > 0)
                    kept = wanted[max(0, len(wanted) - most) :]
                    assert (wanted >= 0).sum() == (kept >= 0).sum(), "no page is wanted that is not kept"


def test_tables_say_what_is_wanted() -> None:
    group = Group(BLOCK, 8, Window(40))
    assert group.blocks_to_load([0, 0, 7, 8, 9], 16, 80, 0).tolist() == [-1, 7, 8, 9]
    assert group.blocks_to_load([5, 6, 7, 8], 0, 70, 32).tolist() == [-1, -1, 7, 8, -1]
    assert Group(BLOCK, 8).blocks_to_store([5, 0, 7, 8], 0, 64, 64, 0) is None
    assert group.blocks_to_store([5, 6, 7], 0, 64, 64, 0) is None, "there is no block for the end"


def test_a_layer_that_reads_anothers_kv_waits_for_nothing_of_its_own() -> None:
    waited: list[int] = []
    cache = SimpleNamespace(wait_layer=lambda layer, stream: waited.append(layer))
    device = SimpleNamespace(type="cpu")
    half: Any = SimpleNamespace(layerwise={1}, cache=cache, layers={"layer 3": 3}, device=device)
    WorkerHalf.wait_for_layer(half, "layer 3")
    WorkerHalf.wait_for_layer(half, "layer 7, which reads layer 3's")
    assert waited == [3]


def test_another_policy_than_the_engines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(name: str, policy: str) -> SimpleNamespace:
        transfer = SimpleNamespace(kv_connector=name, kv_load_failure_policy=policy)
        return SimpleNamespace(kv_transfer_config=transfer)

    whole = config("MultiConnector", "recompute")
    monkeypatch.setattr(namespace, "get_current_vllm_config_or_none", lambda: whole)
    namespace.refuse_another_policy(config("ForebayConnector", "recompute"))
    assert not namespace.is_alone(config("ForebayConnector", "recompute")) and namespace.is_alone(whole)
    with pytest.raises(InvalidError, match="is 'fail'; allowed is what MultiConnector has, 'recompute'"):
        namespace.refuse_another_policy(config("ForebayConnector", "fail"))


@pytest.mark.parametrize("ours", [True, False])
def test_a_hand_over_may_be_another_connectors(ours: bool) -> None:
    half: Any = SimpleNamespace(settings=settings_of({"handovers": ours}))
    request = SimpleNamespace(kv_transfer_params={"do_remote_decode": True})
    assert handover.is_prefill(Requests.params(half, request)) is ours


@pytest.mark.parametrize(
    ("held", "external", "says"),
    [
        (0, 600, {"memory": 128, "disk": 192, "peer": 280}),
        (0, 599, {"memory": 128, "disk": 192, "peer": 279}),
        (80, 519, {"memory": 48, "disk": 192, "peer": 279}),
        (64, 0, {"memory": 0, "disk": 0, "peer": 0}),
    ],
)
def test_every_token_of_a_load_comes_from_one_tier(held: int, external: int, says: dict[str, int]) -> None:
    one = a_request(600, 0)
    one.held = held
    first = held // CHUNK
    tiers = Found(Shape(1, BLOCK), [[bytes(32)] * 10], 600, in_memory=2, on_disk=3, on_peers=5).tiers(first)
    load: dict[str, Any] = {"owner": one, "layerwise": False, "ids": [], "holds": []}
    one.loading = Loading(first_chunk=first, tokens=600 - first * CHUNK, tiers=tiers, **load)
    half: Any = SimpleNamespace(facts=facts(), tracked={"one": one})
    said = SchedulerHalf.sources(half, one.request, external)
    assert said == says and sum(said.values()) == external


def test_blocks_that_are_free_soon_are_waited_for_and_those_of_a_stuck_node_are_not() -> None:
    now = [7.0]
    half: Any = SimpleNamespace(freeing={}, offers=Offers(facts(), 0, reads=False), clock=lambda: now[0])
    assert not SchedulerHalf.frees_soon(half)
    half.freeing = {"one": 6.0, "other": 7.0}
    assert SchedulerHalf.frees_soon(half)
    SchedulerHalf.freed(half, {"other", "of another connector"})
    assert half.freeing == {"one": 6.0} and not SchedulerHalf.frees_soon(half), "it is late"
    now[0] = 6.01
    assert SchedulerHalf.frees_soon(half)


@pytest.mark.parametrize("direct", [False, True])
def test_what_a_decoder_read_from_a_prefiller_is_no_chunk_that_its_node_has(direct: bool) -> None:
    told: list[Any] = []
    events = SimpleNamespace(chunks_stored=lambda *chunks: told.append(chunks))
    cost_model = SimpleNamespace(load_ended=lambda load: None)
    half: Any = SimpleNamespace(facts=facts(), events=events, cost_model=cost_model)
    one: Any = SimpleNamespace(request=None, loading=None, ticket=None)
    more: dict[str, Any] = {"ids": [], "holds": [], "resets": half.facts.resets, "direct": direct}
    load = Loading(one, first_chunk=0, tokens=CHUNK, layerwise=False, tiers={}, usable=CHUNK, **more)
    one.loading = load
    SchedulerHalf.load_ended(half, one, load)
    assert one.loading is None and len(told) == (0 if direct else 1)


@pytest.mark.parametrize("handed", [False, True])
def test_a_prompt_is_used_once_by_its_prefiller_and_its_decoder_together(handed: bool) -> None:
    used: list[tuple[list[bytes], int]] = []
    two = facts(shape=Shape(2, BLOCK))
    node: Any = SimpleNamespace(
        used=lambda ids, chunk_bytes: used.append((ids, chunk_bytes)), describe=lambda *_: None
    )
    offers = Offers(two, 0, reads=False)
    outcomes = Outcomes(node, two)
    hints = Hints(node, two, Counts(), "typed", Tenants(0, {}), CostModel(two, None))
    requests = Requests(two, settings_of({}), node, offers, Counts(), None, True, outcomes, hints)
    request = SimpleNamespace(
        request_id="one",
        prompt_token_ids=list(range(200)),
        num_prompt_tokens=200,
        mm_features=[],
        lora_request=None,
        pooling_params=None,
        prompt_embeds=None,
        resumable=False,
        cache_salt=None,
        kv_transfer_params={"do_remote_prefill": True} if handed else None,
    )
    requests.add(request)
    requests.close()
    ranks = requests.tracked["one"].ids.ranks
    assert used == ([] if handed else [(ranks[0], 1 << 20), (ranks[1], 1 << 20)])
    assert handed or [len(of_rank) for of_rank in ranks] == [3, 3]


def test_everything_is_loaded_until_steps_of_two_sizes_say_what_a_token_costs() -> None:
    facts: Any = SimpleNamespace(layers=4, chunk_tokens=256, chunk_bytes=1 << 30)
    there: Any = SimpleNamespace(
        tokens=1792, chunks=7, tiers=lambda first: {"memory": 7 - first, "disk": 0, "peer": 0}
    )
    cost_model = CostModel(facts, None)
    cost_model.step_began(1, {"first": 2000}, {}, 0.0)
    cost_model.step_ended(1, 1.2)
    assert cost_model.chunks_to_load(there, 2000, 0, 0) == 7
    cost_model.step_began(2, {"second": 208}, {}, 2.0)
    cost_model.step_ended(2, 3.2)
    for _ in range(20):
        cost_model.note_rates([("memory", 1 << 30, 10.0)])
    assert cost_model.chunks_to_load(there, 2000, 0, 0) < 7, (
        "a token costs nothing, as far as these steps say, and loading it does"
    )


@pytest.mark.parametrize(
    ("in_flight", "of_step", "in_prompt", "dropped"),
    [
        (300, 300, False, 0),  # The step ended the prompt, and nothing else is under way.
        (301, 300, False, 1),  # It did, and a step of one token is under way.
        (304, 300, False, 1),  # The same with three drafts: what comes of them comes at once.
        (300, 200, False, 1),  # It computed a part of the prompt; the one under way computes the rest.
        (400, 200, True, 0),  # Both compute parts of it: they give no tokens.
        (200, 0, False, 1),  # It was another's: this one hit its blocks in the step that is under way.
        (200, 0, True, 0),  # The same in a part of a prompt.
    ],
)
@pytest.mark.parametrize("left", [0, 1])  # of a step before, which this request was dropped from too
def test_one_that_starts_over_drops_the_tokens_that_are_under_way_and_no_others(
    in_flight: int, of_step: int, in_prompt: bool, dropped: int, left: int
) -> None:
    request = SimpleNamespace(
        request_id="r",
        num_in_flight_tokens=in_flight,
        num_output_placeholders=5,
        is_prefill_chunk=in_prompt,
        async_tokens_to_discard=left,
        num_preemptions=0,
    )
    undone: list[Any] = []
    half = SimpleNamespace(corrections=SimpleNamespace(step_undone=lambda *said: undone.append(said)))
    evicted: set[int] = set()
    blocks = SimpleNamespace(get_block_ids=lambda _: ([5, 6, 7, 8],), evict_blocks=evicted.update)
    scheduler = SimpleNamespace(
        kv_cache_manager=blocks,
        running=[request],
        prev_step_scheduled_req_ids={"r", "other"},
        _preempt_request=lambda request, timestamp: None,
    )
    step_recovery.preempt(scheduler, request, {7, 9}, {"r": of_step} if of_step else {}, half)
    assert undone == [(request, 2, True)], "what was counted of the third block on is taken back"
    assert request.async_tokens_to_discard == dropped and request.num_output_placeholders == 0
    assert evicted == {7, 8} and scheduler.running == []
    assert scheduler.prev_step_scheduled_req_ids == {"other"}


def test_who_waits_behind_spoiled_blocks_asks_again_and_nobody_else_does() -> None:
    def waiting(name: str, status: str) -> Any:
        return SimpleNamespace(request_id=name, status=SimpleNamespace(name=status), num_computed_tokens=64)

    shares = waiting("shares", "WAITING_FOR_REMOTE_KVS")
    others = [waiting("apart", "WAITING_FOR_REMOTE_KVS"), waiting("queued", "WAITING")]
    tables = {"shares": ([5, 7], [9]), "apart": ([6], [8])}
    lost: list[str] = []
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(get_block_ids=tables.__getitem__),
        requests={one.request_id: one for one in (shares, *others)},
        failed_recving_kv_req_ids=set(),
    )
    step_recovery.restart_waiting_loads(scheduler, {7}, SimpleNamespace(blocks_lost=lost.append))
    assert shares.num_computed_tokens == 0 and lost == ["shares"]
    assert scheduler.failed_recving_kv_req_ids == {"shares"}
    assert [one.num_computed_tokens for one in others] == [64, 64]
