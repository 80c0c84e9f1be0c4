"""A storage backend for SGLang's HiCache: the node of the host keeps pages of its host memory.

It says which page of a host pool is where; `forebay.pages` stores and loads it. SGLang calls from
threads of its own, which may wait. It is chosen by `--hicache-storage-backend dynamic` with this
module's path and `ForebayStorage` in the extra configuration. With `"interface_v1": 1` pages go to
and from the host pool itself.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from forebay._forebay import Node
from forebay.errors import InvalidError, NotFoundError
from forebay.pages import Extent, Pages, check_digest, check_socket, namespace, read_secret

logger = logging.getLogger("forebay.sglang")

# SGLang's and torch's types, which are not there when types are checked.
Config: TypeAlias = Any
HostPool: TypeAlias = Any
Tensor: TypeAlias = Any

SOCKET = "/run/forebay/node.sock"
# Keys of the extra configuration that are SGLang's own.
NOT_OURS = frozenset(("backend_name", "module_path", "class_name", "interface_v1"))
OURS = frozenset(("node", "token_file", "weights_digest"))


def settings_of(extra: dict[str, Any] | None) -> dict[str, Any]:
    """Our settings in the extra configuration. They must name the weights: SGLang does not."""
    given = {name: value for name, value in (extra or {}).items() if name not in NOT_OURS}
    unknown = sorted(given.keys() - OURS)
    if unknown:
        raise InvalidError(
            f"extra config: {unknown[0]!r} is not known; allowed are {', '.join(sorted(OURS))}"
        )
    check_digest(given.get("weights_digest"))
    return given


def shard_of(config: Config) -> list[int]:
    """Which part of a page a rank has. With MLA only context parallelism makes parts."""
    tensor = [] if config.is_mla_model and config.dcp_size == 1 else [config.tp_rank, config.tp_size]
    if config.is_mla_model and config.dcp_size > 1:
        tensor = [config.tp_size]
    context = [config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size]
    return [*tensor, config.pp_rank, config.pp_size, *context]


def dtype_of(pool: HostPool) -> str:
    """The format of a pool's elements. Of a pool of `uint8` the server knows the format."""
    if str(pool.dtype) != "torch.uint8":
        return str(pool.dtype)
    try:
        from sglang.srt.runtime_context import get_model

        return f"{pool.dtype} of {get_model().kv_cache_dtype}"
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidError(
            f"the host pool holds {pool.dtype}, and SGLang does not say its kv_cache_dtype ({error})"
        ) from error


def facts(config: Config, pool: HostPool, weights_digest: str) -> dict[str, object]:
    """What a page's bytes depend on besides tokens, which its key covers.

    SGLang's version decides how a host pool lays out a page.
    """
    return {
        "engine": f"sglang {sglang.__version__}",
        "weights": check_digest(weights_digest),
        "dtype": dtype_of(pool),
        "layout": str(pool.layout),
        "page_tokens": pool.page_size,
        "token_bytes": pool.get_size_per_token(),
        "shard": shard_of(config),
    }


def secret_of(config: Config) -> bytes:
    """What names pages after a `clear`. Ranks with the same pages share it.

    They agree on it now, when SGLang has all of them start together.
    """
    drawn = os.urandom(32)
    if not config.is_mla_model or config.tp_size == 1:
        return drawn
    from sglang.srt.runtime_context import get_parallel

    return bytes(get_parallel().attn_tp_group.broadcast_object(drawn))


class ForebayStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there when types are checked
    """The backend. Its settings are in the extra configuration.

    `weights_digest` stands for the weights (64 hexadecimal digits), `node` is the node's socket,
    and `token_file` holds the secret that the node asks for.
    """

    def __init__(self, storage_config: Config, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._settings = settings_of(storage_config.extra_config)
        token = read_secret("token_file", self._settings.get("token_file"))
        self._socket = check_socket(self._settings.get("node", SOCKET))
        self._node = Node(self._socket, token=token, name="sglang hicache", wait=True)

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Takes in where pages lie. SGLang calls this first, once."""
        if isinstance(buffers := mem_pool_host.kv_buffer, list | tuple):
            raise InvalidError(f"the host pool is in {len(buffers)} buffers; allowed is one")
        super().register_mem_pool_host(mem_pool_host)
        known = facts(self._config, mem_pool_host, self._settings["weights_digest"])
        self._pages = Pages(self._node, namespace(known), secret_of(self._config))
        self._pool = self._node.register_memory(_extent_of(mem_pool_host.kv_buffer))
        logger.info(
            "HiCache on the node at %s: %d bytes of host pool, %s", self._socket, self._pool.bytes, known
        )

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """Refuses host pools other than that of KV, which need SGLang's second interface."""
        if host_pool is not self.mem_pool_host:
            raise InvalidError(f"a host pool is {host_pool_name!r}; allowed is that of KV alone")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._pages.prefix(key.encode() for key in keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Loads pages into the host pool; for each whether that worked."""
        return self._pages.load([key.encode() for key in keys], self._places(keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages of the host pool; for each whether the node has it now."""
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        return self._pages.store([key.encode() for key in keys], self._places(keys, host_indices))

    def batch_get(
        self, keys: list[str], target_locations: Sequence[Tensor] | None = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        targets = [target for target in target_locations or ()]
        if len(targets) != len(keys):
            return [None] * len(keys)
        with self._lent(targets) as places:
            good = self._pages.load([key.encode() for key in keys], places)
        return [target if is_good else None for target, is_good in zip(targets, good, strict=True)]

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        if not self._config.is_storage_writer:
            return True
        sources = [value.contiguous() for value in values or ()]
        if len(sources) != len(keys):
            return False
        with self._lent(sources) as places:
            return all(self._pages.store([key.encode() for key in keys], places))

    def get(self, key: str, target_location: Tensor = None, target_sizes: Any = None) -> Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(
        self, key: str, value: Tensor = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], None if value is None else [value])

    def clear(self) -> bool:
        """From now on this engine finds no page of before. Others still do."""
        self._pages.forget()
        logger.info("HiCache was cleared: pages that were stored until now are not found any more")
        return True

    def close(self) -> None:
        """When this returns, nothing touches the host pool any more."""
        self._node.close()

    def _places(self, keys: Sequence[str], host_indices: Tensor) -> list[list[Extent]]:
        """For each page its extents in the host pool."""
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        if isinstance(sizes, int):
            sizes = [sizes] * len(addresses)
        extents = list(zip(addresses, sizes, strict=True))
        each, rest = divmod(len(extents), max(1, len(keys)))
        if rest:
            raise InvalidError(
                f"{len(keys)} pages have {len(extents)} pieces; allowed is the same number for each"
            )
        return [extents[at : at + each] for at in range(0, len(extents), each or 1)]

    @contextmanager
    def _lent(self, tensors: Sequence[Tensor]) -> Iterator[list[list[Extent]]]:
        """Registers tensors with the node's client while pages go to or from them."""
        extents = [_extent_of(tensor) for tensor in tensors]
        pool, known = self._pool, []
        try:
            for address, length in extents:
                # A page may be a view of the host pool.
                if not pool.address <= address < pool.address + pool.bytes:
                    known.append(self._node.register_memory((address, length)))
            yield [[extent] for extent in extents]
        finally:
            for memory in known:
                self._node.deregister_memory(memory)


def _extent_of(tensor: Tensor) -> Extent:
    if not tensor.is_contiguous():
        raise NotFoundError("a page or a host pool is not contiguous in memory")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
