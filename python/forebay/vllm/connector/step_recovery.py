"""Undoes a step that computed from a load which failed: its requests are preempted and start over.

Requests that have left meanwhile leave nothing wrong in vLLM's cache. This file patches vLLM's
scheduler, and knows how vLLM counts steps that were scheduled before their tokens are known. The
reasons are in `docs/decisions/014-a-failed-step-is-a-preemption.md`.
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

from vllm.logger import init_logger

from forebay._log import LimitedLog

limited = LimitedLog(init_logger("vllm.forebay.scheduler"))

# A request's blocks, of each group of layers.
Tables: TypeAlias = Sequence[Sequence[int]]

# How versions without `drop_stale_output` count steps that were scheduled ahead.
COUNTS_AHEAD = {
    "async_tokens_to_discard",
    "is_prefill_chunk",
    "num_in_flight_tokens",
    "num_output_placeholders",
}


def install_step_recovery() -> bool:
    """Has vLLM preempt the requests that computed from a load that failed in their own step.

    vLLM itself lets them go on with fewer computed tokens. That gives wrong tokens with steps that
    are scheduled ahead, which count all the same, and with the V2 model runner, which counts on the
    GPU (https://github.com/vllm-project/vllm/issues/49250). A preemption is right in both: the
    request begins anew with what vLLM's cache still has. False: this vLLM counts in another way.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    handle, preempt_request = Scheduler._handle_invalid_blocks, Scheduler._preempt_request
    counts_ahead = set(Request.__init__.__code__.co_names) >= COUNTS_AHEAD
    if not (can_drop_stale_output(preempt_request) or counts_ahead):
        return False
    if handle.__module__ == __name__:
        return True

    def handle_and_recover(self: Any, invalid: set[int], scheduled: Mapping[str, int]) -> set[str]:
        failed: set[str] = handle(self, invalid, scheduled)
        half = scheduler_half_of(self.connector)
        if half is None:
            return failed
        firsts = {name: evict(self, tables, invalid) for name, tables in half.departed_requests()}
        left = {name: first for name, first in firsts.items() if first is not None}
        over = [one for one in reversed(self.running) if one.request_id in failed]
        if self.recompute_kv_load_failures and (over or left):
            for request in over:
                preempt(self, request, invalid, scheduled, half)
            restart_waiting_loads(self, invalid, half)
            limited.warning("a load failed under a step: %d of its requests start over", len(over))
        return failed | {
            name for name in left.keys() & scheduled.keys() if drop_token(self, name, left[name], half)
        }

    Scheduler._handle_invalid_blocks = handle_and_recover
    return True


def scheduler_half_of(connector: Any) -> Any:
    """The half of Forebay's connector, which is the scheduler's own or one of several; or None."""
    several = getattr(connector, "_connectors", None)
    each = several if isinstance(several, list) else [connector]
    return next((one._scheduler for one in each if type(one).__module__.startswith("forebay.vllm")), None)


def can_drop_stale_output(preempt_request: Callable[..., Any]) -> bool:
    """Whether a preemption can drop the output of steps in flight."""
    return "drop_stale_output" in inspect.signature(preempt_request).parameters


def evict(scheduler: Any, tables: Tables, invalid: Set[int]) -> int | None:
    """Takes a request's first `invalid` block, and those behind it, out of vLLM's cache.

    Returns the place of that block; None if there is none.
    """
    if all(invalid.isdisjoint(table) for table in tables):
        return None
    first = 0
    if len(tables) == 1:
        first = next(place for place, block in enumerate(tables[0]) if block in invalid)
    scheduler.kv_cache_manager.evict_blocks({block for table in tables for block in table[first:]})
    return first


def drop_token(scheduler: Any, name: str, first: int, half: Any) -> bool:
    """Drops the token of a request that was preempted after the step with the failed load."""
    request = scheduler.requests.get(name)
    if request is None or request.status.name != "PREEMPTED":
        return False
    if getattr(request, "async_tokens_to_discard", 0):
        return False  # A reset has preempted it, and vLLM drops that token itself.
    half.corrections.step_undone(request, first, request.num_preemptions == 1)
    request.num_output_placeholders = 0  # They are of this step: none that is ahead has this request.
    return True


def preempt(scheduler: Any, request: Any, invalid: Set[int], scheduled: Mapping[str, int], half: Any) -> None:
    """Preempts a request that computed from `invalid` blocks in the step of these `scheduled` tokens."""
    first = evict(scheduler, scheduler.kv_cache_manager.get_block_ids(request.request_id), invalid)
    half.corrections.step_undone(request, first or 0, not request.num_preemptions)
    scheduler.running.remove(request)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    if can_drop_stale_output(scheduler._preempt_request):
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        return
    scheduler._preempt_request(request, time.monotonic())
    # Only one step is ahead. vLLM drops what it gives at once, one token or several with drafts.
    is_ahead = request.num_in_flight_tokens > scheduled.get(request.request_id, 0)
    request.async_tokens_to_discard = int(is_ahead and not request.is_prefill_chunk)
    request.num_output_placeholders = 0


def restart_waiting_loads(scheduler: Any, invalid: set[int], half: Any) -> None:
    """Requests that wait for their own loads behind `invalid` blocks start over after these.

    vLLM then takes all of their blocks back and asks again what there is.
    """
    tables = scheduler.kv_cache_manager.get_block_ids
    for request in scheduler.requests.values():
        if request.status.name != "WAITING_FOR_REMOTE_KVS":
            continue
        if not all(invalid.isdisjoint(table) for table in tables(request.request_id)):
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
            half.blocks_lost(request.request_id)
