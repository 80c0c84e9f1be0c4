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
from forebay.vllm.connector.stores import Stores  # noqa: E402
from forebay.vllm.connector.tracked import Found, state_id  # noqa: E402

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


def test_a_state_is_stored_from_the_block_that_ends_with_its_chunk() -> None:
    both = facts(groups=(Group(BLOCK, 8), Group(BLOCK, 1, State())), state_bytes=9)
    planner, one = stores.Stores(both, workers=1), a_request(256, 0)
    one.blocks = [one.blocks[0], [0] * 7 + [50]]
    assert planner.plan_state(one, 1) is None, "no step ended at a chunk"
    one.state = 2 * CHUNK
    assert not one.is_stored
    store = planner.plan_state(one, 1)
    assert store is not None and store.state and one.is_stored
    assert store.chunks == [[[(state_id(one.ids.ranks[0][1]), None, 1)]]]
    assert [pages.tolist() for pages in store.pages] == [[50]] and planner.touched([50]) == [1]
    for gone in (1, 3):  # another step's, and where there is no block yet
        one.state = gone * CHUNK
        assert planner.plan_state(one, 2) is None
    one.state = 2 * CHUNK - BLOCK - 3  # within a block and a chunk: of a prompt that is handed over
    one.blocks = [one.blocks[0], [0] * 6 + [60]]
    store = planner.plan_state(one, 3)
    tail = one.ids.with_tail(one.request.all_token_ids[: 2 * CHUNK - BLOCK - 3], 1)[0][1]
    assert store is not None and store.chunks == [[[(state_id(tail), None, 1)]]]
    assert [pages.tolist() for pages in store.pages] == [[60]]
    one.state, one.gap = 2 * CHUNK, True
    assert planner.plan_state(one, 2) is None, "what is before it will not be found"


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


def test_a_state_is_aimed_at_where_a_step_ends_with_a_chunk_whose_tokens_are_known() -> None:
    one = a_request(256, 0)
    half: Any = SimpleNamespace(facts=facts(), unstored={}, params=lambda _: said, stores=Stores(facts(), 1))
    one.request.num_tokens = 256
    said: dict[str, bool] = {}
    for computed, left, state in ((100, 28, 0), (128, CHUNK, 128), (257, 63, 128), (320, CHUNK, 128)):
        assert SchedulerHalf.set_state_goal(half, one, computed) == left
        assert one.state == state
    assert half.unstored == {one.name: one}
    one.request.num_prompt_tokens = 250
    for handed, state in ((False, 128), (True, 250)):
        said["do_remote_decode"] = handed
        assert SchedulerHalf.set_state_goal(half, one, 250) == 6
        assert one.state == state


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
