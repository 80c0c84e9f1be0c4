"""Two processes that move equal blocks between their memories, in different orders at the two ends.

For systems other than Forebay: `run_nixl.py` and `run_mooncake.py` say how; this module starts the other
process, times, compares and reports. One JSON object is printed: name, version, gbps (a list, one a run),
cpu_s_per_gb (of both processes), bad_blocks.
"""

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

WARM_UPS = 2


class End(Protocol):
    """One end of a system under test."""

    name: str
    version: str

    def address(self) -> Any:
        """What the other end has to know of this one."""

    def meet(self, other: Any) -> None:
        """Takes in what the other end says of itself."""


class Asking(End, Protocol):
    """The end that asks."""

    def prepare(
        self, op: str, ours: list[int], theirs: list[int], block_bytes: int, their_device: int
    ) -> Callable[[], None]:
        """Gives a function that moves every block once and returns when they are in place. Addresses."""


class Memory:
    """Anonymous memory with an address."""

    kind, device = "DRAM", 0

    def __init__(self, length: int) -> None:
        self.length = length
        self._map = mmap.mmap(-1, length)
        self._buffer = (ctypes.c_char * length).from_buffer(self._map)
        self.address = ctypes.addressof(self._buffer)
        ctypes.memset(self.address, 1, length)

    def fill(self, at: int, length: int, run: int, block: int) -> None:
        ctypes.memmove(self.address + at, content(length, run, block), length)

    def is_right(self, at: int, length: int, run: int, block: int) -> bool:
        return ctypes.string_at(self.address + at, length) == content(length, run, block)


class GpuMemory:
    """Memory of a GPU with an address: the last GPU's for the owner, so that two are used where there are."""

    kind = "VRAM"

    def __init__(self, length: int, role: str) -> None:
        import torch

        self.length, self._torch = length, torch
        self.device = torch.cuda.device_count() - 1 if role == "owner" else 0
        torch.cuda.set_device(self.device)
        self._bytes = torch.ones(length, dtype=torch.uint8, device=f"cuda:{self.device}")
        self.address = self._bytes.data_ptr()

    def fill(self, at: int, length: int, run: int, block: int) -> None:
        host = self._torch.frombuffer(bytearray(content(length, run, block)), dtype=self._torch.uint8)
        self._bytes[at : at + length].copy_(host)
        self._torch.cuda.synchronize()

    def is_right(self, at: int, length: int, run: int, block: int) -> bool:
        held = self._bytes[at : at + length].cpu().numpy().tobytes()
        return bool(held == content(length, run, block))


def memory_of(segment: str, length: int, role: str) -> Memory | GpuMemory:
    """Memory of this kind."""
    return GpuMemory(length, role) if segment == "gpu" else Memory(length)


def content(length: int, run: int, block: int) -> bytes:
    """What only this block of this run has."""
    stamp = run.to_bytes(8, "little") + block.to_bytes(8, "little")
    return (stamp * (length // 16 + 1))[:length]


def places(blocks: int, step: int) -> list[int]:
    """Where each block lies, in blocks: every place once, neighbours far apart."""
    while any(step % factor == 0 and blocks % factor == 0 for factor in range(2, min(step, blocks) + 1)):
        step += 1
    return [block * step % blocks for block in range(blocks)]


def main(start: Callable[[Memory | GpuMemory, str], End]) -> None:
    """Runs the benchmark with ends that `start` makes of memory and a role, `asking` or `owner`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--op", choices=["write", "read"], required=True)
    parser.add_argument("--block-bytes", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--segment", choices=["heap", "gpu"], default="heap", help="where the blocks lie")
    args = parser.parse_args()
    size = args.block_bytes
    here = [place * size for place in places(args.blocks, 7919)]
    there = [place * size for place in places(args.blocks, 104729)]
    line, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    owned = (theirs, start, args.segment, size * args.blocks, size, there)
    child = context.Process(target=own, args=owned, daemon=True)
    child.start()
    memory = memory_of(args.segment, size * args.blocks, "asking")
    end: Any = start(memory, "asking")
    base, their_device, address = line.recv()
    line.send(end.address())
    end.meet(address)
    ours, theirs_at = [memory.address + at for at in here], [base + at for at in there]
    move = end.prepare(args.op, ours, theirs_at, size, their_device)
    gbps, cpu_s, bad = [], 0.0, 0
    for run in range(1, WARM_UPS + args.runs + 1):
        if args.op == "write":
            for block, at in enumerate(here):
                memory.fill(at, size, run, block)
        else:
            ask(line, "fill", run)
        before = time.process_time() + ask(line, "cpu", run)
        begin = time.perf_counter()
        move()
        wall = time.perf_counter() - begin
        after = time.process_time() + ask(line, "cpu", run)
        if args.op == "write":
            bad += ask(line, "check", run)
        else:
            bad += sum(not memory.is_right(at, size, run, block) for block, at in enumerate(here))
        if run > WARM_UPS:
            gbps.append(memory.length / wall / 1e9)
            cpu_s += after - before
    report = {"name": end.name, "version": end.version, "gbps": gbps}
    report |= {"cpu_s_per_gb": cpu_s / (memory.length * args.runs / 1e9), "bad_blocks": bad}
    print(json.dumps(report), flush=True)
    line.send(("end", 0))
    # Some of these libraries crash while the interpreter ends.
    os._exit(0)


def ask(line: Connection, word: str, run: int) -> Any:
    """Tells the other process something and gives its answer."""
    line.send((word, run))
    return line.recv()


def own(
    line: Connection,
    start: Callable[[Memory | GpuMemory, str], End],
    segment: str,
    length: int,
    size: int,
    at: list[int],
) -> None:
    """The other process."""
    memory = memory_of(segment, length, "owner")
    end = start(memory, "owner")
    line.send((memory.address, memory.device, end.address()))
    end.meet(line.recv())
    while True:
        word, run = line.recv()
        if word == "fill":
            for block, place in enumerate(at):
                memory.fill(place, size, run, block)
            line.send(0)
        elif word == "check":
            line.send(sum(not memory.is_right(place, size, run, block) for block, place in enumerate(at)))
        elif word == "cpu":
            line.send(time.process_time())
        else:
            sys.stdout.flush()
            os._exit(0)
