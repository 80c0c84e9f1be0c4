"""A plug-in of SGLang's that lets its HiCache work where host and device are the memory of one CPU.

SGLang's HiCache takes the copies between host and device from its CUDA kernels. Here they are three
functions in torch, for the layouts of `--hicache-io-backend direct`, and nothing asks CUDA to pin memory.
All else of HiCache is SGLang's own. It finds `register` by the entry point `sglang.srt.plugins`.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

# torch's type, which is not there when types are checked.
Tensor: TypeAlias = Any

HOST_POOL = "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__"


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copies tokens of each layer. Both sides keep the tokens of a layer one after another."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies one layer of pages of the host pool to tokens of the device's pool."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copies all layers of tokens of the device's pool, keys and then values, to pages of the host pool."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        half, layer = divmod(number, layers)
        dst_ptrs[half][pages, layer] = source[src_indices].unflatten(0, (-1, page_size))


def unpinned(*arguments: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a host pool that is not pinned."""
    return arguments, named | {"pin_memory": False}


def register() -> None:
    """SGLang calls it once in each of its processes."""
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HOST_POOL, unpinned, HookType.BEFORE)
    for copy in (
        transfer_kv_direct,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
    ):
        assert not hasattr(mha, copy.__name__), "this SGLang has one for the CPU"
        setattr(mha, copy.__name__, copy)
