"""A secondary tier for vLLM's OffloadingConnector: the node keeps blocks of its CPU tier.

It implements vLLM's `SecondaryTierManager` by `forebay.pages`, on two threads, so that a load never
waits for stores. vLLM's scheduler thread only puts jobs into queues, which the CPU tier's size
bounds. It is for engines that use the OffloadingConnector already.
"""

import dataclasses
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import vllm
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from forebay._forebay import Node, NodeMemory
from forebay._fork_guard import ForkGuard
from forebay.pages import Extent, Pages, check_digest, check_flag, check_socket, namespace, read_secret

# vLLM's types, by the names of its newest version: `TransferJob` is `JobMetadata` in 0.26.
OffloadKey: TypeAlias = bytes
ReqContext: TypeAlias = Any
TransferJob: TypeAlias = Any

logger = init_logger("vllm.forebay.tiering")

SOCKET = "/run/forebay/node.sock"
RESULT_FIELDS = frozenset(field.name for field in dataclasses.fields(JobResult))


def facts(config: Any, row_bytes: int, weights_digest: str) -> dict[str, object]:
    """What a block's bytes depend on besides its key, which covers tokens, salts, and the names of
    adapters and contents. What a name stands for is for the digest to cover.

    vLLM decides how the CPU tier lays out a block, so its version and all sizes are part of it. In
    doubt, engines share nothing.
    """
    return {
        "engine": f"vllm {vllm.__version__}",
        "weights": check_digest(weights_digest),
        "dtype": str(config.model.dtype),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "row_bytes": row_bytes,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "parallel": [
            config.parallel.world_size,
            config.parallel.tp_size,
            config.parallel.pp_size,
            config.parallel.pcp_size,
            config.parallel.dcp_size,
        ],
        "layout": [str(getattr(config, name, None)) for name in ("kv_cache_layout", "canonical_layout")],
    }


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Asks the node on a thread of its own, once a step for all blocks of a request."""

    def __init__(self, tier_type: str, pages: Pages) -> None:
        super().__init__(tier_type=tier_type)
        self._pages = pages

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._pages.which(keys)


class ForebayTierManager(SecondaryTierManager):  # type: ignore[misc]  # as above
    """The tier `forebay`. Its settings are the constructor's last four arguments.

    `weights_digest` stands for the weights (64 hexadecimal digits), `node` is the node's socket,
    `token_file` holds the secret that the node asks for, and `keep_on_reset` says that weights
    never change while the engine lives.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        weights_digest: str,
        node: str = SOCKET,
        token_file: str | None = None,
        keep_on_reset: bool = False,
        **newer: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, **newer)
        self._fork_guard = ForkGuard()
        assert primary_kv_view.strides is not None
        self._row_bytes = primary_kv_view.strides[0]
        self._keep_on_reset = check_flag("keep_on_reset", keep_on_reset)
        token = read_secret("token_file", token_file)
        self._node = Node(check_socket(node), token=token, name=f"vllm {tier_type}", wait=True)
        # Given up with the tier: vLLM cannot release its view before.
        self._memory: NodeMemory | None = self._node.register_memory(primary_kv_view)
        self._base = self._memory.address
        self._pages = Pages(
            self._node, namespace(facts(offloading_spec.config, self._row_bytes, weights_digest))
        )
        logger.info("tier %s on the node at %s: blocks of %d bytes", tier_type, node, self._row_bytes)
        self._lookup_manager = _Lookups(tier_type, self._pages)
        # Blocks that could not be loaded, by request. vLLM keeps the answer to a lookup as long as
        # a request lives: it would ask for a block that is gone for ever, and never compute.
        self._failed: dict[str, set[OffloadKey]] = {}
        self._loads = ThreadPoolExecutor(1, "forebay_loads")
        self._stores = ThreadPoolExecutor(1, "forebay_stores")
        self._under_way: set[Future[None]] = set()
        # A job, whether each of its blocks was moved, and the seconds that took.
        self._ended: SimpleQueue[tuple[TransferJob, list[bool], float]] = SimpleQueue()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the node has a block. The first answer is "later"."""
        if key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        found = self._lookup_manager.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._stores, self._pages.store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loads, self._pages.load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that ended since the last call. Nothing touches their blocks any more."""
        results: list[JobResult] = []
        while True:
            try:
                job, good, seconds = self._ended.get_nowait()
            except Empty:
                return results
            results.append(self._result(job, good, seconds))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._failed[req_context.req_id] = set()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookup_manager.cleanup(req_context.req_id)
        self._failed.pop(req_context.req_id, None)

    def on_schedule_end(self, context: Any) -> None:
        self._lookup_manager.flush()

    def drain_jobs(self) -> None:
        """Waits until nothing touches the CPU tier's memory, and forgets what was stored.

        vLLM calls it for resets alone: when weights change, and whenever it falls asleep.
        """
        self._fork_guard.check()
        wait(list(self._under_way))
        if not self._keep_on_reset:
            self._pages.forget()
            logger.info("reset: blocks that were stored until now are not found any more")

    def shutdown(self) -> None:
        """Ends the threads and releases the CPU tier's memory. Queued jobs are dropped."""
        self._fork_guard.check()
        self._lookup_manager.shutdown()
        for pool in (self._stores, self._loads):
            pool.shutdown(cancel_futures=True)
        self._node.close()
        self._memory = None

    def _submit(self, pool: ThreadPoolExecutor, move: Any, job: TransferJob) -> None:
        self._fork_guard.check()
        future = pool.submit(self._run, move, job)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)

    def _run(self, move: Any, job: TransferJob) -> None:
        """Runs a job on its thread. It ends exactly once, whatever happens."""
        begun = time.monotonic()
        good = [False] * len(job.keys)
        try:
            good = move(list(job.keys), self._places(job))
        except Exception:  # Nobody looks at the future.
            logger.exception("a job of %d blocks has failed", len(job.keys))
        finally:
            self._ended.put((job, good, time.monotonic() - begun))

    def _places(self, job: TransferJob) -> list[list[Extent]]:
        rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
        return [[(self._base + int(row) * self._row_bytes, self._row_bytes)] for row in rows]

    def _result(self, job: TransferJob, good: list[bool], seconds: float) -> JobResult:
        moved = [key for key, is_good in zip(job.keys, good, strict=True) if is_good]
        fell_short = job.is_promotion and not all(good)
        if fell_short and job.req_context.req_id in self._failed:
            self._failed[job.req_context.req_id].update(set(job.keys).difference(moved))
        known = {
            "job_id": job.job_id,
            "success": all(good),
            "successful_keys": moved if fell_short else None,
            "transfer_time": seconds,
            "transfer_bytes": len(moved) * self._row_bytes,
        }
        return JobResult(**{name: value for name, value in known.items() if name in RESULT_FIELDS})
