"""What the connector does with states, in parts: which are allowed and stored, and how far a hit goes."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import BLOCK, CHUNK, a_request, facts  # noqa: E402
from test_policies import FULL_SPEC, a_model, a_state  # noqa: E402

from forebay.errors import InvalidError  # noqa: E402
from forebay.vllm.connector import compat, stores  # noqa: E402
from forebay.vllm.connector.config import Shape  # noqa: E402
from forebay.vllm.connector.finder import Finder  # noqa: E402
from forebay.vllm.connector.groups import Group, fail_as_one, groups_of  # noqa: E402
from forebay.vllm.connector.policies import State  # noqa: E402
from forebay.vllm.connector.scheduler import SchedulerHalf  # noqa: E402
from forebay.vllm.connector.states import WithStates, place_of  # noqa: E402
from forebay.vllm.connector.tracked import Found, TrackedRequest, state_id  # noqa: E402

pytestmark = pytest.mark.smoke


def test_states_are_stored_only_where_vllm_keeps_them_where_steps_end() -> None:
    full, state = groups_of(a_model(FULL_SPEC, a_state()))
    assert full == Group(BLOCK, 2) and state == Group(BLOCK, 1, State())
    assert fail_as_one((full, state))
    for specs, says in (
        ((FULL_SPEC, a_state(mamba_cache_mode="all")), "mamba_cache_mode is 'all'; allowed is 'align'"),
        ((a_state(),), "no layer of the model keeps KV of tokens; allowed"),
    ):
        with pytest.raises(InvalidError, match=says):
            groups_of(a_model(*specs))


BOTH = (Group(BLOCK, 8), Group(BLOCK, 1, State(3)))


def a_request_with_states(
    tokens: int, computed: int, *blocks: int, known: int | None = None, ahead: int = 0
) -> TrackedRequest:
    """So many tokens of it are computed, `ahead` of them in steps in flight. `blocks` end its table."""
    one = a_request(tokens, 0)
    one.request.num_tokens = tokens if known is None else known
    one.request.num_computed_tokens, one.request.num_output_placeholders = computed, ahead
    one.blocks = [one.blocks[0], [0] * (-(-tokens // BLOCK) - len(blocks)) + list(blocks)]
    return one


def stored_blocks(planner: stores.Stores, one: TrackedRequest) -> dict[bytes, list[int]]:
    """The states that are stored behind this step: ids, and the blocks they are in."""
    found = {}
    for number, state in enumerate(planner.due_states(one)):
        store = planner.plan_state(one, state, number)
        assert store is not None and store.state
        found[store.chunks[0][0][0][0]] = [int(pages[0]) for pages in store.pages]
    return found


def test_a_state_is_stored_behind_the_step_that_ends_with_its_chunk() -> None:
    planner = stores.Stores(facts(groups=BOTH, state_bytes=9), workers=1)
    one = a_request_with_states(2 * CHUNK, CHUNK, 50)
    assert not planner.note_state(one, CHUNK - 1, 0, False), "the step ends within a chunk"
    assert planner.note_state(one, CHUNK, 0, False) and not one.is_stored
    name = state_id(one.ids.ranks[0][1])
    assert stored_blocks(planner, one) == {name: [50]} and one.is_stored
    assert planner.touched([50]) == [0]
    assert not planner.note_state(one, CHUNK, 0, False), "it is stored"
    for table in ([0] * 8, [0] * 7):  # no block, or none yet
        one = a_request_with_states(2 * CHUNK, CHUNK)
        one.blocks[1] = table
        assert not planner.note_state(one, CHUNK, 0, False) and one.is_stored
    one = a_request_with_states(2 * CHUNK, CHUNK, 50)
    one.gap = True
    assert not planner.note_state(one, CHUNK, 0, False), "what is before it will not be found"


def test_a_state_is_stored_when_the_tokens_of_its_chunk_are_known() -> None:
    """Steps are scheduled ahead of the tokens of the last one."""
    planner = stores.Stores(facts(groups=BOTH, state_bytes=9), workers=1)
    one = a_request_with_states(2 * CHUNK, 2 * CHUNK - 1, 50, known=2 * CHUNK - 1, ahead=1)
    assert planner.note_state(one, 1, 0, False)
    assert stored_blocks(planner, one) == {}, "its last token is not known yet"
    one.request.num_tokens, one.request.num_computed_tokens = 2 * CHUNK, 2 * CHUNK
    assert not planner.note_state(one, 1, 0, False)
    assert stored_blocks(planner, one) == {state_id(one.ids.ranks[0][1]): [50]}


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_a_state_within_drafts_is_stored_when_they_are_accepted(accepted: int) -> None:
    """A step of a token and three drafts ends three tokens behind the chunk, or before its end."""
    planner, before = stores.Stores(facts(groups=BOTH, state_bytes=9), workers=1), 2 * CHUNK - 2
    one = a_request_with_states(2 * CHUNK + 8, before, 50, 51, known=before + 1)
    assert planner.note_state(one, 4, 3, False)
    assert stored_blocks(planner, one) == {}, "nobody knows yet how many are accepted"
    one.request.num_computed_tokens = before + 1 + accepted
    one.request.num_tokens = one.request.num_computed_tokens + 1
    reached = {state_id(one.ids.ranks[0][1]): [50]} if accepted else {}
    assert not planner.note_state(one, 4, 3, False)
    assert stored_blocks(planner, one) == reached
    planner.keep_certain_states(one)
    assert one.is_stored, "a request that has ended waits for a state that it did not reach"


def test_drafts_in_flight_count_as_rejected_until_more_is_known() -> None:
    planner = stores.Stores(facts(groups=BOTH, state_bytes=9), workers=1)
    # A step in flight has a token and three drafts: the request is between 125 and 128 tokens.
    one = a_request_with_states(2 * CHUNK + 8, 2 * CHUNK, 50, 51, known=2 * CHUNK - 3, ahead=4)
    assert planner.note_state(one, 4, 3, False), "this step may reach it, if the last one did not"
    assert stored_blocks(planner, one) == {}
    one.request.num_tokens, one.request.num_computed_tokens = 2 * CHUNK - 1, 2 * CHUNK + 2
    assert stored_blocks(planner, one) == {}, "two of the three were accepted"
    one.request.num_tokens, one.request.num_computed_tokens = 2 * CHUNK, 2 * CHUNK + 3
    assert stored_blocks(planner, one) == {state_id(one.ids.ranks[0][1]): [50]}


def test_no_state_is_within_what_a_step_computes_of_a_prompt() -> None:
    planner = stores.Stores(facts(groups=BOTH, state_bytes=9), workers=1)
    one = a_request_with_states(2 * CHUNK + 8, CHUNK, 50, 51)
    assert not planner.note_state(one, CHUNK + 8, 0, False)
    assert not planner.note_state(one, CHUNK + 8, 7, False)
    assert planner.note_state(one, CHUNK + 8, 8, False), "all behind the chunk are drafts"


@pytest.mark.parametrize(
    ("computed", "tokens", "drafts", "on_v1", "needs_drafts"),
    [
        (2 * CHUNK, 1, 0, False, False),  # as vLLM generates
        (2 * CHUNK, 1, 0, False, True),  # the same, where vLLM forgets which drafts were accepted
        (2 * CHUNK, 4, 3, True, True),
        (2 * CHUNK, 4, 0, True, False),  # of a request that begins anew, as many as a step with drafts has
        (2 * CHUNK, 4, 0, False, False),
        (2 * CHUNK, 5, 0, True, False),
        (2 * CHUNK - 1, 4, 3, True, False),  # a prompt's last token with drafts
        (2 * CHUNK - 1, 4, 3, False, False),
        (CHUNK, 4, 0, True, True),  # within a prompt
    ],
)
def test_nothing_is_stored_behind_a_step_that_vllm_gets_wrong(
    computed: int, tokens: int, drafts: int, on_v1: bool, needs_drafts: bool
) -> None:
    wrong = {
        (2 * CHUNK, 1, 0, False, True),
        (2 * CHUNK, 4, 0, True, False),
        (2 * CHUNK - 1, 4, 3, True, False),
    }
    planner = stores.Stores(facts(groups=BOTH), workers=1, drafts=3, on_v1=on_v1, needs_drafts=needs_drafts)
    one = a_request_with_states(3 * CHUNK, computed, 50)
    one.request.num_prompt_tokens = 2 * CHUNK
    planner.note_state(one, tokens, drafts, False)
    assert one.gap == ((computed, tokens, drafts, on_v1, needs_drafts) in wrong)
    other = stores.Stores(facts(groups=BOTH), workers=1)
    one.gap = False
    other.note_state(one, tokens, 0, False)
    assert not one.gap, "there are no drafts"


def test_a_block_that_vllm_has_moved_on_holds_no_state() -> None:
    """Blocks for drafts, behind a state, are moved to the new end of the table by a step that leaps."""
    planner = stores.Stores(facts(groups=BOTH, state_bytes=9), workers=1)
    one = a_request_with_states(2 * CHUNK + BOTH[1].block_tokens, 2 * CHUNK - 1, 50, 50)
    assert not planner.note_state(one, 4, 3, False)


def test_a_prefiller_stores_the_state_at_the_end_of_its_prompt() -> None:
    planner, tokens = stores.Stores(facts(groups=BOTH, state_bytes=9), workers=1), 2 * CHUNK - BLOCK - 3
    for drafts, block in ((0, 60), (3, 60), (4, 61)):  # what is behind drafts lies in the step's last block
        one = a_request_with_states(tokens, CHUNK)
        one.blocks[1] = [0] * 6 + [60, 61]
        step = tokens - CHUNK + drafts
        assert not planner.note_state(one, step, drafts, False)
        assert planner.note_state(one, step, drafts, True)
        tail = one.ids.with_tail(one.request.all_token_ids[:tokens], 1)[0][1]
        assert stored_blocks(planner, one) == {state_id(tail): [block]}


def test_a_state_whose_block_was_given_out_is_lost() -> None:
    planner = stores.Stores(facts(groups=BOTH), workers=1)
    one = a_request_with_states(2 * CHUNK, 2 * CHUNK - 1, 50, known=2 * CHUNK - 1, ahead=1)
    assert planner.note_state(one, 1, 0, False)
    assert planner.drop_lost_states([one], {7}) == 0 and len(one.states_to_store) == 1
    assert planner.drop_lost_states([one], {7, 50}) == 1 and one.is_stored


@pytest.mark.parametrize("what", ["preempted", "reset", "began anew"])
def test_states_of_blocks_that_a_request_has_lost_are_not_stored(what: str) -> None:
    planner = stores.Stores(facts(groups=BOTH, state_bytes=9), workers=1)
    one = a_request_with_states(2 * CHUNK, 2 * CHUNK - 1, 50, known=2 * CHUNK - 1, ahead=1)
    assert planner.note_state(one, 1, 0, False)
    if what == "preempted":
        one.request.num_preemptions = 1
        one.notice_preemption()
    elif what == "reset":
        one.forget()
    else:
        one.reset_progress(0)
    assert one.states_to_store == [] and one.last_state == 0


def test_a_hit_ends_where_all_ranks_have_a_state() -> None:
    both = facts(groups=(Group(BLOCK, 8), Group(BLOCK, 1, State())), shape=Shape(2, BLOCK))
    ids = [[bytes([rank, chunk]) * 16 for chunk in range(100)] for rank in range(2)]
    asked: list[list[bytes]] = []

    class Finding:
        def __init__(self, parts: list[list[bytes]]) -> None:
            asked.extend(parts)
            self.here = all(part[0] in there for part in parts)

        def wait(self, limit_s: float = 0) -> tuple[int, int, int]:
            return (0, int(self.here), 0)

    there = {state_id(ids[0][90]), state_id(ids[0][70]), state_id(ids[1][70]), state_id(ids[0][10])}
    node: Any = SimpleNamespace(find=Finding)
    finder = Finder(node, both, lambda: 0.0)
    found = Found(both.shape, ids, 100 * CHUNK, 60, 20, 20)
    said = finder.answer_states(finder.ask_states(found, 0))
    assert said is not None and (said.chunks, said.tokens, said.in_memory, said.on_disk) == (
        71,
        71 * CHUNK,
        60,
        11,
    )
    assert len(asked) == 2 * 64, "it goes on asking"
    none = finder.answer_states(finder.ask_states(found, 71 * CHUNK))
    assert none is not None and none.chunks == 0, "what vLLM has itself is no hit"


def test_a_load_of_both_ends_with_the_later_one_and_is_nothing_without_its_state() -> None:
    class Half:
        ended: tuple[list[Any], list[int]] = ([], [])
        refuses = False

        def load(self, *_: Any, **__: Any) -> None:
            if self.refuses:
                raise InvalidError("it cannot be")

        def take_ended(self) -> Any:
            ended, self.ended = self.ended, ([], [])
            return ended

        def take_bubbles(self) -> Any:
            return [(5, 0.25, 2)] if self is kv else [(5, 1.0, 1)]

    kv, states = Half(), Half()
    both = WithStates(kv, states)  # type: ignore[arg-type]

    def ended(of_kv: list[Any], of_states: list[Any]) -> Any:
        kv.ended, states.ended = (of_kv, [1]), (of_states, [2])
        loads, stores_ended = both.take_ended()
        assert stores_ended == [1, 2]
        return loads

    for job in (5, 6):
        both.load(job, [], [], state=b"", state_pages=[], stream=0)
    assert ended([(5, 128, None)], []) == []
    assert ended([], [(6, 1, None), (5, 1, None)]) == [(5, 128, None)]
    assert ended([(6, 64, "late")], []) == [(6, 64, "late")]
    both.load(7, [], [], state=b"", state_pages=[], stream=0)
    assert ended([(7, 128, None)], [(7, 0, "gone")]) == [(7, 0, "state: gone")]
    states.refuses = True
    both.load(8, [], [], state=b"", state_pages=[], stream=0)
    assert ended([(8, 128, None)], []) == [(8, 0, "state: it cannot be")]
    assert both.take_bubbles() == [(5, 0.25, 2)], "what steps wait for is KV"


def test_steps_are_looked_at_until_the_next_state() -> None:
    planner = stores.Stores(facts(groups=BOTH), workers=1)
    requests = SimpleNamespace(params=lambda _: {})
    half: Any = SimpleNamespace(facts=planner.facts, unstored={}, requests=requests, stores=planner)
    one = a_request_with_states(2 * CHUNK, CHUNK, 50)
    assert SchedulerHalf.note_state(half, one, 36, 0) == 28 and half.unstored == {}
    assert SchedulerHalf.note_state(half, one, CHUNK, 0) == CHUNK and half.unstored == {one.name: one}


def test_a_state_lies_in_its_block_in_one_piece_or_is_refused() -> None:
    import torch

    blocks, room = 6, 40  # elements of four bytes, some behind the last part
    raw = torch.zeros(blocks * room)
    conv = raw.as_strided((blocks, 3, 4), (room, 4, 1))
    rest = raw.as_strided((blocks, 2, 8), (room, 8, 1), 12)
    place = place_of("a", [conv, rest], blocks, 1)
    assert place == (raw.data_ptr(), blocks, room * 4, (12 + 16) * 4, 1)
    apart = raw.as_strided((blocks, 2, 8), (room, 8, 1), 13)
    turned = conv.transpose(1, 2)
    for parts, count in (([conv, apart], blocks), ([turned], blocks), ([rest, conv], blocks), ([conv], 3)):
        with pytest.raises(InvalidError, match="layer a has states of .* each in one piece"):
            place_of("a", parts, count, 1)


def test_vllms_own_cache_hits_as_far_as_all_groups_of_layers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

    before = HybridKVCacheCoordinator.find_longest_cache_hit_per_group
    monkeypatch.setattr(HybridKVCacheCoordinator, "find_longest_cache_hit_per_group", before)
    compat.hit_only_where_states_are()
    if hasattr(KVConnectorBase_V1, "supports_divergent_local_hybrid_hits"):
        assert HybridKVCacheCoordinator.find_longest_cache_hit_per_group is before
        return
    cache = SimpleNamespace(find_longest_cache_hit=lambda hashes, longest: ((["a"], ["b"]), 48, 16))
    assert HybridKVCacheCoordinator.find_longest_cache_hit_per_group(cache, [], 100) == (
        (["a"], ["b"]),
        (48, 48),
    )
