"""Keeps the contents of device memory in pinned host memory while the device memory is unmapped.

It knows addresses and lengths, and no vLLM or torch. What is kept is decided in `sleep`.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # `sleep` imports it when the engine sleeps.
    from forebay.cuda import Copier, PinnedBuffer, PinnedPool

# Pinned memory is taken in pieces of this size. A pool pins slabs, mostly of a GiB, and lends what
# lies in one slab: pieces that divide a slab leave nothing of it unused.
PIECE_BYTES = 256 << 20

# From, to, bytes.
Copy: TypeAlias = tuple[int, int, int]


class SleepBuffers:
    """Contents of device memory, by the address to which they go back."""

    def __init__(self, buffers: "list[PinnedBuffer]", copies: dict[int, list[Copy]]) -> None:
        """Made by `copy_out`. `copies` restore an extent, by its address."""
        self._buffers = buffers
        self._copies = copies

    @classmethod
    def copy_out(cls, pool: "PinnedPool", copier: "Copier", extents: Mapping[int, int]) -> "SleepBuffers":
        """Copies all extents (address: bytes) out in one batch. A failure leaves nothing behind."""
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
        """The copies that restore this extent."""
        return self._copies[address]

    def release(self, address: int) -> None:
        """Forgets an extent. With the last one the buffers go back to their pool."""
        del self._copies[address]
        if not self._copies:
            for buffer in self._buffers:
                buffer.close()


def _lay_out(buffers: "Iterable[PinnedBuffer]", extents: Mapping[int, int]) -> dict[int, list[Copy]]:
    """Lays extents one after another through the buffers; one may go on in the next buffer."""
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
