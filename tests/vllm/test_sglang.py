"""`forebay.sglang.hicache` against SGLang's own interface and factory, with a real node.

The files that know storage backends need torch alone, once the packages around them are stood in for; a host
pool is stood in for too, with the layouts that SGLang's pools have. `tests/sglang` has SGLang's server.
"""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import upstream
from nodes import Node
from processes import until

torch = pytest.importorskip("torch", reason="SKIPPED: this Python has no torch: `make test-vllm`")

VERSION = "0.5.23"
WEIGHTS = "cd" * 32
PAGE_TOKENS, LAYERS, HEADS, DIM, PAGES = 4, 3, 2, 16, 6


@pytest.fixture(scope="module")
def sglang() -> Iterator[types.ModuleType]:
    """SGLang's module of storage backends, and its factory as `factory`."""
    root = upstream.unpack(upstream.fetch("sglang", VERSION, "wheels"), "sglang/srt/") / "sglang"
    for name, folder in (("sglang", root), ("sglang.srt", root / "srt"), ("sglang.srt.mem_cache", None)):
        package = types.ModuleType(name)
        package.__path__ = [str(folder or root / "srt/mem_cache")]
        sys.modules[name] = package
    sys.modules["sglang"].__version__ = VERSION  # type: ignore[attr-defined]
    import sglang.srt.mem_cache.hicache_storage as module
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    module.factory = StorageBackendFactory
    yield module
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        del sys.modules[name]
    sys.modules.pop("forebay.sglang.hicache", None)


class Pool:
    """A host pool as `MHATokenToKVPoolHost` is one: halves of pages of layers, or of layers of tokens."""

    def __init__(self, layout: str) -> None:
        self.layout, self.dtype, self.page_size = layout, torch.float16, PAGE_TOKENS
        tokens = PAGES * PAGE_TOKENS
        first = (tokens, LAYERS) if layout == "page_first" else (LAYERS, tokens)
        self.kv_buffer = torch.zeros((2, *first, HEADS, DIM), dtype=self.dtype)

    def get_size_per_token(self) -> int:
        return 2 * LAYERS * HEADS * DIM * self.dtype.itemsize

    def of(self, page: int) -> Any:
        """A page's values, both halves."""
        tokens = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        return self.kv_buffer[:, tokens] if self.layout == "page_first" else self.kv_buffer[:, :, tokens]

    def indices(self, *pages: int) -> Any:
        return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        places: list[Any] = []
        for token in indices.tolist()[::PAGE_TOKENS]:
            page = self.of(token // PAGE_TOKENS)
            halves = [page[0], page[1]]
            if self.layout != "page_first":  # k and v of a layer, then those of the next
                halves = [half[layer] for layer in range(LAYERS) for half in halves]
            places += halves
        assert all(place.is_contiguous() for place in places)
        return [place.data_ptr() for place in places], [place.nbytes for place in places]


def backend_of(sglang: Any, node: Any, pool: Pool, extra: dict[str, Any] | None = None, **config: Any) -> Any:
    """As SGLang's cache controller makes it."""
    settings = {
        "backend_name": "forebay",
        "module_path": "forebay.sglang.hicache",
        "class_name": "ForebayStorage",
        "interface_v1": 1,
        "node": str(node.socket),
        "weights_digest": WEIGHTS,
    }
    rank = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    flags = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
    storage = sglang.HiCacheStorageConfig(
        **(rank | flags | config), model_name="served", extra_config=settings | (extra or {})
    )
    made = sglang.factory.create_backend("dynamic", storage, pool)
    made.register_mem_pool_host(pool)
    return made


def test_the_backend_has_all_that_sglang_demands(sglang: Any) -> None:
    from forebay.sglang.hicache import ForebayStorage

    assert issubclass(ForebayStorage, sglang.HiCacheStorage)
    assert not ForebayStorage.__abstractmethods__


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_of_one_engine_are_loaded_by_another(sglang: Any, node: Node, layout: str) -> None:
    mine, theirs = Pool(layout), Pool(layout)
    one, other = backend_of(sglang, node, mine), backend_of(sglang, node, theirs)
    mine.kv_buffer.copy_(torch.rand(mine.kv_buffer.shape))
    keys = [f"{number:064x}" for number in range(3)]
    assert one.batch_exists(keys) == 0
    assert one.batch_set_v1(keys, mine.indices(4, 1, 2)) == [True] * 3
    assert other.batch_exists([*keys, "f" * 64]) == 3
    assert other.exists(keys[1]) and not other.exists("f" * 64)
    assert other.batch_get_v1(keys, theirs.indices(0, 5, 3)) == [True] * 3
    for there, here in ((4, 0), (1, 5), (2, 3)):
        assert torch.equal(mine.of(there), theirs.of(here))
    assert not theirs.of(1).any(), "other pages are not touched"
    one.close()
    other.close()


def test_a_page_that_is_missing_is_false_and_the_others_are_there(sglang: Any, node: Node) -> None:
    pool = Pool("page_first")
    backend = backend_of(sglang, node, pool)
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape))
    assert backend.batch_set_v1(["a", "c"], pool.indices(0, 1)) == [True, True]
    assert backend.batch_get_v1(["a", "b", "c"], pool.indices(3, 4, 5)) == [True, False, True]
    assert torch.equal(pool.of(3), pool.of(0)) and torch.equal(pool.of(5), pool.of(1))
    backend.close()


def test_pages_in_tensors_of_their_own_travel_too(sglang: Any, node: Node) -> None:
    pool = Pool("page_first")
    backend = backend_of(sglang, node, pool)
    values = [torch.rand(64), torch.rand(64), pool.kv_buffer[0, :PAGE_TOKENS].flatten()]
    assert backend.batch_set(["a", "b", "c"], values)
    targets = [torch.zeros(64), torch.zeros(64)]
    loaded = backend.batch_get(["a", "x"], targets)
    assert torch.equal(loaded[0], values[0]) and loaded[1] is None
    assert torch.equal(backend.get("b", targets[1]), values[1])
    assert backend.set("d", values[0]) and backend.exists("d")
    assert backend.get("c", torch.zeros(1)) is None, "a page of another size is another page"
    backend.close()


def test_engines_that_differ_share_nothing(sglang: Any, node: Node) -> None:
    pool = Pool("page_first")
    backend = backend_of(sglang, node, pool)
    assert backend.batch_set_v1(["a"], pool.indices(0)) == [True]
    for extra, config in (
        ({"weights_digest": "ee" * 32}, {}),
        ({}, {"tp_size": 2}),
        ({}, {"pp_size": 2}),
    ):
        stranger = backend_of(sglang, node, Pool("page_first"), extra, **config)
        assert stranger.batch_exists(["a"]) == 0, (extra, config)
        stranger.close()
    other_layout = backend_of(sglang, node, Pool("layer_first"))
    assert other_layout.batch_exists(["a"]) == 0
    backend.close()
    other_layout.close()


def test_engines_with_fp8_of_another_kind_share_nothing(
    sglang: Any, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.srt.runtime_context as context

    def fp8() -> Pool:
        pool = Pool("page_first")
        pool.dtype = torch.uint8  # Of both kinds, as SGLang's pools say.
        pool.kv_buffer = pool.kv_buffer.view(torch.uint8)
        return pool

    with pytest.raises(ValueError, match="the host pool holds torch.uint8, and .* kv_cache_dtype"):
        backend_of(sglang, node, fp8())
    made = []
    for kind in ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3"):
        said = {"model": types.SimpleNamespace(kv_cache_dtype=kind)}
        monkeypatch.setattr(context.get_context(), "_config_bags", said)
        made.append(backend_of(sglang, node, fp8()))
    one, stranger, other = made
    assert one.batch_set_v1(["a"], one.mem_pool_host.indices(0)) == [True]
    assert (stranger.batch_exists(["a"]), other.batch_exists(["a"])) == (0, 1)
    for backend in made:
        backend.close()


def test_ranks_of_an_mla_model_share_what_one_of_them_stores_also_when_they_were_cleared(
    sglang: Any, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.srt.runtime_context as context

    def ranks_of_a_server() -> list[Any]:
        first: list[Any] = []  # What rank 0 gives to SGLang's group, all ranks get.
        group = types.SimpleNamespace(broadcast_object=lambda drawn: first.append(drawn) or first[0])
        monkeypatch.setattr(context, "get_parallel", lambda: types.SimpleNamespace(attn_tp_group=group))
        return [
            backend_of(sglang, node, Pool("page_first"), is_mla_model=True, tp_rank=rank, tp_size=2)
            for rank in range(2)
        ]

    def store(rank: Any) -> bool:
        return rank.batch_set_v1(["a"], rank.mem_pool_host.indices(0)) == [True]

    ranks, stranger = ranks_of_a_server(), ranks_of_a_server()
    for _ in range(3):
        assert store(ranks[1]), "rank 0 does it"
        assert [rank.batch_exists(["a"]) for rank in ranks] == [0, 0]
        assert store(ranks[0])
        assert [rank.batch_exists(["a"]) for rank in ranks] == [1, 1]
        for rank in ranks + stranger:
            assert rank.clear()
        assert [rank.batch_exists(["a"]) for rank in ranks + stranger] == [0, 0, 0, 0]
    assert store(ranks[0])
    assert stranger[1].batch_exists(["a"]) == 0, "another server that was cleared as often"
    for rank in ranks + stranger:
        rank.close()


def test_it_starts_before_its_node_and_finds_it_when_it_comes(sglang: Any, tmp_path: Path) -> None:
    pool = Pool("page_first")
    backend = backend_of(sglang, types.SimpleNamespace(socket=tmp_path / "node.sock"), pool)
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape))
    assert backend.batch_set_v1(["a"], pool.indices(0)) == [False]
    node = Node(tmp_path)
    until(lambda: backend._node.is_connected)
    assert backend.batch_set_v1(["a"], pool.indices(0)) == [True]
    assert backend.batch_get_v1(["a"], pool.indices(1)) == [True]
    assert torch.equal(pool.of(1), pool.of(0))
    backend.close()
    node.kill()


def test_many_pages_that_are_not_there_cost_few_questions(sglang: Any, node: Node) -> None:
    pool = Pool("page_first")
    backend = backend_of(sglang, node, pool)
    ask, asked = backend._pages._load_leased, []
    backend._pages._load_leased = lambda ids, places: asked.append(len(ids)) or ask(ids, places)
    keys = [f"not there {number}" for number in range(PAGES)] * 50
    pages = [page for _ in range(50) for page in range(PAGES)]
    assert backend.batch_get_v1(keys, pool.indices(*pages)) == [False] * len(keys)
    assert len(asked) < 20
    backend.close()


def test_after_clear_this_engine_finds_nothing_of_before_and_others_what_they_had(
    sglang: Any, node: Node
) -> None:
    pool, theirs = Pool("page_first"), Pool("page_first")
    backend, other = backend_of(sglang, node, pool), backend_of(sglang, node, theirs)
    assert backend.batch_set_v1(["a"], pool.indices(0)) == [True]
    assert backend.clear()
    assert backend.batch_exists(["a"]) == 0 and backend.batch_get_v1(["a"], pool.indices(1)) == [False]
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape))
    assert backend.batch_set_v1(["a", "b"], pool.indices(2, 3)) == [True, True]
    assert backend.batch_get_v1(["a"], pool.indices(1)) == [True]
    assert torch.equal(pool.of(1), pool.of(2)), "what it stored since is found"
    assert other.batch_exists(["a"]) == 1 and not other.exists("b")
    assert other.batch_get_v1(["a"], theirs.indices(0)) == [True] and not theirs.of(0).any()
    backend.close()
    other.close()


def test_a_host_pool_of_two_buffers_is_refused(sglang: Any, node: Node) -> None:
    pool = Pool("page_first")
    pool.kv_buffer = (pool.kv_buffer[0], pool.kv_buffer[1])
    with pytest.raises(ValueError, match="the host pool is in 2 buffers; allowed is one"):
        backend_of(sglang, node, pool)


def test_a_host_pool_beside_that_of_kv_is_refused(sglang: Any, node: Node) -> None:
    pool = Pool("page_first")
    backend = backend_of(sglang, node, pool)
    backend.register_mem_host_pool_v2(pool, sglang.PoolName.KV)  # SGLang tells of this one again.
    with pytest.raises(ValueError, match="a host pool is .*'draft'.*; allowed is that of KV alone"):
        backend.register_mem_host_pool_v2(Pool("page_first"), sglang.PoolName.DRAFT)
    backend.close()


def test_without_a_node_everything_is_a_miss(sglang: Any, node: Node) -> None:
    pool = Pool("page_first")
    backend = backend_of(sglang, node, pool)
    assert backend.batch_set_v1(["a"], pool.indices(0)) == [True]
    node.kill()
    assert backend.batch_get_v1(["a"], pool.indices(1)) == [False]
    assert backend.batch_set_v1(["b"], pool.indices(0)) == [False]
    assert backend.batch_exists(["a"]) == 0
    backend.close()


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"weights_digest": "ab"}, "weights_digest is 'ab'; allowed are 64"),
        ({"weights_digest": None}, "weights_digest is None"),
        ({"node": ""}, "node is ''; allowed is the path of a socket, of 1 to 107 bytes"),
        ({"node": "/x" * 60}, "node is '/x/x.*'; allowed is"),
        ({"node": 5}, "node is 5; allowed is"),
        ({"token_file": 5}, "token_file is 5; allowed is the path of a file"),
        ({"nod": "x"}, "'nod' is not known; allowed are node, token_file, weights_digest"),
    ],
)
def test_settings_that_are_wrong_are_named(sglang: Any, node: Node, extra: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        backend_of(sglang, node, Pool("page_first"), extra)
