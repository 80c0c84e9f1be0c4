#!/usr/bin/env python3
"""What loads cost a prefill, by the SMs that their kernels may use.

    bench/sm_partition.py --json partition.json [--kernels crates/cuda/kernels]

A prefill of a model of 8B, in bfloat16 with random weights, runs by itself and then beside loads from pinned
host memory that go on all the while, each followed by the checksums of what it brought. Loads go by a copy
engine, or by our kernel: in blocks for 8 or 16 SMs, in a green context of 8 or 16 SMs, or in such a context
while the prefill has only the rest of the SMs. Rows say how much longer the prefill takes, and what the load
carries meanwhile. Knows torch, the CUDA driver and two of our kernels; must never know an engine or a node.
"""

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm_engine
from vllm_engine import row

TOKENS = (2048, 8192)
LAYERS = 32
HIDDEN, HEADS, KV_HEADS, HEAD, FFN = 4096, 32, 8, 128, 14336
RUNS = 7
BATCH_BYTES = 128 << 20  # What a load brings at a time: layers of 128 KiB, in pages of 32 KiB.
PAGE_BYTES = 32 << 10
RANGE_BYTES = 16 << 10  # What a warp of the checksum kernel sums up.
QUEUEING_CYCLES = 300_000_000  # A sixth of a second.
PIECE_THREADS, SUM_THREADS, SUM_BLOCKS = 512, 256, 64
# The driver's names.
RESOURCE_SM, GREEN_DEFAULT_STREAM, NON_BLOCKING = 1, 1, 1


class Driver:
    """The calls of the driver that torch does not have. Each is looked at."""

    def __init__(self) -> None:
        """Of the process's own CUDA context."""
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: object) -> None:
        """Calls a function; what is no success ends the program."""
        status = getattr(self.cuda, name)(*arguments)
        if status != 0:
            sys.exit(f"{name}: CUresult {status}")

    def kernel(self, ptx: Path, name: str) -> ctypes.c_void_p:
        """A kernel that may be launched in any context."""
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        text = ptx.read_bytes() + b"\0"
        self("cuLibraryLoadData", ctypes.byref(library), text, None, None, 0, None, None, 0)
        self("cuLibraryGetKernel", ctypes.byref(kernel), library, name.encode())
        return kernel


class Resource(ctypes.Structure):
    """CUdevResource, and room for what later drivers append."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("sm_count", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 108),
    )


@dataclass(frozen=True)
class Partition:
    """Streams of two green contexts: of some SMs, and of those that are left."""

    part: int
    rest: int
    part_sms: int
    rest_sms: int

    @classmethod
    def split(cls, driver: Driver, sms: int) -> "Partition":
        """Cuts so many SMs off."""
        whole, part, rest = Resource(), Resource(), Resource()
        device, groups = ctypes.c_int(), ctypes.c_uint(1)
        driver("cuDeviceGet", ctypes.byref(device), 0)
        driver("cuDeviceGetDevResource", device, ctypes.byref(whole), RESOURCE_SM)
        driver(
            "cuDevSmResourceSplitByCount",
            *(ctypes.byref(part), ctypes.byref(groups), ctypes.byref(whole), ctypes.byref(rest)),
            *(ctypes.c_uint(0), ctypes.c_uint(sms)),
        )
        streams = [cls.stream(driver, device, resource) for resource in (part, rest)]
        return cls(streams[0], streams[1], part.sm_count, rest.sm_count)

    @staticmethod
    def stream(driver: Driver, device: ctypes.c_int, resource: Resource) -> int:
        """A stream whose kernels have these SMs."""
        described, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        driver("cuDevResourceGenerateDesc", ctypes.byref(described), ctypes.byref(resource), 1)
        driver("cuGreenCtxCreate", ctypes.byref(context), described, device, GREEN_DEFAULT_STREAM)
        driver("cuGreenCtxStreamCreate", ctypes.byref(stream), context, NON_BLOCKING, 0)
        if stream.value is None:
            sys.exit("cuGreenCtxStreamCreate gave no stream")
        return stream.value


class Prefill:
    """Layers of a model, computed one after another in a stream."""

    def __init__(self, tokens: int) -> None:
        """Weights of one layer serve for all: they are as far from the caches as those of 32."""
        self.tokens = tokens
        self.start = self.weights(tokens, HIDDEN)
        self.qkv = self.weights(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD)
        self.out = self.weights(HEADS * HEAD, HIDDEN)
        self.gate_up = self.weights(HIDDEN, 2 * FFN)
        self.down = self.weights(FFN, HIDDEN)

    @staticmethod
    def weights(rows: int, columns: int) -> torch.Tensor:
        """A matrix that keeps numbers small."""
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / 64

    def run(self) -> None:
        """Queues all layers."""
        hidden = self.start
        for _ in range(LAYERS):
            q, k, v = (hidden @ self.qkv).split((HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD), dim=1)
            heads = [each.view(1, self.tokens, -1, HEAD).transpose(1, 2) for each in (q, k, v)]
            seen = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            hidden = hidden + seen.transpose(1, 2).reshape(self.tokens, -1) @ self.out
            gate, up = (hidden @ self.gate_up).chunk(2, dim=1)
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ self.down
            hidden = hidden / hidden.abs().amax(dim=1, keepdim=True)


class Load:
    """Batches from pinned memory, and their checksums."""

    def __init__(self, driver: Driver, kernels: Path) -> None:
        """Pages of the host go to pages of the GPU in another order, as an engine's are."""
        self.driver = driver
        self.pieces = driver.kernel(kernels / "pieces.ptx", "forebay_pieces")
        self.sums = driver.kernel(kernels / "checksums.ptx", "forebay_checksums")
        self.host = torch.ones(BATCH_BYTES, dtype=torch.uint8).pin_memory()
        self.there = torch.empty(BATCH_BYTES, dtype=torch.uint8, device="cuda")
        pages = BATCH_BYTES // PAGE_BYTES
        moves = [
            (self.host.data_ptr() + at * PAGE_BYTES, self.there.data_ptr() + to * PAGE_BYTES, PAGE_BYTES)
            for at, to in zip(range(pages), reversed(range(pages)), strict=True)
        ]
        self.list = torch.tensor(moves, dtype=torch.int64).pin_memory()
        self.ranges_count = BATCH_BYTES // RANGE_BYTES
        first = self.there.data_ptr()
        ranges = [(first + at * RANGE_BYTES, RANGE_BYTES) for at in range(self.ranges_count)]
        self.ranges = torch.tensor(ranges, dtype=torch.int64).pin_memory()
        self.remainders = torch.zeros(self.ranges_count, dtype=torch.int32).pin_memory()

    def batch(self, stream: torch.cuda.Stream, blocks: int | None) -> None:
        """Queues one: by so many blocks, or by a copy engine."""
        if blocks is None:
            with torch.cuda.stream(stream):
                self.there.copy_(self.host, non_blocking=True)
        else:
            count = ctypes.c_uint(len(self.list))
            self.launch(self.pieces, stream, blocks, PIECE_THREADS, self.list.data_ptr(), count)
        count, to = ctypes.c_uint(self.ranges_count), ctypes.c_uint64(self.remainders.data_ptr())
        width = SUM_BLOCKS if blocks is None else blocks
        self.launch(self.sums, stream, width, SUM_THREADS, self.ranges.data_ptr(), count, to)

    def launch(
        self,
        kernel: ctypes.c_void_p,
        stream: torch.cuda.Stream,
        blocks: int,
        threads: int,
        table: int,
        *more: Any,
    ) -> None:
        """Launches a kernel on a table."""
        arguments = (ctypes.c_uint64(table), *more)
        addresses = [ctypes.cast(ctypes.byref(each), ctypes.c_void_p) for each in arguments]
        list_ = (ctypes.c_void_p * len(arguments))(*addresses)
        grid = (blocks, 1, 1, threads, 1, 1, 0)
        self.driver("cuLaunchKernel", kernel, *grid, ctypes.c_void_p(stream.cuda_stream), list_, None)


@dataclass(frozen=True)
class Way:
    """How a load goes, and where the prefill computes."""

    name: str
    loads: torch.cuda.Stream
    computes: torch.cuda.Stream
    blocks: int | None


def ways(driver: Driver) -> Iterator[Way]:
    """All that are compared."""
    computes, loads = torch.cuda.Stream(), torch.cuda.Stream()
    yield Way("copy_engine", loads, computes, None)
    for blocks in (8, 16):
        yield Way(f"kernel_{blocks}", loads, computes, blocks)
    for sms in (8, 16):
        cut = Partition.split(driver, sms)
        print(f"green contexts of {cut.part_sms} and {cut.rest_sms} SMs")
        part, rest = (torch.cuda.ExternalStream(stream) for stream in (cut.part, cut.rest))
        # As many blocks as an SM holds threads for, on each of the SMs.
        yield Way(f"green_{sms}", part, computes, 4 * cut.part_sms)
        yield Way(f"rest_{sms}", part, rest, 4 * cut.part_sms)


@contextmanager
def timed(stream: torch.cuda.Stream) -> Iterator[list[torch.cuda.Event]]:
    """Events in front of and behind what is queued within."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record(stream)
    yield events
    events[1].record(stream)


def alone_ms(prefill: Prefill, stream: torch.cuda.Stream) -> float:
    """The prefill by itself."""
    with timed(stream) as events, torch.cuda.stream(stream):
        prefill.run()
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1]))


def loads_ms(load: Load, way: Way, batches: int) -> float:
    """Loads by themselves."""
    with timed(way.loads) as events:
        for _ in range(batches):
            load.batch(way.loads, way.blocks)
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1]))


def beside_ms(prefill: Prefill, load: Load, way: Way, batches: int) -> tuple[float, float]:
    """The prefill beside loads that outlast it, and GB/s of those that ended within it."""
    begun, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(way.computes):
        # Nothing begins before all is queued.
        torch.cuda._sleep(QUEUEING_CYCLES)
        begun.record()
        way.loads.wait_event(begun)
        prefill.run()
        end.record()
    ends = []
    for _ in range(batches):
        load.batch(way.loads, way.blocks)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record(way.loads)
    torch.cuda.synchronize()
    took = begun.elapsed_time(end)
    within = [begun.elapsed_time(end) for end in ends if begun.elapsed_time(end) <= took]
    rate = len(within) * BATCH_BYTES / within[-1] / 1e6 if within else 0.0
    return took, rate


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--kernels", type=Path, default=root / "crates/cuda/kernels", metavar="FOLDER")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs of each kind [{RUNS}]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results object here")
    args = parser.parse_args()
    driver = Driver()
    torch.cuda.init()
    load = Load(driver, args.kernels)
    rows: list[dict[str, Any]] = []
    all_ways = list(ways(driver))
    for tokens in TOKENS:
        prefill, size = Prefill(tokens), f"{tokens // 1024}k"
        for way in all_ways:
            alone_ms(prefill, way.computes)  # Kernels are chosen and loaded.
        plain = [alone_ms(prefill, all_ways[0].computes) for _ in range(args.runs)]
        rows.append(row(f"prefill.{size}.alone_ms", "ms", plain))
        for way in all_ways:
            rate_alone = 8 * BATCH_BYTES / loads_ms(load, way, 8) / 1e6
            batches = int(2 * statistics.median(plain) * rate_alone * 1e6 / BATCH_BYTES) + 4
            slower, rates = [], []
            for _ in range(args.runs):
                # Right before, so that a GPU that slows down with heat does so for both.
                before = alone_ms(prefill, all_ways[0].computes)
                took, rate = beside_ms(prefill, load, way, batches)
                slower.append(100 * (took / before - 1))
                rates.append(rate)
            rows.append(row(f"prefill.{size}.{way.name}.slowdown", "%", slower))
            rows.append(row(f"prefill.{size}.{way.name}.load", "GB/s", rates, ceiling=rate_alone))
            print(f"{size} {way.name}: {statistics.median(slower):.1f} % slower, load {rates[0]:.1f} GB/s")
    results = vllm_engine.results("sm-partition", [torch.cuda.get_device_name()], None, rows)
    print(json.dumps(results, indent=1) if args.json is None else f"written to {args.json}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
