#!/usr/bin/env python3
"""Torture worker for vLLM's tier `fs` of its OffloadingConnector, by its Python API; worker.py is the loop.

What the tiering manager does for the tier is done here: slots of the primary tier's memory are handed out, a
key is looked up before it is loaded, and jobs are waited for. The tier has no deletion and no limit for its
disk, which vLLM leaves to whoever runs it, so that `delete` removes the block's file.
"""

import hashlib
import importlib.util
import itertools
import mmap
import os
import queue
import sys
import threading
import time
import types
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

# The tier is Python and a small C library. What an engine brings along with it takes ten seconds to
# load, and is left out: the code of the packages that the tier lies in, and torch, which the tier
# only names in types.
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
MAPPING = f"{CONNECTOR}.offloading.canonical_mapping"


def leave_out(name: str, **contents: Any) -> None:
    """Has a module that is not loaded, but through which what lies in it is found."""
    module = types.ModuleType(name)
    where = importlib.util.find_spec(name)
    assert where is not None, f"{name} is not installed"
    module.__path__ = list(where.submodule_search_locations or ())
    vars(module).update(contents)
    sys.modules[name] = module


for package in itertools.accumulate(CONNECTOR.split("."), "{}.{}".format):
    leave_out(package)
leave_out("torch", Tensor=object, dtype=object, device=object)
leave_out(f"{CONNECTOR}.offloading")
sys.modules[MAPPING] = types.ModuleType(MAPPING)
sys.modules[MAPPING].canonical_format_id = None

import numpy  # noqa: E402
import worker  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager  # noqa: E402

STEP_S = 0.0005


class Spec(OffloadingSpec):
    """What the tier asks of the connector's configuration: one GPU, one group, a block a file."""

    get_manager = get_worker = None

    def __init__(self, model: str, block_bytes: int) -> None:
        parallel = OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        )
        super().__init__(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
                worker_kv_bytes_per_block=block_bytes,
                enable_kv_cache_events=False,
                extra_config={},
                engine_id="torture",
                model=OffloadingModelConfig(name=model, dtype="bfloat16"),
                cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
                parallel=parallel,
            )
        )


class FsTier:
    """The tier, and the memory of the primary tier that it moves blocks from and to."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.block_bytes = setup["value_bytes"]
        slots = setup["staging_bytes"] // self.block_bytes
        self.memory = memoryview(mmap.mmap(-1, slots * self.block_bytes))
        self.slots: queue.Queue[int] = queue.Queue()
        for slot in range(slots):
            self.slots.put(slot)
        # The tiering manager calls its tiers under a lock.
        self.lock = threading.Lock()
        self.job_ids, self.request_ids = itertools.count(), itertools.count()
        self.ended: dict[int, JobResult] = {}
        self.tier = FileSystemTierManager(
            Spec(setup["namespace"], self.block_bytes),
            self.memory.cast("B", (slots, self.block_bytes)),
            "fs",
            root_dir=setup["dir"],
        )

    def block(self, slot: int) -> memoryview:
        """The memory of a slot."""
        return self.memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def transfer(
        self, keys: list[OffloadKey], slots: list[int], request: ReqContext, load: bool
    ) -> JobResult:
        """Carries out a job of the tier."""
        job = TransferJob(next(self.job_ids), keys, numpy.array(slots), load, request)
        with self.lock:
            (self.tier.submit_load if load else self.tier.submit_store)(job)
        while True:
            with self.lock:
                self.ended.update((result.job_id, result) for result in self.tier.get_finished_jobs())
                if job.job_id in self.ended:
                    return self.ended.pop(job.job_id)
            time.sleep(STEP_S)

    def is_there(self, key: OffloadKey, request: ReqContext) -> bool:
        """Whether the tier says that it has a block."""
        while True:
            with self.lock:
                found = self.tier.lookup(key, request)
                self.tier.on_schedule_end(ScheduleEndContext((), ()))
            if found is not LookupResult.RETRY:
                return found is LookupResult.HIT
            time.sleep(STEP_S)

    def put(self, key: int, value: bytes) -> None:
        """Stores a block and waits until its job has ended."""
        slot = self.slots.get()
        try:
            self.block(slot)[:] = value
            stored = self.transfer([offload_key(key)], [slot], self.request(), load=False)
        finally:
            self.slots.put(slot)
        if not stored.success:
            raise worker.Refused("the store job failed")

    def get_many(self, keys: list[int]) -> list[bytes | None]:
        """Loads the blocks that the tier has with one job, as far as memory is free."""
        request, values, taken = self.request(), dict[int, bytes](), dict[int, int]()
        try:
            for key in keys:
                if not self.is_there(offload_key(key), request):
                    continue
                try:
                    taken[key] = self.slots.get(block=not taken)
                except queue.Empty:
                    break
            if taken:
                wanted = {offload_key(key): key for key in taken}
                ended = self.transfer(list(wanted), list(taken.values()), request, load=True)
                for loaded in wanted if ended.success else ended.successful_keys or ():
                    values[wanted[loaded]] = bytes(self.block(taken[wanted[loaded]]))
        finally:
            for slot in taken.values():
                self.slots.put(slot)
            with self.lock:
                self.tier.on_request_finished(request)
        return [values.get(key) for key in keys]

    def delete(self, key: int) -> None:
        """Removes the block's file, as a job that cleans the directory would."""
        try:
            os.remove(self.tier.file_mapper.get_file_name(offload_key(key)))
        except FileNotFoundError:
            pass

    def flush(self) -> None:
        """Waits for all jobs."""
        with self.lock:
            self.tier.drain_jobs()

    def close(self) -> None:
        """Shuts the tier down."""
        with self.lock:
            self.tier.shutdown()

    def request(self) -> ReqContext:
        """A request of its own, since a tier keeps what it knows of a key as long as a request lasts."""
        return ReqContext(str(next(self.request_ids)))


def offload_key(key: int) -> OffloadKey:
    """vLLM's name for a value: a hash and the number of its group."""
    return make_offload_key(hashlib.sha256(str(key).encode()).digest(), 0)


if __name__ == "__main__":
    worker.serve(FsTier)
