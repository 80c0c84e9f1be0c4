"""What the events of the connector tell of chunks, without an engine and without a node."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import BLOCK, CHUNK, a_request, facts  # noqa: E402

from forebay.vllm.connector import compat, stores  # noqa: E402
from forebay.vllm.connector.events import Events  # noqa: E402
from forebay.vllm.connector.metadata import StoreResult  # noqa: E402

pytestmark = pytest.mark.smoke


class Watcher:
    """A node that says of chunks what it is told to say."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.says: list[tuple[int | None, list[bytes] | None]] = []

    def watch(self, ids: list[bytes]) -> int:
        self.asked.append(ids)
        return len(self.asked) - 1

    def take_watched(self) -> list[tuple[int | None, list[bytes] | None]]:
        says, self.says = self.says, []
        return says


def told(events: Events) -> list[tuple[str, int, int]]:
    """What is new: stored or removed, the first block and how many."""
    return [
        (type(one).__name__.removeprefix("Block"), int(one.block_hashes[0]), len(one.block_hashes))
        for one in events.take()
    ]


@pytest.fixture
def following() -> tuple[Watcher, Events, Any]:
    """Events of chunks of four blocks of a request, whose blocks are called 1, 2, 3 and so on."""
    node: Any = Watcher()
    request = SimpleNamespace(
        all_token_ids=list(range(640)),
        block_hashes=[bytes([number + 1]) for number in range(40)],
        cache_salt="salt",
        mm_features=[],
        lora_request=None,
        prompt_embeds=None,
    )
    return node, Events(node, compat.EventBlocks(0, BLOCK, BLOCK, "full_attention", None), CHUNK), request


def ids_of(*ranks: str) -> list[list[bytes]]:
    """Of ten chunks, for each rank."""
    return [[f"{rank}{number}".encode() for number in range(10)] for rank in ranks]


def test_a_chunk_is_told_once_and_goes_with_the_first_of_its_parts(
    following: tuple[Watcher, Events, Any],
) -> None:
    node, events, request = following
    events.chunks_stored(request, ids_of("a", "b"), [0, 1])
    first, second = events.new
    assert first.token_ids == list(range(64)) and first.parent_block_hash is None
    assert first.extra_keys == [("salt",), None, None, None] and second.extra_keys == [None] * 4
    assert second.token_ids == list(range(64, 128)) and second.parent_block_hash == 4
    assert told(events) == [("Stored", 1, 4), ("Stored", 5, 4)]
    assert node.asked == [[b"a0", b"b0", b"a1", b"b1"]]
    events.chunks_stored(request, ids_of("a", "b"), [0])
    node.says = [(0, [])]
    assert told(events) == []
    assert node.asked[1:] == [[b"a0", b"b0"]]
    node.says = [(1, [])]
    assert told(events) == []
    node.says = [(None, [b"b1"]), (None, [b"a1"])]
    assert told(events) == [("Removed", 5, 4)]
    node.says = [(None, None), (None, None)]
    assert told(events) == [("Removed", 1, 4)]
    assert not (events.published or events.asked or events.to_ask or events.shapes)


def test_the_node_is_asked_again_when_it_has_answered_and_never_more_than_its_socket_takes(
    following: tuple[Watcher, Events, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.vllm.connector.events.ASK_IDS", 4)
    node, events, request = following
    events.chunks_stored(request, ids_of("a", "b"), range(3))
    events.chunks_stored(request, ids_of("a", "b"), [3])
    assert told(events) == [("Stored", 1, 4), ("Stored", 5, 4), ("Stored", 9, 4), ("Stored", 13, 4)]
    assert node.asked == [[b"a0", b"b0", b"a1", b"b1"]]
    node.says = [(None, None), (0, [b"a0", b"b0", b"a1", b"b1"])]
    assert [kind for kind, _, _ in told(events)] == ["Removed"] * 4
    assert node.asked[1:] == [[b"a2", b"b2", b"a3", b"b3"]], "the next node is asked for the rest"
    node.says = [(1, [b"b3"])]
    assert told(events) == [("Stored", 9, 4)]


def test_what_the_node_does_not_have_when_it_is_asked_is_told_to_have_gone(
    following: tuple[Watcher, Events, Any],
) -> None:
    node, events, request = following
    events.chunks_stored(request, ids_of("a"), [0, 1])
    node.says = [(0, [b"a1"])]
    assert told(events) == [("Stored", 1, 4), ("Stored", 5, 4), ("Removed", 5, 4)]
    # It went, came again, and was asked for before the going was heard.
    events.chunks_stored(request, ids_of("a"), [0])
    node.says = [(None, [b"a0"]), (1, [])]
    assert told(events) == [("Removed", 1, 4), ("Stored", 1, 4)]


def test_a_chunk_that_is_there_in_two_shapes_is_told_until_the_last_one_goes(
    following: tuple[Watcher, Events, Any],
) -> None:
    node, events, request = following
    events.chunks_stored(request, ids_of("a"), [2])
    events.chunks_stored(request, ids_of("x", "y"), [2])
    node.says = [(0, [])]
    assert told(events) == [("Stored", 9, 4)]
    node.says = [(1, []), (None, [b"a2"])]
    assert told(events) == []
    node.says = [(None, [b"y2"])]
    assert told(events) == [("Removed", 9, 4)]


def test_a_chunk_that_was_told_under_one_name_goes_under_it_when_it_is_asked_for_under_another(
    following: tuple[Watcher, Events, Any],
) -> None:
    node, events, request = following
    events.chunks_stored(request, ids_of("a"), [0, 1])
    node.says = [(0, [])]
    assert told(events) == [("Stored", 1, 4), ("Stored", 5, 4)]
    # An adapter under a second name has the same chunks, and vLLM has other hashes for them.
    renamed = SimpleNamespace(**vars(request) | {"block_hashes": [bytes([200 + n]) for n in range(40)]})
    events.chunks_stored(renamed, ids_of("a"), [0])
    node.says = [(1, [b"a0"])]  # It has left, and that is the first that is said of it.
    assert told(events) == [("Removed", 1, 4)]
    node.says = [(None, [b"a1"])]
    assert told(events) == [("Removed", 5, 4)]
    assert not (events.published or events.shapes)


def test_after_a_reset_nothing_of_before_is_told_to_be_there(following: tuple[Watcher, Events, Any]) -> None:
    node, events, request = following
    events.chunks_stored(request, ids_of("a"), [0, 1])
    events.chunks_stored(request, ids_of("a"), [2])
    assert told(events) == [("Stored", 1, 4), ("Stored", 5, 4), ("Stored", 9, 4)]
    events.forget()
    events.chunks_stored(request, ids_of("b"), [0])
    assert sorted(told(events)) == [
        ("Removed", 1, 4),
        ("Removed", 5, 4),
        ("Removed", 9, 4),
        ("Stored", 1, 4),
    ]
    node.says = [(0, []), (None, [b"a0"])]
    assert told(events) == [], "the answer is of names that nobody has any more"
    assert node.asked[1:] == [[b"b0"]]


def test_blocks_of_several_hashes_are_called_by_the_last_one() -> None:
    blocks = compat.EventBlocks(1, 32, 16, "full_attention", None)
    request = SimpleNamespace(block_hashes=[bytes([number]) for number in range(8)])
    assert blocks.hashes(request, 64, 128) == [5, 7] and blocks.hash_before(request, 64) == 3


def test_a_store_says_which_whole_chunks_are_there_of_all_workers() -> None:
    planner, one = stores.Stores(facts(), workers=2), a_request(300, 4)
    one.tail = True
    assert planner.plan(one, 1) is not None
    assert planner.ended(1, StoreResult(1, {1})) is None
    job = planner.ended(1, StoreResult(1, {3}))
    assert job is not None and job.chunks_taken == [0, 2], "the last one is a tail"


@pytest.mark.parametrize("windows", [(None,), (40,), (40, None)])
def test_a_group_that_keeps_all_tokens_stands_for_a_chunk(windows: tuple[int | None, ...]) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    torch = pytest.importorskip("torch")
    same = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(**same) if window is None else SlidingWindowSpec(**same, sliding_window=window)
        for window in windows
    ]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"]) for spec in specs]
    config: Any = SimpleNamespace(
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        cache_config=SimpleNamespace(block_size=BLOCK, enable_prefix_caching=True, prefix_match_unit=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=SimpleNamespace(),
    )
    blocks = compat.event_blocks(config, SimpleNamespace(kv_cache_groups=groups))
    kind = "full_attention" if None in windows else "sliding_window"
    window = None if None in windows else 40
    assert blocks == compat.EventBlocks(len(windows) - 1, BLOCK, BLOCK, kind, window)
    for off in (None, SimpleNamespace(enable_kv_cache_events=False)):
        config.kv_events_config = off
        assert compat.event_blocks(config, SimpleNamespace(kv_cache_groups=groups)) is None


class Images(list[Any]):
    """A request's images. It counts how often one is looked at."""

    looks = 0

    def __getitem__(self, which: Any) -> Any:
        self.looks += 1
        return super().__getitem__(which)


def test_events_of_blocks_behind_many_images_do_not_look_at_all_of_them(
    following: tuple[Watcher, Events, Any],
) -> None:
    _, events, request = following
    images = [
        SimpleNamespace(identifier=f"image {place}", mm_position=SimpleNamespace(offset=place, length=7))
        for place in range(0, 640, 10)
    ]
    for start in (0, 64, 576):
        request.mm_features = images
        right = [
            compat.generate_block_hash_extra_keys(request, first, first + BLOCK, 0)[0]
            for first in range(start, start + CHUNK, BLOCK)
        ]
        request.mm_features = seen = Images(images)
        plain = getattr(compat.kv_cache_utils, "to_event_extra_keys", list)
        assert events.blocks.extra_keys(request, start, start + CHUNK) == list(plain(right))
        assert seen.looks < 40, start
