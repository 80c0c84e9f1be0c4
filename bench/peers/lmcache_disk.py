#!/usr/bin/env python3
"""LMCache's local disk backend, driven through its Python API, as a peer of `forebay bench disk`.

For each line on standard input it stores objects in a new directory, reads all of them back in batches and
in another order, and answers with one line of JSON. The benchmark thereby decides who works when. It knows
LMCache only; what the figures are compared with is the benchmark's.

Choices in the peer's favour: direct I/O with `--direct`, no directory is deleted before the end (creating
files beside deleted ones is slower on ext4), filling objects is not timed, and a store has ended when the
index shows all objects, although none of them is durable.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# Before torch is imported: its helpers would otherwise spin on processors that are being measured.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import lmcache  # noqa: E402
import torch  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.pin_monitor import PinMonitor  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # noqa: E402

MIB = 1 << 20
PUTS_UNDER_WAY = 64
POLL_S = 0.0005


@dataclass
class Work:
    """What a run moves."""

    object_bytes: int
    objects: int
    batch: int
    direct: bool

    @property
    def mib(self) -> float:
        """Bytes of a run, in MiB."""
        return self.object_bytes * self.objects / MIB


class Backend:
    """A local disk backend on a directory, with memory for all objects of a run."""

    def __init__(self, directory: Path, work: Work) -> None:
        directory.mkdir(parents=True)
        self.work = work
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        pool_bytes = 2 * work.object_bytes * work.objects + 256 * MIB
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=False,
            max_local_cpu_size=pool_bytes / (1 << 30),
            local_disk=str(directory),
            max_local_disk_size=4 * work.mib / 1024 + 1,
            cache_policy="LRU",
            lmcache_instance_id="bench",
            extra_config={"use_odirect": work.direct, "disk_io_threads": 4},
        )
        PinMonitor.GetOrCreate(config)
        self.memory = MixedMemoryAllocator(pool_bytes, align_bytes=4096)
        self.cpu = LocalCPUBackend(config, memory_allocator=self.memory, dst_device="cpu")
        self.disk = LocalDiskBackend(config, self.loop, self.cpu, dst_device="cpu")

    def key(self, number: int) -> CacheEngineKey:
        """Names an object."""
        return CacheEngineKey(model_name="m", world_size=1, worker_id=0, chunk_hash=number, dtype=torch.uint8)

    def filled(self) -> list:
        """One object in memory for each number, each full of bytes that say which."""
        shape = torch.Size([self.work.object_bytes])
        objects = []
        for number in range(self.work.objects):
            memory = self.cpu.allocate(shape, torch.uint8, MemoryFormat.KV_2LTD, busy_loop=True)
            memory.tensor.view(-1).fill_(number % 251)
            objects.append(memory)
        return objects

    def store(self, objects: list) -> None:
        """Puts all objects, and waits until no put is under way."""
        under_way = self.disk.disk_worker.put_tasks
        for number, memory in enumerate(objects):
            while len(under_way) >= PUTS_UNDER_WAY:
                time.sleep(POLL_S)
            self.disk.submit_put_task(self.key(number), memory)
            memory.ref_count_down()
        while self.disk.disk_worker.put_tasks:
            time.sleep(POLL_S)

    def retrieve(self, order: list[int]) -> int:
        """Gets all objects in batches; returns how many did not come or begin with a wrong byte."""
        wrong = 0
        for first in range(0, len(order), self.work.batch):
            numbers = order[first : first + self.work.batch]
            found = self.disk.batched_get_blocking([self.key(number) for number in numbers])
            for number, memory in zip(numbers, found, strict=True):
                if memory is None or int(memory.tensor.view(-1)[0]) != number % 251:
                    wrong += 1
                if memory is not None:
                    memory.ref_count_down()
        return wrong

    def close(self) -> None:
        """Ends its threads and gives its memory back."""
        self.disk.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.memory.close()


def leave_page_cache(directory: Path) -> None:
    """Makes the files durable and takes them out of the page cache."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(work: Work, part: Callable[[], object]) -> tuple[float, float]:
    """MiB/s and microseconds of CPU per object."""
    begin, cpu_before = time.perf_counter(), time.process_time()
    part()
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu_before
    return work.mib / wall, cpu * 1e6 / work.objects


def run(directory: Path, work: Work) -> dict[str, float]:
    """One run in a new directory."""
    backend = Backend(directory, work)
    store_mib_per_s, store_cpu_us = timed(work, partial(backend.store, backend.filled()))
    leave_page_cache(directory)
    order = list(range(work.objects))
    random.shuffle(order)
    wrong: list[int] = []
    retrieve_mib_per_s, retrieve_cpu_us = timed(work, lambda: wrong.append(backend.retrieve(order)))
    backend.close()
    return {
        "store_mib_per_s": store_mib_per_s,
        "store_cpu_us": store_cpu_us,
        "retrieve_mib_per_s": retrieve_mib_per_s,
        "retrieve_cpu_us": retrieve_cpu_us,
        "wrong": wrong[0],
    }


def main() -> None:
    """Says its version, then answers each line with a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="a new directory on the disk under test")
    parser.add_argument("--object-bytes", type=int, required=True)
    parser.add_argument("--objects", type=int, required=True)
    parser.add_argument("--batch", type=int, default=64, help="objects of a get")
    parser.add_argument("--direct", action="store_true", help="direct I/O instead of the page cache")
    args = parser.parse_args()
    torch.set_num_threads(1)
    work = Work(args.object_bytes, args.objects, args.batch, args.direct)
    print(json.dumps({"version": lmcache.__version__}), flush=True)
    try:
        for number, _ in enumerate(sys.stdin):
            print(json.dumps(run(args.dir / str(number), work)), flush=True)
    finally:
        shutil.rmtree(args.dir, ignore_errors=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Its threads do not all end by themselves.
    os._exit(0)
