#!/usr/bin/env python3
"""The KV cache workload of MLPerf Storage v3, with Forebay's node as the storage tier, on CPUs.

    FOREBAY=PROGRAM bench/mlperf_kv.py --mlperf FOLDER --dir FOLDER [--rounds 3] [--json FILE]

FOLDER has MLPerf's package `kv_cache`, unchanged; numpy is all that it needs. No tier is above storage, as
its authors recommend for the most stress. Three back ends take turns:

* `files`: MLPerf's own, a file for each entry: fsync when written, out of the page cache before it is read;
* `raw`: the ceiling: one file, written before, direct I/O in pieces of 512 KiB, which are the quickest here
  of 128 KiB to 64 MiB, fdatasync when written;
* `forebay`: a node with a log on the same disk. An entry is written when its chunks have left memory for the
  log, and is read from there: after each read it leaves memory again.

Each is checked alike, outside of the measured time: one word of each page of every entry that is read, and
what failed is counted, since the workload takes a failed read for a fast one. At the end the node is killed
and started again, and all bytes of what it has are compared. Knows MLPerf's package and the client of a node.
"""

import argparse
import contextlib
import gc
import hashlib
import io
import json
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
# A checkout has the extension only if it was built there: an installed package comes first.
sys.path += [str(ROOT / "tests"), str(ROOT / "python")]

from processes import kill, start_node  # noqa: E402
from session_prefetch import cpu_s  # noqa: E402
from vllm_engine import results, row  # noqa: E402

import forebay  # noqa: E402

WAYS = ("forebay", "raw", "files")
ASKED_OF_RAW = 0.9
MIB, GIB, PAGE = 1 << 20, 1 << 30, 4096
CHUNK = 2 * MIB
IN_FLIGHT = 16  # Chunks that a thread stores or loads at a time.
UNWRITTEN = 64  # Chunks of a thread that are stored and not in the log: the node's memory has room for all.
PIECE = 512 << 10  # Of direct I/O.
POLL_S = 0.001
LIMIT_S = 10.0
COMMIT_S = 0.1  # The node commits every 20 ms.
CONFIG = """socket = '{folder}/node.sock'
write_back = 'all'
[memory]
size = '1GiB'
chunk_size = '2MiB'
largest_chunk = '2MiB'
overcommit = true
[[ssd]]
path = '{folder}/log'
size = '{log}'
"""

Bytes = npt.NDArray[np.uint8]
Part = tuple[bytes, tuple[int, int, int]]  # A chunk's name, and its piece of memory.


class Storage(Protocol):
    """What keeps entries. Times are in seconds: in all, and of that with the device."""

    def write(self, key: str, entry: Bytes) -> tuple[float, float]: ...
    def read(self, key: str) -> tuple[Bytes, float, float]: ...
    def delete(self, key: str) -> None: ...


class Scratch(threading.local):
    """A thread's buffer: what it has read lies there until it reads again."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, PAGE)
        self.memory: forebay.NodeMemory | None = None

    def of(self, size: int) -> mmap.mmap:
        """It, with room for that many bytes."""
        if len(self.map) < size:
            self.map = mmap.mmap(-1, -(-size // GIB) * GIB)
            self.map.madvise(mmap.MADV_HUGEPAGE)
        return self.map


class Raw:
    """One file, of which entries take extents. It was written before, so no write changes its metadata."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.file = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        zeros = mmap.mmap(-1, 64 * MIB)
        for at in range(0, capacity, len(zeros)):
            os.pwrite(self.file, zeros, at)
        os.fsync(self.file)
        self.free = [(0, capacity)]
        self.extents: dict[str, tuple[int, int]] = {}
        self.lock, self.scratch = threading.Lock(), Scratch()

    def take(self, size: int) -> int:
        """The first free extent that is large enough."""
        with self.lock:
            at = next(number for number, (_, length) in enumerate(self.free) if length >= size)
            offset, length = self.free[at]
            self.free[at : at + 1] = [(offset + size, length - size)] if length > size else []
            return offset

    def write(self, key: str, entry: Bytes) -> tuple[float, float]:
        begun = time.perf_counter()
        whole = -(-entry.nbytes // PAGE) * PAGE
        buffer, offset = self.scratch.of(whole), self.take(whole)
        buffer[: entry.nbytes] = memoryview(entry)
        copied = time.perf_counter()
        self.move(os.pwritev, buffer, whole, offset)
        os.fdatasync(self.file)
        self.extents[key] = offset, entry.nbytes
        ended = time.perf_counter()
        return ended - begun, ended - copied

    def read(self, key: str) -> tuple[Bytes, float, float]:
        begun = time.perf_counter()
        offset, size = self.extents[key]
        whole = -(-size // PAGE) * PAGE
        buffer = self.scratch.of(whole)
        self.move(os.preadv, buffer, whole, offset)
        took = time.perf_counter() - begun
        return np.frombuffer(buffer, np.uint8, size), took, took

    def move(self, call: Callable[[int, list[Any], int], int], buffer: mmap.mmap, size: int, at: int) -> None:
        """Reads or writes an extent."""
        with memoryview(buffer) as memory:
            for done in range(0, size, PIECE):
                with memory[done : min(done + PIECE, size)] as piece:
                    assert call(self.file, [piece], at + done) == len(piece)

    def delete(self, key: str) -> None:
        offset, size = self.extents.pop(key)
        with self.lock:
            free = sorted([*self.free, (offset, -(-size // PAGE) * PAGE)])
            self.free = free[:1]
            for at, length in free[1:]:
                before, much = self.free[-1]
                if before + much == at:
                    self.free[-1] = before, much + length
                else:
                    self.free.append((at, length))

    def close(self) -> None:
        os.close(self.file)


class Forebay:
    """A node of this host. Its log has room for twice the entries, and it evicts what is not used."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.config = folder / "node.toml"
        self.config.write_text(CONFIG.format(folder=folder, log=2 * capacity))
        self.sizes: dict[str, int] = {}
        self.scratch = Scratch()
        self.socket = folder / "node.sock"
        self.start()

    def start(self) -> None:
        """The node, and this process as its client."""
        self.process = start_node(self.config)
        self.node = forebay.Node(self.socket, name="mlperf", wait=True)

    def restart(self) -> None:
        """As after a crash."""
        self.node.close()
        kill(self.process)
        self.scratch = Scratch()
        self.start()

    def parts(self, key: str, address: int, size: int) -> list[Part]:
        """The chunks of an entry, each with its piece of memory."""
        offsets = range(0, size, CHUNK)
        names = [hashlib.blake2b(f"{key}/{size}/{at}".encode(), digest_size=32).digest() for at in offsets]
        pieces = [(address + at, min(CHUNK, size - at), 0) for at in offsets]
        return list(zip(names, pieces, strict=True))

    def write(self, key: str, entry: Bytes) -> tuple[float, float]:
        begun = time.perf_counter()
        memory = self.node.register_memory(entry)
        parts = self.parts(key, memory.address, entry.nbytes)
        names = [name for name, _ in parts]
        try:
            for first in range(0, len(parts), UNWRITTEN // 2):
                self.store(key, parts[first : first + UNWRITTEN // 2])
                # Those before: the node would drop what it could not write in time.
                self.leave_memory(names[max(0, first - UNWRITTEN // 2) : first])
        finally:
            self.node.deregister_memory(memory)
        stored = time.perf_counter()
        self.leave_memory(names)
        self.sizes[key] = entry.nbytes
        ended = time.perf_counter()
        return ended - begun, ended - stored

    def store(self, key: str, parts: Sequence[Part]) -> None:
        """Gives the node these chunks, of which none continues another: they leave memory in any order."""
        storing: list[forebay.Storing] = []
        for number, (name, piece) in enumerate(parts):
            if number >= IN_FLIGHT and not storing[number - IN_FLIGHT].wait():
                break
            storing.append(self.node.store(name, None, [[piece]]))
        if not all(one.wait() for one in storing):
            raise OSError(f"{key}: the node did not take a chunk")

    def leave_memory(self, names: Sequence[bytes]) -> None:
        """Waits until all chunks are in the log and nowhere else."""
        end = time.monotonic() + LIMIT_S
        while names:
            reports = self.node.demote(names)
            names = [name for name, said in zip(names, reports, strict=True) if said[0] != "accepted"]
            if time.monotonic() > end:
                raise OSError(f"{len(names)} chunks did not leave memory: {reports[-1]}")
            time.sleep(POLL_S if names else 0)

    def read(self, key: str) -> tuple[Bytes, float, float]:
        size = self.sizes[key]
        buffer, address = self.buffer_of(size)
        parts = self.parts(key, address, size)
        names = [name for name, _ in parts]
        begun = time.perf_counter()
        lease = self.node.lease(names)
        try:
            if len(lease) < len(parts) or lease.in_memory:
                raise OSError(f"{key}: {len(lease)} of {len(parts)} leased, {lease.in_memory} in memory")
            self.load(key, lease, parts)
        finally:
            lease.release()
        took = time.perf_counter() - begun
        self.leave_memory(names)
        return np.frombuffer(buffer, np.uint8, size), took, took

    def load(self, key: str, lease: forebay.Lease, parts: Sequence[Part]) -> None:
        """Has all chunks from the node."""
        loading: list[forebay.Loading] = []
        for number, (_, piece) in enumerate(parts):
            if number >= IN_FLIGHT and not loading[number - IN_FLIGHT].wait():
                break
            loading.append(self.node.load(lease, number, [[piece]]))
        if not all(one.wait() for one in loading):
            raise OSError(f"{key}: a chunk was not loaded")

    def buffer_of(self, size: int) -> tuple[mmap.mmap, int]:
        """The thread's buffer, which the node's client knows."""
        if len(self.scratch.map) < size and self.scratch.memory is not None:
            self.node.deregister_memory(self.scratch.memory)
            self.scratch.memory = None
        buffer = self.scratch.of(size)
        if self.scratch.memory is None:
            self.scratch.memory = self.node.register_memory(buffer)
        return buffer, self.scratch.memory.address

    def delete(self, key: str) -> None:
        del self.sizes[key]

    def close(self) -> None:
        self.node.close()
        kill(self.process)


@dataclass
class Tier:
    """A back end as MLPerf's workload calls it. Counts, and compares what is read with what was written."""

    storage: Storage
    timing: Any  # MLPerf's class of a latency.
    words: dict[str, Bytes] = field(default_factory=dict)
    wrote: list[tuple[int, float]] = field(default_factory=list)  # Bytes and seconds.
    did_read: list[tuple[int, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ended: bool = False
    under_way: int = 0
    lock: threading.Condition = field(default_factory=threading.Condition)

    @contextlib.contextmanager
    def counted(self, key: str) -> Iterator[None]:
        """A call of the workload. Those behind the end of a run are not measured."""
        with self.lock:
            if self.ended:
                raise KeyError(key)
            self.under_way += 1
        try:
            yield
        except (OSError, KeyError, AssertionError, forebay.ForebayError) as error:
            self.failed.append(f"{key}: {error}")
            raise
        finally:
            with self.lock:
                self.under_way -= 1
                self.lock.notify_all()

    def write(self, key: str, data: npt.NDArray[Any]) -> Any:
        entry = data.reshape(-1).view(np.uint8)
        with self.counted(key):
            took, device = self.storage.write(key, entry)
            self.words[key] = words(entry)
            self.wrote.append((entry.nbytes, took))
            return self.timing(total=took, device=device, host=took - device)

    def read(self, key: str) -> tuple[Bytes, Any]:
        with self.counted(key):
            entry, took, device = self.storage.read(key)
            if not np.array_equal(words(entry), self.words[key]):
                self.wrong.append(key)
            self.did_read.append((entry.nbytes, took))
            return entry, self.timing(total=took, device=device, host=took - device)

    def delete(self, key: str) -> None:
        with self.counted(key):
            self.storage.delete(key)
            del self.words[key]

    def clear(self) -> None:
        for key in list(self.words):
            self.delete(key)

    def end(self) -> None:
        """Waits for the calls under way: the workload does not."""
        with self.lock:
            self.ended = True
            assert self.lock.wait_for(lambda: not self.under_way, LIMIT_S)


def total(moved: Sequence[tuple[int, float]]) -> int:
    """Bytes."""
    return sum(size for size, _ in moved)


def words(entry: Bytes) -> Bytes:
    """One word of each page, which a part in a wrong place would change."""
    return entry[: entry.nbytes // 8 * 8].view(np.uint64)[:: PAGE // 8].copy()


class Files:
    """MLPerf's own back end."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def write(self, key: str, entry: Bytes) -> tuple[float, float]:
        timing = self.backend.write(key, entry)
        return timing.total, timing.device

    def read(self, key: str) -> tuple[Bytes, float, float]:
        entry, timing = self.backend.read(key)
        return entry, timing.total, timing.device

    def delete(self, key: str) -> None:
        self.backend.delete(key)

    def close(self) -> None:
        self.backend.clear()


@dataclass
class Run:
    """What one run of the workload took."""

    seconds: float
    tokens: int
    requests: int
    storage_s: float
    cpu_s: float
    device: tuple[int, int]  # Bytes that the kernel says were read and written.
    tier: Tier
    kept: int = 0  # Entries that were compared after the node was killed.

    def per_second(self, moved: Sequence[tuple[int, float]]) -> float:
        """GiB that were moved for each second of the run."""
        return total(moved) / GIB / self.seconds

    def cpu_s_per_gib(self) -> float:
        """Processor time of this process, which makes the entries, and the node."""
        return self.cpu_s * GIB / total([*self.tier.wrote, *self.tier.did_read])

    def p50_ms(self, moved: Sequence[tuple[int, float]]) -> float:
        """Latency of half of the entries."""
        return 1e3 * statistics.median(took for _, took in moved)

    def p95_ms(self, moved: Sequence[tuple[int, float]]) -> float:
        """Latency of an entry, of whatever size: all ways have the same sizes."""
        return float(np.percentile([1e3 * took for _, took in moved], 95))


def moved_by(pids: Sequence[int]) -> tuple[int, int]:
    """Bytes that processes read from devices and wrote to them."""
    files = [
        dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines()) for pid in pids
    ]
    return sum(int(one["read_bytes"]) for one in files), sum(int(one["write_bytes"]) for one in files)


def run(way: str, args: argparse.Namespace, folder: Path) -> Run:
    """The workload once."""
    from kv_cache import benchmark, models
    from kv_cache.backends import StorageBackend

    random.seed(args.seed)
    capacity = args.capacity_gib * GIB
    made = benchmark.IntegratedBenchmark(
        model_config=models.get_model_configs()[args.model],
        num_users=args.users,
        gpu_memory_gb=0,
        cpu_memory_gb=0,
        duration_seconds=args.seconds,
        cache_dir=str(folder / "files"),
        generation_mode=models.GenerationMode.NONE,
        performance_profile="throughput",
        seed=args.seed,
        max_concurrent_allocs=args.allocs,
        storage_capacity_gb=args.capacity_gib,
    )
    # Its look-up of GPUs finds torch's on some machines; storage is the only tier here.
    made.cache.backends.pop("gpu", None)
    theirs = made.cache.backends["nvme"]
    storage: Any = (
        {"raw": Raw, "forebay": Forebay}[way](folder, 2 * capacity) if way != "files" else Files(theirs)
    )
    tier = made.cache.backends["nvme"] = Tier(storage, StorageBackend.IOTiming)
    try:
        pids = [os.getpid(), *([storage.process.pid] if way == "forebay" else [])]
        before, cpu, begun = moved_by(pids), sum(map(cpu_s, pids)), time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            made.run()
        seconds = time.perf_counter() - begun
        tier.end()
        cpu = sum(map(cpu_s, pids)) - cpu
        device = tuple(now - then for now, then in zip(moved_by(pids), before, strict=True))
        said = made.results
        assert tier.wrote and tier.did_read, f"the workload did nothing: {tier.failed[:3]}"
        kept = compare_after_a_crash(storage, made.cache.generator, tier) if way == "forebay" else 0
        tokens, storage_s = said["total_tokens_generated"], said["total_storage_io_latency"]
        return Run(seconds, tokens, said["requests_completed"], storage_s, cpu, device, tier, kept)
    finally:
        storage.close()


def compare_after_a_crash(storage: Forebay, generator: Any, tier: Tier) -> int:
    """Kills the node, starts it again, and compares all bytes of all entries. Says how many there are."""
    time.sleep(COMMIT_S)
    storage.restart()
    token_bytes = generator.model_config.kv_cache_size_per_token
    for key, size in storage.sizes.items():
        made = generator.generate(size // token_bytes, key).reshape(-1).view(np.uint8)
        try:
            if not np.array_equal(storage.read(key)[0], made):
                tier.wrong.append(f"{key}, after a crash")
        except OSError as error:
            tier.failed.append(f"{key}, after a crash: {error}")
    return len(storage.sizes)


def rows_of(found: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """For each figure and way, the value and its ratios to those of the others in the same round."""
    figures = {
        "storage_tokens": ("tokens/s", lambda one: one.tokens / one.storage_s),
        "tokens": ("tokens/s", lambda one: one.tokens / one.seconds),
        "read": ("GiB/s", lambda one: one.per_second(one.tier.did_read)),
        "write": ("GiB/s", lambda one: one.per_second(one.tier.wrote)),
        "read_p50": ("ms", lambda one: one.p50_ms(one.tier.did_read)),
        "write_p50": ("ms", lambda one: one.p50_ms(one.tier.wrote)),
        "read_p95": ("ms", lambda one: one.p95_ms(one.tier.did_read)),
        "write_p95": ("ms", lambda one: one.p95_ms(one.tier.wrote)),
        "cpu": ("s/GiB", lambda one: one.cpu_s_per_gib()),
    }
    rows = []
    for name, (unit, figure) in figures.items():
        for way in WAYS:
            values = [figure(one) for one in found[way]]
            ratios = {
                f"of_{other}": float(
                    np.median([mine / figure(one) for mine, one in zip(values, found[other], strict=True)])
                )
                for other in WAYS
                if other != way
            }
            rows.append(row(f"mlperf.kv.{name}.{way}", unit, values, **ratios))
    for way in WAYS:
        tiers = [one.tier for one in found[way]]
        counts = {
            "requests": [one.requests for one in found[way]],
            "writes": [len(tier.wrote) for tier in tiers],
            "reads": [len(tier.did_read) for tier in tiers],
            "wrong": sum(len(tier.wrong) for tier in tiers),
            "read_from_device": sum(one.device[0] for one in found[way])
            / sum(total(tier.did_read) for tier in tiers),
            "compared_after_a_crash": sum(one.kept for one in found[way]),
        }
        rows.append(
            row(f"mlperf.kv.failed.{way}", "calls", [float(len(tier.failed)) for tier in tiers], **counts)
        )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mlperf", type=Path, required=True, help="has the package `kv_cache`")
    parser.add_argument("--dir", type=Path, required=True, help="on the disk that is measured")
    parser.add_argument("--model", default="tiny-1b", help="one of MLPerf's; says how large a token is")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--allocs", type=int, default=4, help="entries that are made at a time")
    parser.add_argument("--seconds", type=int, default=60, help="of a run")
    parser.add_argument("--capacity-gib", type=int, default=6, help="of the storage tier")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--disk", default="virtual", help="its name, for the results")
    parser.add_argument("--json", type=Path, help="where the results go")
    args = parser.parse_args()
    sys.path.insert(0, str(args.mlperf))
    load_before = os.getloadavg()[0]
    found: dict[str, list[Run]] = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="mlperf-"))
            try:
                found[way].append(run(way, args, folder))
            finally:
                shutil.rmtree(folder)
            gc.collect()
            for what in found[way][-1].tier.failed[:3] + found[way][-1].tier.wrong[:3]:
                print(f"{way}: {what}", file=sys.stderr)
            print(f"round {number + 1}: {way}", file=sys.stderr, flush=True)
    rows = [each | {"load_average": round(load_before, 1)} for each in rows_of(found)]
    for each in rows:
        of_raw = f", {each['of_raw']:.2f} of raw" if "of_raw" in each else ""
        spread = f"{each['min']:.2f} to {each['max']:.2f}"
        print(f"{each['name']}: {each['value']:.2f} {each['unit']}{of_raw} ({spread})")
    if args.json:
        args.json.write_text(json.dumps(results("mlperf-kv", [], args.disk, rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
