"""An engine's load on a node, all the time: prompts are stored once, and then read, each byte compared.

Knows `forebay.Node`. Must never know why a prompt is not found.
"""

import hashlib
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import forebay

NAMESPACE = bytes(range(32))
CHUNK_TOKENS = 64
LAYERS = 4


@dataclass
class Prompts:
    """Prompts of some chunks each, whose bytes follow from their ids."""

    count: int
    chunks: int
    layer_bytes: int
    ids: list[list[bytes]] = field(init=False)

    def __post_init__(self) -> None:
        tokens = [[number + 1] * (CHUNK_TOKENS * self.chunks) for number in range(self.count)]
        self.ids = [forebay.chunk_ids(NAMESPACE, prompt, CHUNK_TOKENS) for prompt in tokens]

    def content(self, chunk: bytes) -> bytes:
        """A chunk's bytes."""
        block = hashlib.blake2b(chunk).digest()
        return block * (LAYERS * self.layer_bytes // len(block))

    def layers_at(self, address: int) -> list[list[tuple[int, int, int]]]:
        """Where its layers are, if all of them lie there."""
        starts = range(address, address + LAYERS * self.layer_bytes, self.layer_bytes)
        return [[(start, self.layer_bytes, 0)] for start in starts]

    def store(self, socket: Path) -> None:
        """All of them."""
        node = forebay.Node(socket, name="fill")
        memory = bytearray(LAYERS * self.layer_bytes)
        at = node.register_memory(memory).address
        for prompt in self.ids:
            for parent, chunk in zip([None, *prompt], prompt, strict=False):
                memory[:] = self.content(chunk)
                stored = node.store(chunk, parent, self.layers_at(at))
                assert stored.wait(), stored.why
        node.close()

    def found(self, node: forebay.Node) -> int:
        """How many chunks of all prompts are found."""
        return sum(node.lookup(prompt) for prompt in self.ids)


class Reader:
    """Reads chunks of any of the prompts until it is stopped, in a thread of its own."""

    def __init__(self, socket: Path, prompts: Prompts, seed: int) -> None:
        """It reads from now on."""
        self.prompts, self.random = prompts, random.Random(seed)
        self.node = forebay.Node(socket, name=f"reader-{seed}")
        self.memory = bytearray(LAYERS * prompts.layer_bytes)
        self.at = self.node.register_memory(self.memory).address
        # When each hit ended, on the clock of `time.monotonic`.
        self.hits: list[float] = []
        self.misses = 0
        # What an engine would have failed by: an exception, or wrong bytes.
        self.failed: list[str] = []
        self.is_stopped = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.is_stopped.wait(0.001):
            try:
                self.read_one()
            # Whatever it is, an engine would have failed.
            except Exception as error:
                self.failed.append(repr(error))

    def read_one(self) -> None:
        """Finds a prompt, and loads one of its chunks."""
        prompt = self.random.choice(self.prompts.ids)
        if self.node.lookup(prompt) < len(prompt):
            self.misses += 1
            return
        lease = self.node.lease(prompt)
        place = self.random.randrange(len(prompt))
        if len(lease) <= place or not self.load(lease, place):
            self.misses += 1
        elif self.memory != self.prompts.content(prompt[place]):
            self.failed.append(f"wrong bytes of {prompt[place].hex()}")
        else:
            self.hits.append(time.monotonic())
        lease.release()

    def load(self, lease: forebay.Lease, place: int) -> bool:
        """A lease that is over is a miss, as it is for an engine."""
        try:
            return self.node.load(lease, place, self.prompts.layers_at(self.at)).wait()
        except forebay.NotFoundError:
            return False

    def stop(self) -> None:
        self.is_stopped.set()
        self.thread.join()
        self.node.close()

    def longest_gap(self, begun: float, ended: float) -> float:
        """The longest time between two hits."""
        moments = [begun, *(at for at in self.hits if begun < at < ended), ended]
        return max(later - sooner for sooner, later in zip(moments, moments[1:], strict=False))
