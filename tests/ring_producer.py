"""A producer of a ring. Written from docs/reference/ring.md alone, to show that the page is enough.

Knows the bytes of version 2 and nothing of the program that serves them. Standard library only.
"""

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = 0x4642_5249_4E47_0002
HEADER = 4096
EPOCH_AT, CONSUMER_ASLEEP_AT, CLOSED_AT, PRODUCER_ASLEEP_AT, ARMED_AT = 16, 128, 192, 256, 320
NOP, READ, COMMIT, CANCEL = range(4)
DONE, PARTIAL = range(2)
ECHO_FACTOR = 0x9E37_79B9_7F4A_7C15
SYS_FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Full(Exception):
    """No slot is free."""


@dataclass(frozen=True)
class Ended:
    """How a request ended, and (offset, checksum, status) of each of its contexts."""

    user: int
    status: int
    slot: int
    contexts_done: int
    bytes: int
    results: list[tuple[int, int, int]]


def echo(user: int, lease: int, extent: int, layer: int) -> int:
    """What a result repeats of its request and context."""
    value = 0
    for word in (user, lease, extent | layer << 32):
        value = (value + word) * ECHO_FACTOR % 2**64
    return value >> 48


class Producer:
    """The one producer of a ring whose memory has this path."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        self.words = memoryview(self.memory).cast("Q")
        header: tuple[int, ...] = struct.unpack_from("<QHHHHQ", self.memory)
        magic, self.posted, self.armed, self.contexts, zero, self.epoch = header
        if magic != MAGIC or zero:
            raise ValueError(f"no ring of version 2: {magic:#x}")
        slots = self.posted + self.armed
        self.places = 1 << (slots - 1).bit_length()
        self.contexts_at = HEADER + 64 * slots
        self.results_at = self.contexts_at + 16 * self.contexts * slots
        self.completions_at = self.results_at + 16 * self.contexts * slots
        expected = self.completions_at + 32 * self.places
        if len(self.memory) < expected:
            raise ValueError(f"{len(self.memory)} bytes, not {expected}")
        self.next = self.taken = 0
        self.uses = [0] * self.armed
        self.under_way: dict[int, list[int]] = {}

    def word(self, at: int) -> int:
        """A word, read whole."""
        return self.words[at // 8]

    def set_word(self, at: int, value: int) -> None:
        """A word, written whole. Stores stay in order on this machine, which CPython does not change."""
        self.words[at // 8] = value

    def _write(
        self, slot: int, op: int, lease: int, contexts: Sequence[tuple[int, int, int]], user: int, rank: int
    ) -> int:
        at = self.contexts_at + 16 * self.contexts * slot
        for number, (extent, layer, checksum) in enumerate(contexts):
            struct.pack_into("<IHHII", self.memory, at + 16 * number, extent, layer, 0, checksum, 0)
        request = HEADER + 64 * slot
        head = struct.pack("<QQQBBHI24x", user, lease, self.epoch, op, rank, len(contexts), 0)
        self.memory[request : request + 56] = head
        self.under_way[slot] = [echo(user, lease, extent, layer) for extent, layer, _ in contexts]
        return request + 56

    def post(
        self, op: int, lease: int, contexts: Sequence[tuple[int, int, int]], user: int = 0, rank: int = 0
    ) -> int:
        """Posts a request, wakes the consumer, and gives the slot."""
        slot = self.next % self.posted
        if slot in self.under_way:
            raise Full
        sequence = self._write(slot, op, lease, contexts, user, rank)
        self.next += 1
        self.set_word(sequence, self.next)
        if self.word(CONSUMER_ASLEEP_AT):
            self.set_word(CONSUMER_ASLEEP_AT, 0)
            self._futex(CONSUMER_ASLEEP_AT, FUTEX_WAKE, 1)
        return slot

    def arm(
        self, op: int, lease: int, contexts: Sequence[tuple[int, int, int]], user: int = 0
    ) -> tuple[int, int]:
        """Writes a request for somebody else to publish: gives where, and the word."""
        free = (slot for slot in range(self.posted, self.posted + self.armed) if slot not in self.under_way)
        slot = next(free, None)
        if slot is None:
            raise Full
        sequence = self._write(slot, op, lease, contexts, user, 0)
        self.uses[slot - self.posted] += 1
        self._tell_armed()
        return sequence, self.uses[slot - self.posted]

    def reap(self) -> Ended | None:
        """The next request that has ended."""
        at = self.completions_at + 32 * (self.taken % self.places)
        if self.word(at + 24) != self.taken + 1:
            return None
        user, status, slot, done, count = struct.unpack_from("<QHHIQ", self.memory, at)
        at = self.results_at + 16 * self.contexts * slot
        echoes = self.under_way.pop(slot)
        if status not in (DONE, PARTIAL):
            echoes = []
        results = [struct.unpack_from("<QIHH", self.memory, at + 16 * n) for n in range(len(echoes))]
        if [result[3] for result in results] != echoes:
            raise ValueError("a result is of another request")
        self.taken += 1
        self._tell_armed()
        return Ended(user, status, slot, done, count, [result[:3] for result in results])

    def wait(self, limit_s: float = 30) -> Ended:
        """The next request that has ended, when it has."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            self.set_word(PRODUCER_ASLEEP_AT, 1)
            if ended := self.reap():
                self.set_word(PRODUCER_ASLEEP_AT, 0)
                return ended
            self._futex(PRODUCER_ASLEEP_AT, FUTEX_WAIT, 1)
        raise TimeoutError

    def _tell_armed(self) -> None:
        self.set_word(ARMED_AT, sum(slot >= self.posted for slot in self.under_way))

    def _futex(self, at: int, operation: int, value: int) -> None:
        address = ctypes.addressof(ctypes.c_uint32.from_buffer(self.memory, at))
        half_a_second = (ctypes.c_int64 * 2)(0, 500_000_000)
        timeout = ctypes.byref(half_a_second) if operation == FUTEX_WAIT else None
        _LIBC.syscall(SYS_FUTEX, ctypes.c_void_p(address), operation, value, timeout, None, 0)
