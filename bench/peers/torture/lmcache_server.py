"""`lmcache server` (multi-process mode) as the torture suite's store: a server of its own, spoken to by the
calls with which an engine without a GPU stores and retrieves (`engine_driven`).

A value is one chunk of 256 tokens, which its key chooses. The server keeps a chunk in its memory (L1) only
until it is on disk (`--l2-store-policy skip_l1`), so that values are read from the disk. All else is as
LMCache has it by default. A store is answered once a lookup finds the chunk; `flush` and `delete` wait until
the server says that it has nothing left to write.
"""

import dataclasses
import itertools
import json
import os
import shutil
import time
import urllib.request
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ["OMP_NUM_THREADS"] = "1"

import server
import torch
import worker
from lmcache.v1.distributed.api import ObjectKey, ipc_key_to_object_keys
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.token_codec import pack_token_ids
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.multiprocess.transfer_context.tensor_wire import decode_tensors, encode_tensors
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

CHUNK_TOKENS = 256
INSTANCE = 1
CALL_S, OPEN_S, WRITTEN_S, POLL_S = 50, 150, 45, 0.001
IDLE_LOOKS = 3


class Server:
    """A server with the L2 adapter `adapter`, and an engine's side of it."""

    def __init__(self, setup: dict[str, Any], adapter: dict[str, Any]) -> None:
        self.model, self.requests = setup["namespace"], itertools.count()
        self.shape = torch.Size([1, CHUNK_TOKENS, setup["value_bytes"] // CHUNK_TOKENS])
        self.hasher = TokenHasher(CHUNK_TOKENS)
        port, http_port = server.free_port(), server.free_port()
        self.http = f"http://127.0.0.1:{http_port}"
        options = {
            "host": "127.0.0.1",
            "port": port,
            "http-port": http_port,
            "chunk-size": CHUNK_TOKENS,
            "l1-size-gb": setup["staging_bytes"] / 2**30,
            "eviction-policy": "LRU",
            "supported-transfer-mode": "engine_driven",
            "l2-store-policy": "skip_l1",
            "l2-adapter": json.dumps(adapter),
        }
        program = shutil.which("lmcache")
        assert program is not None, "no `lmcache` on PATH"
        self.process = server.start(program, "server", "--no-l1-use-lazy", **options)
        self.client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        self.wait_until_up()
        layout = RegisterEngineDrivenContextPayload(
            instance_id=INSTANCE,
            model_name=self.model,
            world_size=1,
            block_size=16,
            num_layers=1,
            hidden_dim_size=self.shape[2],
            dtype_str="uint8",
            use_mla=True,
            num_physical_slots=CHUNK_TOKENS,
        )
        self.client.register_kv_cache_engine_driven_context(layout).result(timeout=CALL_S)

    def wait_until_up(self) -> None:
        """Waits until the server answers; `Refused` if it ends instead."""
        deadline = time.monotonic() + OPEN_S
        while True:
            try:
                urllib.request.urlopen(f"{self.http}/healthcheck", timeout=CALL_S).close()
                return
            except OSError:
                if self.process.poll() is not None:
                    raise worker.Refused(f"the server ended with {self.process.returncode}") from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def name(self, key: int) -> IPCCacheServerKey:
        """A request's name for a value: the tokens of its chunk."""
        return IPCCacheServerKey(
            model_name=self.model,
            world_size=1,
            worker_id=0,
            token_bytes=pack_token_ids([key + 1] * CHUNK_TOKENS),
            start=0,
            end=CHUNK_TOKENS,
            request_id=f"torture-{next(self.requests)}",
            num_kv_readers=1,
        )

    def object_key(self, key: int) -> ObjectKey:
        """The server's name for a value."""
        name = self.name(key)
        return ipc_key_to_object_keys(name, self.hasher.compute_packed_chunk_hashes(name.token_bytes), [0])[
            0
        ][0]

    def look_up(self, name: IPCCacheServerKey) -> MessagingFuture[None]:
        """Starts a lookup, which an engine's scheduler makes for all of its workers."""
        return self.client.lookup(dataclasses.replace(name, worker_id=None), 1)

    def found(self, request_id: str) -> bool:
        """Whether a lookup has found its chunk; it is in L1 then."""
        while (chunks := self.client.query_prefetch_status(request_id).result(timeout=CALL_S)) is None:
            time.sleep(POLL_S)
        return bool(chunks)

    def put(self, key: int, value: bytes) -> None:
        """Stores a chunk and waits until a lookup finds it."""
        name = self.name(key)
        chunk = torch.frombuffer(bytearray(value), dtype=torch.uint8).view(self.shape)
        self.client.prepare_store(name, INSTANCE).result(timeout=CALL_S)
        stored = self.client.commit_store(name, INSTANCE, encode_tensors([chunk])).result(timeout=CALL_S)
        self.client.end_session(name.request_id).result(timeout=CALL_S)
        looks = self.name(key)
        self.look_up(looks).result(timeout=CALL_S)
        found = self.found(looks.request_id)
        if found:
            self.client.free_lookup_locks(looks, 1).result(timeout=CALL_S)
        self.client.end_session(looks.request_id).result(timeout=CALL_S)
        if not stored or not found:
            raise worker.Refused("the server did not keep the chunk")

    def get_many(self, keys: list[int]) -> list[bytes | None]:
        """Looks all keys up, then retrieves what was found: a call of the server's is for one prefix."""
        names = [self.name(key) for key in keys]
        for lookup in [self.look_up(name) for name in names]:
            lookup.result(timeout=CALL_S)
        return [self.retrieve(name) for name in names]

    def retrieve(self, name: IPCCacheServerKey) -> bytes | None:
        """The chunk of a lookup, if there is one."""
        value = None
        if self.found(name.request_id):
            answer = self.client.prepare_retrieve(name, INSTANCE).result(timeout=CALL_S)
            if answer.success:
                expected = {"expected_shape": self.shape, "expected_dtype": torch.uint8, "expected_count": 1}
                [chunk] = decode_tensors(answer.data, **expected)
                value = chunk.numpy().tobytes()
            self.client.commit_retrieve(name, INSTANCE).result(timeout=CALL_S)
        self.client.end_session(name.request_id).result(timeout=CALL_S)
        return value

    def is_idle(self) -> bool:
        """Whether the server has nothing to write, by its status."""
        with urllib.request.urlopen(f"{self.http}/status", timeout=CALL_S) as answer:
            stores = json.load(answer)["storage_manager"]["store_controller"]
        return not any(
            stores[count]
            for count in ("pending_keys_count", "in_flight_task_count", "deferred_l1_deletion_count")
        )

    def flush(self) -> None:
        """Waits until the server has had nothing to write for some looks in a row."""
        deadline, idle = time.monotonic() + WRITTEN_S, 0
        while idle < IDLE_LOOKS:
            idle = idle + 1 if self.is_idle() else 0
            if time.monotonic() > deadline:
                raise worker.Refused(f"chunks are still on their way to L2 after {WRITTEN_S} s")
            time.sleep(0.01)

    def delete(self, key: int) -> None:
        """Deletes a chunk from memory and disk, after what is on its way to the disk."""
        self.flush()
        stored = self.object_key(key)
        wanted = {
            "chunk_hash_hex": stored.chunk_hash.hex(),
            "model_name": stored.model_name,
            "kv_rank": stored.kv_rank,
        }
        body = json.dumps({"tier": "all", "keys": [wanted]}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.http}/cache/objects", data=body, method="DELETE", headers=headers
        )
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            deleted = json.load(answer)
        if not deleted["ok"] or deleted["skipped"]:
            raise worker.Refused(f"not deleted: {deleted}")

    def close(self) -> None:
        """Ends the server with SIGTERM, after what is on its way to the disk."""
        try:
            self.flush()
        except worker.Refused:
            pass
        self.client.close()
        self.process.terminate()
        self.process.wait(timeout=CALL_S)
