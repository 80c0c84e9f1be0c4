"""Loads and stores one after the other: each ends by itself, and nothing of it is left.

Without an engine: both halves are told what vLLM would tell them.
"""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import BLOCK, CHUNK  # noqa: E402
from test_quiet_steps import Half, Request, a_request  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (  # noqa: E402
    MultiConnector,
    MultiKVConnectorMetadata,
)

from forebay.errors import ForebayError  # noqa: E402
from forebay.vllm.connector import ForebayConnector, compat  # noqa: E402
from forebay.vllm.connector.metadata import LoadResult, Offer, Report, Step, Store  # noqa: E402
from forebay.vllm.connector.tracked import Found, PendingHandover  # noqa: E402
from forebay.vllm.connector.worker import WorkerHalf  # noqa: E402

pytestmark = pytest.mark.smoke

CHUNKS = 4
TOKENS = CHUNKS * CHUNK + 5
BLOCKS = -(-TOKENS // BLOCK)


# Of a step that computes and is no CUDA graph.
FORWARD = SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=SimpleNamespace(name="NONE"))


class Place:
    """A scheduler's half with one request, which is found in the node."""

    def __init__(self) -> None:
        self.half, self.released = Half(), []
        self.half.node.hold = self.hold
        ended = SimpleNamespace(name="FINISHED_ABORTED")
        more = {"max_tokens": 1, "is_finished": lambda: False, "status": ended}
        self.request = a_request("one", TOKENS, TOKENS, **more)
        self.half.request_added(self.request)
        self.one = self.half.tracked["one"]
        self.holds = 0

    def hold(self, ids: list[bytes], ttl_us: int, bring: bool = False) -> Any:
        """The node's, which is not there."""
        self.holds += 1
        number = self.holds
        return SimpleNamespace(release=lambda: self.released.append(number))

    def begin(self, first_block: int, external: int, layerwise: bool = True) -> None:
        """The request gets blocks, and `external` tokens are loaded into them."""
        self.one.ids.grow(self.request.all_token_ids)
        ids = [list(of_rank) for of_rank in self.one.ids.ranks]
        self.one.found = Found(self.half.facts.shape, ids, CHUNKS * CHUNK, CHUNKS, 0, 0)
        self.one.layerwise = layerwise
        table = [SimpleNamespace(is_null=False, block_id=first_block + place) for place in range(BLOCKS)]
        self.half.blocks_allocated(self.request, SimpleNamespace(blocks=[table]), external)

    def join(self, name: str, first_block: int) -> None:
        """Another request comes, and gets blocks for all of its prompt."""
        other = Request(**vars(self.request) | {"request_id": name})
        self.half.request_added(other)
        table = [SimpleNamespace(is_null=False, block_id=first_block + place) for place in range(BLOCKS)]
        self.half.blocks_allocated(other, SimpleNamespace(blocks=[table]), 0)

    def step(
        self, others: dict[str, int] | None = None, preempted: bool = False, **written: list[Any]
    ) -> Step:
        """The step that computes the rest of the prompt, and so many tokens of others. `written` are blocks
        that workers write to before they compute.
        """
        scheduled = {"one": 5} | (others or {})
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        return self.half.build_step(
            SimpleNamespace(
                scheduled_cached_reqs=cached,
                scheduled_new_reqs=[SimpleNamespace(req_id="one")],
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                preempted_req_ids={"one"} if preempted else set(),
                new_block_ids_to_zero=written.get("zeroed"),
                kv_cache_block_copies=written.get("copied"),
            )
        )


def test_a_load_ends_by_its_own_report_whatever_has_begun_since() -> None:
    place = Place()
    half, whole = place.half, CHUNKS * CHUNK
    place.begin(1, whole)
    place.step()
    place.request.num_preemptions += 1  # Its blocks are taken away under the load, and it begins anew.
    place.begin(200, whole)
    place.step(preempted=True)
    half.step_ended(Report(1, {1: LoadResult(1, 0)}))
    assert place.released == [1] and list(half.loading) == [2]
    assert half.tracked["one"].chunk_limit is None, "the second load has not failed"
    half.step_ended(Report(2, {2: LoadResult(1, whole)}))
    assert place.released == [1, 2] and not half.loading and not half.departed_requests()
    assert set(half.cost_model.queued.values()) == {0} and half.reset()


def test_whoever_leaves_under_a_load_layer_by_layer_is_remembered_until_it_has_ended() -> None:
    place = Place()
    half = place.half
    half.note_departure("before", ([7],))
    place.begin(1, CHUNKS * CHUNK)
    place.step()
    half.request_finished(place.request, ([1, 2, 3],))
    assert half.departed_requests() == [("one", ([1, 2, 3],))]
    half.step_ended(Report(1, {1: LoadResult(1, 0)}))
    assert not half.departed_requests()


def test_who_left_is_forgotten_with_the_loads_of_its_time_however_many_follow() -> None:
    place = Place()
    half = place.half
    place.begin(1, CHUNKS * CHUNK)
    place.step()
    half.note_departure("early", ([1, 2, 3],))
    place.request.num_preemptions += 1
    place.begin(200, CHUNKS * CHUNK)
    place.step(preempted=True)
    half.note_departure("late", ([4],))
    half.step_ended(Report(1, {1: LoadResult(1, CHUNKS * CHUNK)}))
    assert [name for name, _ in half.departed_requests()] == ["late"] and list(half.loading) == [2]


def test_chunks_are_stored_while_small_loads_follow_each_other_but_for_whoever_may_have_such_a_load() -> None:
    place = Place()
    half = place.half
    place.join("early", 1000)
    place.begin(1, CHUNKS * CHUNK)
    place.join("late", 2000)
    place.step({"early": CHUNK, "late": CHUNK})
    assert half.tracked["early"].goal == 1, "none of its blocks is one that the load fills"
    assert half.tracked["late"].goal == 0, "it may have got the load's blocks from vLLM's own cache"
    half.tracked["early"].request.computed = half.tracked["late"].request.computed = CHUNK
    place.request.num_preemptions += 1
    place.begin(200, CHUNKS * CHUNK)
    half.step_ended(Report(1, {1: LoadResult(1, CHUNKS * CHUNK)}))
    place.step({"early": 1, "late": 1}, preempted=True)
    assert half.tracked["late"].goal == 1, "the load of its time has ended, whatever has begun since"


def test_nothing_is_loaded_for_a_request_that_a_token_on_its_way_may_end() -> None:
    place = Place()
    place.request.num_preemptions, place.request.num_in_flight_tokens = 1, 1
    assert place.half.match(place.request, 0) == (0, False), "vLLM 0.26 would die of anything else"
    place.request.async_tokens_to_discard = 1  # It is dropped.
    place.half.matcher.found = lambda *_: None  # type: ignore[method-assign]
    assert place.half.match(place.request, 0) == (None, False)


def test_blocks_that_vllm_has_taken_back_by_itself_are_new_again() -> None:
    place = Place()
    place.begin(1, 0)
    place.step()
    place.half.matcher.found = lambda one, others: None
    place.half.match(place.request, 0)
    place.begin(200, 0)
    assert place.half.new_blocks == set(range(200, 200 + BLOCKS))


def test_blocks_are_new_also_for_a_request_that_a_token_on_its_way_may_end() -> None:
    place = Place()
    place.half.matcher.found = lambda one, others: None  # type: ignore[method-assign]
    place.half.match(place.request, 4 * BLOCK)  # vLLM's own cache has some of its blocks, and then none.
    place.begin(1, 0)
    place.step()
    place.request.num_preemptions, place.request.num_in_flight_tokens = 1, 1
    assert place.half.match(place.request, 0) == (0, False)
    place.begin(200, 0)
    assert place.half.new_blocks == set(range(200, 200 + BLOCKS)), (
        "stores that read one of them must end first"
    )


def test_an_aborted_requests_blocks_are_vllms_to_free_whatever_is_being_stored() -> None:
    place = Place()
    half, one = place.half, place.one
    place.begin(1, 0)
    place.request.computed = TOKENS
    half.set_store_goal(one, TOKENS)
    step = Step(1, idle=False)
    half.plan_stores(one, step)
    place.request.num_preemptions += 1  # Then another connector loads in the background: its end frees them.
    place.begin(200, 0)
    assert half.request_finished(place.request, ([*range(200, 200 + BLOCKS)],)) == (False, None), (
        "freed twice"
    )
    assert half.stores.touched([1]) == [step.stores[0].job], "it is waited for before its blocks are written"


def test_leases_of_a_hand_over_end_where_nothing_is_left_to_load() -> None:
    place = Place()
    place.one.pending_handover = PendingHandover(Found(place.half.facts.shape, [[]], 0), 0.0)
    place.begin(1, 0)
    assert place.one.pending_handover is None


def test_what_a_load_brought_before_a_reset_is_not_stored_under_the_new_names() -> None:
    place = Place()
    half, one = place.half, place.one
    place.begin(1, CHUNKS * CHUNK, layerwise=False)
    assert not half.reset() and one.gap
    half.step_ended(
        Report(1, {1: LoadResult(1, 2 * CHUNK)})
    )  # Half of it came, and vLLM goes on behind that.
    place.request.computed = 2 * CHUNK
    place.begin(1, 0)
    assert one.gap, "what is computed now comes from what was computed before"
    place.request.num_preemptions, place.request.computed = 1, 0
    place.begin(1, 0)
    assert not one.gap, "it has begun anew"


@pytest.mark.parametrize(
    ("tokens", "on_cpu", "stored"), [(1, True, True), (2, True, False), (2, False, True)]
)
def test_a_tail_is_stored_when_nobody_writes_its_page_any_more(
    tokens: int, on_cpu: bool, stored: bool
) -> None:
    place = Place()
    half, one = place.half, place.one
    half.facts.on_cpu, place.request.max_tokens = on_cpu, tokens
    place.request.kv_transfer_params = {"do_remote_decode": True}
    place.begin(1, 0)
    half.set_store_goal(one, TOKENS)
    assert one.tail == stored
    place.request.is_finished = lambda: True
    half.set_store_goal(one, TOKENS)
    assert one.tail


def test_a_tail_is_stored_also_where_the_node_has_chunks_behind_the_prompt() -> None:
    place = Place()
    half, one = place.half, place.one
    place.request.kv_transfer_params = {"do_remote_decode": True}
    place.request.status.name, place.request.max_tokens = "FINISHED_STOPPED", 2 * CHUNK
    # It has lost its blocks, and somebody else has stored the same answer.
    place.request.all_token_ids, place.request.num_tokens = list(range(TOKENS + CHUNK)), TOKENS + CHUNK
    one.known = CHUNKS + 1
    place.begin(1, 0)
    place.request.computed = TOKENS + CHUNK
    frees_later, ticket = half.request_finished(place.request, ([*range(1, 1 + BLOCKS)],))
    assert frees_later and ticket is not None
    place.step()
    (job,) = half.stores.jobs.values()
    assert (job.first, job.chunks, job.tail) == (CHUNKS, 1, True)
    assert not half.finishing, "its blocks would never be free"


def test_a_prompt_with_embeddings_is_left_alone() -> None:
    place = Place()
    more = {"request_id": "two", "prompt_embeds": object()}
    place.half.request_added(Request(**(vars(place.request) | more)))
    assert list(place.half.tracked) == ["one"], "its tokens say nothing of them"


class Cache:
    """Remembers what is stored."""

    def __init__(self) -> None:
        self.stored: list[int] = []

        self.loaded: list[int] = []

    def load(self, job: int, *_: Any, **__: Any) -> None:
        self.loaded.append(job)

    def store(self, job: int, chunks: Any, pages: Any, stream: int) -> None:
        self.stored.append(job)

    def take_ended(self) -> Any:
        return [], []

    def take_measured(self) -> Any:
        return []

    def take_bubbles(self) -> Any:
        return []


def worker() -> Any:
    """A worker's half with nothing under way."""
    half: Any = object.__new__(WorkerHalf)
    half.cache, half.device, half.rank, half.step = Cache(), SimpleNamespace(type="cpu"), 0, None
    half.is_alone, half.stalls, half.cuts_heads = True, [], True
    half.loads, half.stores, half.layerwise, half.with_states = {}, set(), set(), []
    return half


@pytest.mark.parametrize("written", [None, "zeroed", "copied"])
def test_loads_begin_before_vllm_prepares_the_step_unless_that_writes_blocks(written: str | None) -> None:
    place, half = Place(), worker()
    place.begin(1, CHUNKS * CHUNK)
    step = place.step(**{written: [7]} if written else {})
    (load,) = step.loads
    half.before_step(step)
    assert half.cache.loaded == ([load.job] if written is None else [])
    half.begin_step(step, FORWARD)
    assert half.cache.loaded == [load.job], "once"
    assert half.layerwise == {load.job} and half.step is step


def test_loads_that_no_step_waits_for_begin_with_the_step() -> None:
    """vLLM 0.33 submits these behind the forward pass."""
    place = Place()
    place.begin(1, CHUNKS * CHUNK, layerwise=False)
    assert [load.layerwise for load in place.step().loads] == [False] and not place.step().early


@pytest.mark.parametrize("first", [True, False])
def test_no_load_begins_under_a_multi_connector_before_others_have_let_go_of_its_blocks(first: bool) -> None:
    """Other connectors wait in `handle_preemptions` for stores of their own that still read these blocks, or
    begin them there.
    """
    place, half = Place(), worker()
    half.is_alone = False
    place.begin(1, CHUNKS * CHUNK)
    step = place.step()
    read: list[list[int]] = []
    ours: Any = object.__new__(ForebayConnector)
    ours._here = half
    other = SimpleNamespace(handle_preemptions=lambda _: read.append(list(half.cache.loaded)))
    several: Any = object.__new__(MultiConnector)
    several._connectors = [ours, other] if first else [other, ours]
    metadata = (step, None) if first else (None, step)
    several.handle_preemptions(MultiKVConnectorMetadata(metadata=metadata))
    assert read == [[]], "a load writes what another connector still reads"
    half.begin_step(step, FORWARD)
    assert half.cache.loaded == [load.job for load in step.loads]


def test_an_offer_that_is_refused_ends_no_engine_and_keeps_no_block() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ForebayError("no room")

    half = worker()
    half.kv, half.offered, half.ranks = SimpleNamespace(offer=refuse, decline=refuse), {}, 1
    offer = Offer("one", [bytes(16)], bytes(32), [], CHUNK)
    half.start_offers(Step(1, idle=True, offers=[offer], declined=[(b"", bytes(16))]))
    assert half.offered == {}


@pytest.mark.parametrize("idle", [False, True])
def test_a_store_begins_behind_what_a_drafter_writes(idle: bool) -> None:
    """vLLM asks what has ended before a drafter has computed, and says that all was computed behind it."""
    half = worker()
    half.held_for_stores, half.received, half.idle_steps, half.report = {}, set(), 0, Report(0)
    half.offered = {}
    half.back_off = lambda step: False
    store = Store(5, [[[(bytes(32), None, CHUNK)]]], [])
    half.step = Step(1, idle=idle, stores=[store], sent={"one": [5]})
    assert half.take_finished() == (None, None), "its blocks are still to be read"
    assert half.cache.stored == ([5] if idle else [])
    half.start_stores()
    assert half.cache.stored == [5]
    half.stores.clear()
    half.step = Step(2, idle=True)
    assert half.take_finished() == ({"one"}, None)


def test_a_step_whose_end_a_pipeline_stage_was_not_told_of_is_stored_with_the_next_one() -> None:
    """With a drafter vLLM's first runner tells the last stage alone that all was computed."""
    half = worker()
    half.held_for_stores, half.received, half.idle_steps, half.report = {}, set(), 0, Report(0)
    half.offered = {}
    store = Store(5, [[[(bytes(32), None, CHUNK)]]], [])
    for step in (Step(1, idle=False, stores=[store]), Step(2, idle=False)):
        half.before_step(step)
        half.begin_step(step, FORWARD)
        half.take_finished()
    assert half.cache.stored == [5]


@pytest.mark.parametrize("others_wait", [False, True])
def test_an_engine_that_waits_rests_unless_others_wait_for_each_of_its_steps(others_wait: bool) -> None:
    half: Any = object.__new__(WorkerHalf)
    waited: list[float] = []
    half.cache = SimpleNamespace(wait_loaded=lambda jobs, limit_s: bool(waited.append(limit_s)))
    half.loads, half.stores, half.idle_steps = {1: None}, set(), 0
    parallel, model = SimpleNamespace(data_parallel_size=2), SimpleNamespace(is_moe=others_wait)
    half.may_back_off = not compat.in_lockstep(SimpleNamespace(parallel_config=parallel, model_config=model))
    for number in range(6):
        half.back_off(Step(number, idle=True))
    assert waited == ([] if others_wait else [0.0002] + 5 * [0.0005])


def test_a_load_that_ends_while_an_engine_rests_is_told_in_the_same_step() -> None:
    half = worker()
    half.held_for_stores, half.received, half.idle_steps, half.report = {}, set(), 0, Report(0)
    half.offered, half.dropped, half.may_back_off = {}, set(), True
    half.loads = {5: SimpleNamespace(request="one", layerwise=False, tokens=CHUNK)}
    ended: list[list[Any]] = [[], [(5, CHUNK, None)]]
    half.cache.take_ended = lambda: (ended.pop(0), [])
    half.cache.wait_loaded = lambda jobs, limit_s: jobs == [5]
    half.step = Step(1, idle=True)
    assert half.take_finished() == (None, {"one"})
