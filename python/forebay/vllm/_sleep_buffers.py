"""Where the contents of device memory lie while the memory itself is gone: pieces of a pool of pinned memory.

Knows addresses and lengths, and what it asks of `forebay.cuda`. Must never know vLLM or torch, nor decide
what is kept: a buffers holds what it was filled with until each extent was dropped, and then gives its pieces
back.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeAlias


class PinnedBuffer(Protocol):
    """Pinned host memory that is lent."""

    @property
    def address(self) -> int: ...  # noqa: D102
    @property
    def bytes(self) -> int: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class PinnedPool(Protocol):
    """Pinned host memory that is kept: what was pinned once is lent again."""

    def warm(self, bytes: int) -> None: ...  # noqa: D102
    def take(self, bytes: int) -> PinnedBuffer: ...  # noqa: D102


class Copier(Protocol):
    """Every path between host memory and a GPU. Returns or raises when nothing touches the memory."""

    def copy_batch_and_wait(self, pairs: list[tuple[int, int, int]]) -> None: ...  # noqa: D102


# What is taken from the pool at a time. A pool pins slab by slab, a GiB as a rule, and lends what lies in one
# slab: pieces that divide a slab leave nothing of it unused, whatever the sizes of allocations are.
PIECE_BYTES = 256 << 20

# From, to, bytes.
Copy: TypeAlias = tuple[int, int, int]


class SleepBuffers:
    """Contents of device memory, by the address to which they will go back."""

    def __init__(self, buffers: list[PinnedBuffer], copies: dict[int, list[Copy]]) -> None:
        """Made by `copy_out`. The copies bring an extent back, by its address."""
        self._buffers = buffers
        self._copies = copies

    @classmethod
    def copy_out(cls, pool: PinnedPool, copier: Copier, extents: Mapping[int, int]) -> "SleepBuffers":
        """Copies all extents (address: bytes) out in one batch. If that fails, what it took is given back."""
        buffers: list[PinnedBuffer] = []
        try:
            missing = sum(extents.values())
            while missing > 0:
                buffers.append(pool.take(min(missing, PIECE_BYTES)))
                missing -= buffers[-1].bytes
            copies = _lay_out(buffers, extents)
            out = [(address, place, n) for back in copies.values() for place, address, n in back]
            copier.copy_batch_and_wait(out)
        except BaseException:
            for buffer in buffers:
                buffer.close()
            raise
        return cls(buffers, copies)

    def copies_back(self, address: int) -> list[Copy]:
        """The copies that bring this extent back."""
        return self._copies[address]

    def release(self, address: int) -> None:
        """Forgets an extent. With the last one the buffers go back to their pool."""
        del self._copies[address]
        if not self._copies:
            for buffer in self._buffers:
                buffer.close()


def _lay_out(buffers: Iterable[PinnedBuffer], extents: Mapping[int, int]) -> dict[int, list[Copy]]:
    """Extents one after another through the buffers; what does not fit in one goes on in the next."""
    places = ((buffer.address, buffer.bytes) for buffer in buffers)
    place, left = 0, 0
    copies: dict[int, list[Copy]] = {}
    for address, length in extents.items():
        copies[address] = []
        done = 0
        while done < length:
            if left == 0:
                place, left = next(places)
            part = min(left, length - done)
            copies[address].append((place, address + done, part))
            place, left, done = place + part, left - part, done + part
    return copies
