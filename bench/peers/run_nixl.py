"""NIXL over UCX's tcp, as `forebay bench net --peer` calls it.

With `--segment gpu` the blocks lie in memory of GPUs, and UCX_TLS says how they go: `tcp,cuda_copy`, or
`cuda_ipc,cuda_copy,tcp`. With NIXL_MODULE=forebay.nixl: Forebay through the same calls. Needs
`pip install --no-deps nixl-cu13==1.5.1` and `pip install numpy`. Waits by polling each 100 us, which costs
NIXL less on few cores than spinning does.
"""

import importlib
import importlib.metadata
import os
import time
from collections.abc import Callable
from typing import Any

import pair

MODULE = os.environ.get("NIXL_MODULE", "nixl_cu13")
POLL_S = 100e-6
LIMIT_S = 120.0


class Nixl:
    """An end of NIXL."""

    def __init__(self, memory: pair.Memory | pair.GpuMemory, role: str) -> None:
        os.environ.setdefault("UCX_TLS", "tcp")
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        api = importlib.import_module(f"{MODULE}._api")
        self.name = "NIXL" if MODULE.startswith("nixl") else "forebay-nixl"
        self.version = importlib.metadata.version(MODULE.split(".")[0].replace("_", "-"))
        self.agent = api.nixl_agent(role, api.nixl_agent_config(backends=["UCX"]))
        self.kind, self.device = memory.kind, memory.device
        whole = [(memory.address, memory.length, memory.device, "")]
        self.registered = self.agent.register_memory(whole, memory.kind)
        self.peer = ""

    def address(self) -> Any:
        return self.agent.get_agent_metadata()

    def meet(self, other: Any) -> None:
        peer = self.agent.add_remote_agent(other)
        self.peer = peer.decode() if isinstance(peer, bytes) else peer

    def prepare(
        self, op: str, ours: list[int], theirs: list[int], block_bytes: int, their_device: int
    ) -> Callable[[], None]:
        import numpy as np

        def table(addresses: list[int], device: int) -> Any:
            rows = np.zeros((len(addresses), 3), dtype=np.uint64)
            rows[:, 0], rows[:, 1], rows[:, 2] = addresses, block_bytes, device
            return rows

        local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", table(ours, self.device), self.kind)
        remote = self.agent.prep_xfer_dlist(self.peer, table(theirs, their_device), self.kind)
        every = np.arange(len(ours), dtype=np.int32)
        request = self.agent.make_prepped_xfer(op.upper(), local, every, remote, every, b"")

        def move() -> None:
            state, until = self.agent.transfer(request), time.monotonic() + LIMIT_S
            while state == "PROC":
                if time.monotonic() > until:
                    raise TimeoutError(f"no end after {LIMIT_S} s")
                time.sleep(POLL_S)
                state = self.agent.check_xfer_state(request)
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")

        return move


if __name__ == "__main__":
    pair.main(Nixl)
