"""Mooncake's transfer engine over tcp, as `forebay bench net --peer` calls it.

Needs `pip install mooncake-transfer-engine-non-cuda==0.3.13.post1` and the system's libibverbs1 and
libnuma1. More than 2,048 blocks to one peer fail unless the queue is made longer, which is done here.
"""

import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import pair

PACKAGE = "mooncake-transfer-engine-non-cuda"


class Mooncake:
    """An end of Mooncake."""

    name = "Mooncake"

    def __init__(self, memory: pair.Memory, role: str) -> None:
        os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
        from mooncake.engine import TransferEngine

        self.version = importlib.metadata.version(PACKAGE)
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"{role}: the engine did not start")
        if self.engine.register_memory(memory.address, memory.length):
            raise RuntimeError(f"{role}: the memory was not registered")
        self.session = ""

    def address(self) -> Any:
        return f"127.0.0.1:{self.engine.get_rpc_port()}"

    def meet(self, other: Any) -> None:
        self.session = other

    def prepare(
        self, op: str, ours: list[int], theirs: list[int], block_bytes: int, _their_device: int
    ) -> Callable[[], None]:
        engine = self.engine
        submit = engine.batch_transfer_async_write if op == "write" else engine.batch_transfer_async_read
        lengths = [block_bytes] * len(ours)

        def move() -> None:
            batch = submit(self.session, ours, theirs, lengths)
            if not batch or engine.get_batch_transfer_status([batch]):
                raise RuntimeError("the batch failed")

        return move


if __name__ == "__main__":
    pair.main(Mooncake)
