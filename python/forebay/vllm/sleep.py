"""vLLM's sleep mode through Forebay: weights go to pinned memory and come back over every path.

It works on the allocations of vLLM's `CuMemAllocator` and their tags. What each level keeps is
vLLM's rule. Three things differ from the allocator's own `sleep` and `wake_up`: pinned memory is
kept from one sleep to the next and can be pinned ahead (`warm`), all allocations are copied in
batches, and an operation that fails leaves everything as it was.
"""

import functools
import gc
import importlib
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.cumem import create_and_map, unmap_and_release
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.platforms import current_platform

from forebay.errors import ForebayError
from forebay.vllm._sleep_buffers import SleepBuffers

if TYPE_CHECKING:
    from forebay.cuda import Copier, PinnedPool

# Below "vllm", so that its lines look like vLLM's own.
logger = logging.getLogger("vllm.forebay.sleep")

# vLLM's `AllocationData`: handle (device, bytes, address, ...), tag, is_asleep.
Allocation: TypeAlias = Any
KEEP_KV = "FOREBAY_SLEEP_KEEP_KV"
# The socket of the node's relays. If it is set, the other GPUs are the node's.
RELAYS = "FOREBAY_RELAYS"
GIB = 1 << 30
# Mapped before the first copy: large enough for the full rate of every path.
FIRST_BATCH_BYTES = GIB
# Mapping holds the interpreter's lock. The copying thread asks for it after this time, not 5 ms.
SWITCH_INTERVAL_S = 1e-4
# A wake-up that names tags may leave these asleep, and brings back all others.
DEFERRABLE = frozenset(("weights", "kv_cache"))


class SleepError(ForebayError):
    """The engine could not fall asleep or wake up. Nothing is lost; the call may be repeated."""


def keeps_kv() -> bool:
    """Whether KV survives a sleep at level 1. vLLM gives a backend no settings."""
    value = os.environ.get(KEEP_KV, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{KEEP_KV} is {value!r}; allowed are 0 and 1")
    return value == "1"


def dropped_tags(level: int, keep_kv: bool) -> frozenset[str]:
    """The tags whose contents need not survive a sleep. Unknown tags do: they may be state."""
    if level not in (1, 2):
        raise ValueError(f"sleep level is {level}; allowed are 1 and 2")
    scratch = frozenset(("workspace",))
    if level == 2:  # New weights will come, and KV belongs to the old ones.
        return scratch | DEFERRABLE
    return scratch if keep_kv else scratch | {"kv_cache"}


@functools.cache
def _pool_and_copier() -> "tuple[PinnedPool, Copier]":
    """The pool and the copier of this process. The GPU's memory is the pool's limit."""
    cuda = importlib.import_module("forebay.cuda")
    limit_bytes = torch.cuda.mem_get_info()[1]
    gpu = torch.cuda.current_device()
    if os.environ.get(RELAYS):  # No context of this process on the other GPUs.
        return cuda.PinnedPool(limit_bytes, shared=True, device=gpu), cuda.Copier([gpu])
    return cuda.PinnedPool(limit_bytes, device=gpu), cuda.Copier()


def warm() -> None:
    """Begins to pin what a sleep at level 1 would need now, in the background."""
    dropped = dropped_tags(1, keeps_kv())
    allocations = get_mem_allocator_instance().pointer_to_data.values()
    _pool_and_copier()[0].warm(_bytes(data for data in allocations if data.tag not in dropped))


class ForebayBackend(CuMemBackend):  # type: ignore[misc]  # vLLM is not there when types are checked
    """vLLM's backend `forebay`. It frees and restores the memory of `CuMemAllocator`."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: dict[int, tuple[Allocation, SleepBuffers]] = {}

    @classmethod
    def is_supported(cls) -> bool:
        return bool(current_platform.is_cuda())

    @classmethod
    def keeps_kv(cls, level: int) -> bool:
        """Whether KV survives a sleep at that level. A connector asks."""
        return "kv_cache" not in dropped_tags(level, keeps_kv())

    def suspend(self, level: int = 1) -> None:
        """Frees all memory of the allocator. What the level keeps is first copied out in one batch.

        If copying fails, nothing was freed and the engine is as awake as before.
        """
        begun = time.perf_counter()
        dropped = dropped_tags(level, keeps_kv())
        awake = [data for data in self._allocations().values() if not data.is_asleep]
        torch.cuda.synchronize()
        moved = self._move_out([data for data in awake if data.tag not in dropped])
        self._state = "SUSPENDED"
        for data in awake:
            # Even if unmapping fails: then only the buffers are certain to have the contents.
            data.is_asleep = True
            unmap_and_release(data.handle)
        # Memory that torch keeps for tensors that are gone is freed too.
        gc.collect()
        torch.cuda.empty_cache()
        freed = _bytes(awake)
        took = time.perf_counter() - begun
        logger.info("sleep freed %.2f GiB and kept %.2f GiB of it: %.3f s", freed / GIB, moved / GIB, took)

    def resume(self, tags: list[str] | None = None) -> None:
        """Maps memory again, all of it or that of some tags, and restores what was kept.

        If it fails, everything that slept is still asleep and nothing that was kept is lost.
        """
        begun = time.perf_counter()
        due = [
            data
            for data in self._allocations().values()
            if data.is_asleep and (tags is None or data.tag in tags or data.tag not in DEFERRABLE)
        ]
        self._state = "RESUMING"
        try:
            moved = self._bring_back(due)
        finally:
            asleep = any(data.is_asleep for data in self._allocations().values())
            self._state = "SUSPENDED" if asleep else "RUNNING"
        mapped = _bytes(due)
        took = time.perf_counter() - begun
        logger.info("wake-up mapped %.2f GiB and moved %.2f GiB: %.3f s", mapped / GIB, moved / GIB, took)

    def _allocations(self) -> dict[int, Allocation]:
        """vLLM's allocations by address. Releases what was kept of others, or of those awake."""
        current: dict[int, Allocation] = get_mem_allocator_instance().pointer_to_data
        for address, (data, _) in list(self._saved.items()):
            if not data.is_asleep or current.get(address) is not data:
                self._release(address)
        return current

    def _release(self, address: int) -> None:
        _, buffers = self._saved.pop(address)
        buffers.release(address)

    def _move_out(self, kept: list[Allocation]) -> int:
        """Copies allocations to new buffers and returns how many bytes that is."""
        if not kept:
            return 0
        extents = {data.handle[2]: data.handle[1] for data in kept}
        try:
            buffers = SleepBuffers.copy_out(*_pool_and_copier(), extents)
        except Exception as error:
            raise SleepError(
                f"cannot fall asleep: {len(kept)} allocations of {_bytes(kept)} bytes could not be copied to "
                f"pinned memory ({error}); all memory is as it was"
            ) from error
        self._saved.update({data.handle[2]: (data, buffers) for data in kept})
        return _bytes(kept)

    def _bring_back(self, due: list[Allocation]) -> int:
        """Maps allocations, restores what was kept of them, and returns how many bytes that is."""
        kept = [data for data in due if data.handle[2] in self._saved]
        empty = [data for data in due if data.handle[2] not in self._saved]
        mapped: list[Allocation] = []
        try:
            self._map_and_copy(kept, empty, mapped)
        except Exception as error:
            for data in mapped:
                with suppress(RuntimeError):  # The first error is the one to report.
                    unmap_and_release(data.handle)
            raise SleepError(
                f"cannot wake up: {len(due)} allocations of {_bytes(due)} bytes could not be mapped and "
                f"filled ({error}); they are still asleep and their contents are kept"
            ) from error
        for data in due:
            data.is_asleep = False
        for data in kept:
            self._release(data.handle[2])
        return _bytes(kept)

    def _map_and_copy(
        self, kept: list[Allocation], empty: list[Allocation], mapped: list[Allocation]
    ) -> None:
        """A second thread copies while this one maps."""
        copies: list[Future[None]] = []
        # Even after an error the copies are waited for: their memory must stay mapped.
        with _switching_sooner(), ThreadPoolExecutor(1, thread_name_prefix="forebay-wake") as copying:
            for batch in _batches(kept):
                _map(batch, mapped)
                saved = [(data.handle[2], self._saved[data.handle[2]][1]) for data in batch]
                pairs = [copy for address, buffers in saved for copy in buffers.copies_back(address)]
                copies.append(copying.submit(_pool_and_copier()[1].copy_batch_and_wait, pairs))
            _map(empty, mapped)
        for copy in copies:
            copy.result()


def _map(allocations: Iterable[Allocation], mapped: list[Allocation]) -> None:
    """Maps allocations in turn. After an error `mapped` has those that are."""
    for data in allocations:
        create_and_map(data.handle)
        mapped.append(data)


def _bytes(allocations: Iterable[Allocation]) -> int:
    return sum(data.handle[1] for data in allocations)


def _batches(allocations: Iterable[Allocation]) -> Iterator[list[Allocation]]:
    """Batches, each twice the one before: mapping is faster than copying and stays ahead."""
    batch: list[Allocation] = []
    batch_bytes, wanted_bytes = 0, FIRST_BATCH_BYTES
    for data in allocations:
        batch.append(data)
        batch_bytes += data.handle[1]
        if batch_bytes >= wanted_bytes:
            yield batch
            batch, batch_bytes, wanted_bytes = [], 0, 2 * wanted_bytes
    if batch:
        yield batch


@contextmanager
def _switching_sooner() -> Iterator[None]:
    """Has the interpreter switch between threads sooner meanwhile."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
