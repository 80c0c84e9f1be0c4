#!/usr/bin/env python3
"""Torture worker for Mooncake's store: a master and a client with replicas on the local disk, over TCP.

A value is an object. Its first replica is in the client's memory, of which there is as much as the suite
gives for values on their way; the second is written to disk, a file each, when the client's heartbeat next
asks the master what to write: every second here, and not every ten. All else is as it is by default.
"""

import os
import time
from pathlib import Path
from typing import Any

os.environ["MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR"] = "file_per_key_storage_backend"
os.environ["MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS"] = "1"

import mooncake
import server
import worker
from mooncake.store import MooncakeDistributedStore

OPEN_S, SPACE_S, WRITTEN_S, POLL_S = 60, 10, 45, 0.02
SECTOR = 512
HEADER_BYTES = 14


class Mooncake:
    """A client, and the master that it has to itself."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.namespace, self.unwritten = setup["namespace"], dict[int, None]()
        # In its file an object follows its name. The suite looks for values at multiples of a
        # sector.
        self.padding = bytes(SECTOR - HEADER_BYTES - len(self.name(0)))
        os.environ["MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"] = str(setup["capacity_bytes"])
        port, metrics_port = server.free_port(), server.free_port()
        self.master = server.start(
            str(Path(mooncake.__file__).with_name("mooncake_master")),
            rpc_address="127.0.0.1",
            rpc_port=port,
            metrics_host="127.0.0.1",
            metrics_port=metrics_port,
            enable_offload="true",
        )
        deadline = time.monotonic() + OPEN_S
        while True:
            self.store = MooncakeDistributedStore()
            failed = self.store.setup(
                f"127.0.0.1:{server.free_port()}",
                "P2PHANDSHAKE",
                setup["staging_bytes"],
                setup["staging_bytes"],
                "tcp",
                "",
                f"127.0.0.1:{port}",
                enable_ssd_offload=True,
                ssd_offload_path=setup["dir"],
            )
            if not failed:
                return
            if self.master.poll() is not None or time.monotonic() > deadline:
                raise worker.Refused(f"setup returned {failed}")
            time.sleep(0.2)

    def name(self, key: int) -> str:
        """Mooncake's name for a value: model and number."""
        return f"{self.namespace}@{key:08}"

    def put(self, key: int, value: bytes) -> None:
        """Stores an object; waits a while for memory, which is freed when objects are on disk."""
        deadline = time.monotonic() + SPACE_S
        while failed := self.store.put(self.name(key), self.padding + value):
            if time.monotonic() > deadline:
                raise worker.Refused(f"put returned {failed}")
            time.sleep(POLL_S)
        self.unwritten[key] = None

    def get_many(self, keys: list[int]) -> list[bytes | None]:
        """Reads objects with one call; an empty one is none."""
        found = self.store.get_batch([self.name(key) for key in keys])
        return [value[len(self.padding) :] if value else None for value in found]

    def delete(self, key: int) -> None:
        """Removes an object and its replicas, also while a lease of a reader lasts."""
        self.unwritten.pop(key, None)
        name = self.name(key)
        if self.store.is_exist(name) and (failed := self.store.remove(name, force=True)):
            raise worker.Refused(f"remove returned {failed}")

    def is_waiting(self, key: int) -> bool:
        """Whether an object is in memory only."""
        replicas = self.store.get_replica_desc(self.name(key))
        return bool(replicas) and not any(replica.is_local_disk_replica() for replica in replicas)

    def flush(self) -> None:
        """Waits until each object that is still there has a replica on disk."""
        deadline = time.monotonic() + WRITTEN_S
        for key in list(self.unwritten):
            while self.is_waiting(key):
                if time.monotonic() > deadline:
                    self.unwritten.clear()
                    raise worker.Refused(f"objects are not on disk after {WRITTEN_S} s")
                time.sleep(POLL_S)
            self.unwritten.pop(key, None)

    def close(self) -> None:
        """Closes the client, after what is on its way to the disk, and ends its master."""
        try:
            self.flush()
        except worker.Refused:
            pass
        self.store.close()
        # The client takes its leave of the master when it is gone.
        del self.store
        self.master.terminate()
        self.master.wait()


if __name__ == "__main__":
    worker.serve(Mooncake)
