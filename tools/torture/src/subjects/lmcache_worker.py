"""Torture worker for LMCache's LocalDiskBackend, driven through its Python API; protocol.rs says how.

What goes wrong below the backend is played by the `open` that its module sees: a raw file whose reads and
writes end as injected, with Python's own buffering on top, as in production. The backend is not changed.
"""

import asyncio
import builtins
import errno
import io
import json
import os
import random
import struct
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")
os.environ["OMP_NUM_THREADS"] = "1"

# Answers go where standard output went; whatever the libraries print goes to standard error.
ANSWERS = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)

import torch  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.pin_monitor import PinMonitor  # noqa: E402
from lmcache.v1.storage_backend import local_disk_backend  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # noqa: E402

torch.set_num_threads(1)
COMMANDS_MAX = 64
PAGE = 4096
ERRNOS = {"eio": errno.EIO, "enospc": errno.ENOSPC, "eintr": errno.EINTR}


class Faults:
    """Which calls end oddly."""

    def __init__(self) -> None:
        self.fault: dict[str, Any] = {"fault": "none"}
        self.random = random.Random(1)
        self.played = 0

    def strikes(self, fault: str) -> bool:
        """Whether this fault is injected and its turn has come."""
        strikes = self.fault["fault"] == fault and self.random.random() * 100 < self.fault["percent"]
        self.played += strikes
        return strikes

    def flip(self, value: bytes) -> bytes:
        """The value as its user finds it, or with a bit of it changed in memory since it was read."""
        if not value or not self.strikes("flip"):
            return value
        flipped = bytearray(value)
        flipped[self.random.randrange(len(value))] ^= 1 << self.random.randrange(8)
        return bytes(flipped)

    def astray(self, direction: str, wanted: int) -> slice | None:
        """The page of the next call that goes astray, if one does."""
        fault = self.fault
        if not wanted or fault.get("kind") != "misdirected" or not fault[direction] or not self.strikes("io"):
            return None
        first = self.random.randrange((wanted + PAGE - 1) // PAGE) * PAGE
        return slice(first, min(wanted, first + PAGE))

    def elsewhere(self, path: str, place: int) -> tuple[str, int]:
        """Another place than this one: the same page of another file, or the page beside it."""
        entries = sorted(os.scandir(os.path.dirname(path)), key=lambda entry: entry.name)
        others = [entry.path for entry in entries if entry.is_file() and entry.path != path]
        if others and self.random.random() < 0.5:
            return self.random.choice(others), place
        return path, place ^ PAGE

    def ending(self, direction: str, wanted: int) -> int:
        """How many of `wanted` bytes the next call moves; raises what it fails with."""
        fault = self.fault
        if fault["fault"] != "io" or fault["kind"] == "misdirected" or not fault[direction]:
            return wanted
        if not self.strikes("io"):
            return wanted
        kind = fault["kind"]
        if kind == "eintr":
            return wanted  # Python repeats interrupted calls below this level (PEP 475).
        if kind in ERRNOS:
            raise OSError(ERRNOS[kind], os.strerror(ERRNOS[kind]))
        return 0 if kind == "zero" else self.random.randrange(1, max(2, wanted))


FAULTS = Faults()


class FaultyFile(io.FileIO):
    """A raw file whose calls end as injected."""

    def readinto(self, buffer: Any) -> int | None:
        """Reads at most as much as the fault lets through."""
        view = memoryview(buffer).cast("B")
        at = self.tell()
        count = super().readinto(view[: FAULTS.ending("reads", len(view))])
        page = FAULTS.astray("reads", count or 0)
        if page is not None:
            path, place = FAULTS.elsewhere(str(self.name), at + page.start)
            with builtins.open(path, "rb") as other:
                found = os.pread(other.fileno(), page.stop - page.start, place)
            view[page] = found.ljust(page.stop - page.start, b"\0")
        return count

    def write(self, data: Any) -> int | None:
        """Writes at most as much as the fault lets through."""
        view = memoryview(data).cast("B")
        at = self.tell()
        page = FAULTS.astray("writes", len(view))
        if page is None:
            return super().write(view[: FAULTS.ending("writes", len(view))])
        path, place = FAULTS.elsewhere(str(self.name), at + page.start)
        missing = bytearray(view)
        missing[page] = bytes(page.stop - page.start)
        count = super().write(missing)
        with builtins.open(path, "r+b") as other:
            os.pwrite(other.fileno(), view[page], place)
        return count


def faulty_open(path: str, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """What the backend's module takes for `open`."""
    if mode == "rb":
        return io.BufferedReader(FaultyFile(path, "rb"))
    if mode == "wb":
        return io.BufferedWriter(FaultyFile(path, "wb"))
    return builtins.open(path, mode, *args, **kwargs)


local_disk_backend.open = faulty_open


class Store:
    """The backend, with the little of an engine that it needs."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.namespace, self.value_bytes = setup["namespace"], setup["value_bytes"]
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        gib = 2**30
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=False,
            max_local_cpu_size=setup["staging_bytes"] / gib,
            local_disk=setup["dir"],
            max_local_disk_size=setup["capacity_bytes"] / gib,
            lmcache_instance_id="torture",
        )
        PinMonitor.GetOrCreate(config)
        allocator = MixedMemoryAllocator(setup["staging_bytes"], align_bytes=4096)
        self.memory = LocalCPUBackend(config, memory_allocator=allocator, dst_device="cpu")
        self.disk = LocalDiskBackend(config, self.loop, self.memory, dst_device="cpu")

    def key(self, number: int) -> CacheEngineKey:
        """LMCache's name for a value."""
        return CacheEngineKey(
            model_name=self.namespace, world_size=1, worker_id=0, chunk_hash=number, dtype=torch.uint8
        )

    def put(self, number: int, value: bytes) -> dict[str, Any]:
        """Stores a value and waits until it can be found, or LMCache no longer tries."""
        held = self.memory.allocate(torch.Size([len(value)]), torch.uint8, MemoryFormat.KV_2LTD)
        if held is None:
            return {"is": "refused", "reason": "no staging memory"}
        held.tensor.view(-1).copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        self.disk.submit_put_task(self.key(number), held)
        held.ref_count_down()
        while not self.disk.contains(self.key(number)):
            if not self.disk.exists_in_put_tasks(self.key(number)):
                if self.disk.contains(self.key(number)):
                    break
                return {"is": "refused", "reason": "not stored"}
            time.sleep(0.0005)
        return {"is": "done"}

    def take(self, held: Any) -> bytes:
        """The bytes of a memory object, which is given back."""
        value = held.tensor.view(-1).numpy().tobytes()
        held.ref_count_down()
        return FAULTS.flip(value)

    def get(self, number: int) -> bytes | None:
        """One value, as a blocking lookup reads it."""
        held = self.disk.get_blocking(self.key(number))
        return None if held is None else self.take(held)

    def get_many(self, numbers: list[int]) -> list[bytes | None]:
        """Several values with one asynchronous call, as LMCache's engine prefetches them: keys it has."""
        present = [number for number in numbers if self.disk.contains(self.key(number))]
        load = self.disk.batched_get_non_blocking("torture", [self.key(number) for number in present])
        held = asyncio.run_coroutine_threadsafe(load, self.loop).result()
        values = {}
        for number, one in zip(present, held, strict=False):
            one.unpin()
            values[number] = self.take(one)
        return [values.get(number) for number in numbers]


class Worker:
    """Carries out commands, up to 64 at a time."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self.lock = threading.Lock()

    def carry_out(self, command: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """The answer to a command, and its payload."""
        what = command["do"]
        if what == "inject":
            if command["fault"] == "power_loss":
                return {"is": "unsupported", "reason": "LMCache keeps nothing across a restart"}, b""
            if command["fault"] == "torn":
                return {"is": "unsupported", "reason": "it has no ring"}, b""
            FAULTS.fault = command
            return {"is": "done"}, b""
        if what == "open":
            self.store = Store(command)
            return {"is": "done"}, b""
        store = self.store
        assert store is not None, "not open"
        if what == "put":
            return store.put(command["key"], payload), b""
        if what == "get":
            value = store.get(command["key"])
            return ({"is": "miss"}, b"") if value is None else ({"is": "hit"}, value)
        if what == "get_many":
            values = store.get_many(command["keys"])
            lengths = [None if value is None else len(value) for value in values]
            return {"is": "many", "lengths": lengths}, b"".join(value for value in values if value)
        if what == "delete":
            store.disk.remove(store.key(command["key"]))
        elif what == "stat":
            return {"is": "stat", "faults": None, "played": FAULTS.played}, b""
        elif what == "close":
            store.disk.close()
        # A flush: LMCache has none. Puts are answered when they can be found.
        return {"is": "done"}, b""

    def answer(self, command: dict[str, Any], payload: bytes) -> None:
        """Carries out a command and writes its answer; an exception is one, too."""
        try:
            header, value = self.carry_out(command, payload)
        except BaseException as error:
            traceback.print_exc()
            header, value = {"is": "error", "reason": f"{type(error).__name__}: {error}"[:300]}, b""
        text = json.dumps({"id": command["id"], "bytes": len(value), **header}).encode()
        with self.lock:
            ANSWERS.write(struct.pack("<I", len(text)) + text + value)
            ANSWERS.flush()


def main() -> None:
    """Serves until `close` or the end of the commands."""
    worker, commands = Worker(), sys.stdin.buffer
    pool = ThreadPoolExecutor(COMMANDS_MAX)
    while length := commands.read(4):
        command = json.loads(commands.read(struct.unpack("<I", length)[0]))
        payload = commands.read(command["bytes"])
        if command["do"] == "close":
            worker.answer(command, payload)
            break
        pool.submit(worker.answer, command, payload)
    os._exit(0)


main()
