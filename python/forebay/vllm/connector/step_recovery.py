"""How a step is undone that computed from a load which failed: its requests are preempted and start over.
Those that have left meanwhile leave nothing in vLLM's cache.

Knows vLLM's scheduler from within, and how steps are counted that were scheduled before their tokens are
known. Why, and what else was thought of: `docs/decisions/014-a-failed-step-is-a-preemption.md`. Must never
know why a load failed.
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

# A request's blocks, of each group of layers.
Tables: TypeAlias = Sequence[Sequence[int]]

# What a request says of steps that were scheduled before their tokens are known, in versions that drop none.
COUNTS_AHEAD = {"async_tokens_to_discard", "num_in_flight_tokens", "num_output_placeholders"}


def install_step_recovery() -> bool:
    """Has vLLM preempt the requests that computed from a load that failed in their own step.

    vLLM lets them go on with fewer tokens computed than they had. That gives other tokens with steps that are
    scheduled ahead, whose tokens count all the same, and with the V2 model runner, which adds up on the GPU
    what is computed (https://github.com/vllm-project/vllm/issues/49250). What makes room for others is right
    in both: it begins anew, with what vLLM's cache still has. False: this vLLM has other names for that.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    handle = getattr(Scheduler, "_handle_invalid_blocks", None)
    vllms_own = getattr(Scheduler, "_preempt_request", None)
    if handle is None or vllms_own is None:
        return False
    if not (can_drop_stale_output(vllms_own) or COUNTS_AHEAD <= set(Request.__init__.__code__.co_names)):
        return False
    if handle.__module__ == __name__:
        return True

    def handle_and_recover(self: Any, invalid: set[int], scheduled: Mapping[str, int]) -> set[str]:
        reached = {one.request_id: computed_after(one, scheduled) for one in self.running}
        failed: set[str] = handle(self, invalid, scheduled)
        mine = forebay_connector_of(self.connector)
        if mine is None:
            return failed
        firsts = {name: evict(self, tables, invalid) for name, tables in mine.departed_requests()}
        left = {name: first for name, first in firsts.items() if first is not None}
        over = [one for one in reversed(self.running) if one.request_id in failed]
        if self.recompute_kv_load_failures and (over or left):
            for request in over:
                preempt(self, request, invalid, reached[request.request_id], mine)
            restart_waiting_loads(self, invalid, mine)
        return failed | {
            name for name in left.keys() & scheduled.keys() if drop_token(self, name, left[name], mine)
        }

    Scheduler._handle_invalid_blocks = handle_and_recover
    return True


def forebay_connector_of(connector: Any) -> Any:
    """A scheduler's connector if it is Forebay's, or Forebay's among several that it has, or None."""
    several = getattr(connector, "_connectors", None)
    each = several if isinstance(several, list) else [connector]
    return next((one for one in each if type(one).__module__.startswith("forebay.vllm")), None)


def can_drop_stale_output(vllms_own: Callable[..., Any]) -> bool:
    """Whether vLLM can be told with a preemption to drop what steps that are under way will say."""
    return "drop_stale_output" in inspect.signature(vllms_own).parameters


def computed_after(request: Any, scheduled: Mapping[str, int]) -> int:
    """Tokens of a request that are computed when the step ends whose output has come."""
    of_step = scheduled.get(request.request_id, 0)
    return int(request.num_computed_tokens - request.num_in_flight_tokens + of_step)


def evict(scheduler: Any, tables: Tables, invalid: Set[int]) -> int | None:
    """Takes a request's `invalid` blocks out of vLLM's cache, with those behind them. The place of the first
    one; None: it has none.
    """
    if all(invalid.isdisjoint(table) for table in tables):
        return None
    first = 0
    if len(tables) == 1:
        first = next(place for place, block in enumerate(tables[0]) if block in invalid)
    scheduler.kv_cache_manager.evict_blocks({block for table in tables for block in table[first:]})
    return first


def drop_token(scheduler: Any, name: str, first: int, mine: Any) -> bool:
    """A request that was preempted after the step that computed from a failed load gets no token of that."""
    request = scheduler.requests.get(name)
    if request is None or request.status.name != "PREEMPTED":
        return False
    if getattr(request, "async_tokens_to_discard", 0):
        return False  # A reset has preempted it, and vLLM drops that token itself.
    mine.step_undone(request, first, request.num_preemptions == 1)
    request.num_output_placeholders = max(0, request.num_output_placeholders - 1)
    return True


def preempt(scheduler: Any, request: Any, invalid: Set[int], reached: int, mine: Any) -> None:
    """Preempts a request of which `reached` tokens were computed, some from `invalid` blocks."""
    first = evict(scheduler, scheduler.kv_cache_manager.get_block_ids(request.request_id), invalid)
    mine.step_undone(request, first or 0, not request.num_preemptions)
    scheduler.running.remove(request)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    if can_drop_stale_output(scheduler._preempt_request):
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        return
    scheduler._preempt_request(request, time.monotonic())
    # The step whose output has come gave a token if it reached the last one known. The others are to come.
    to_come = request.num_output_placeholders - (reached >= request.num_tokens)
    request.async_tokens_to_discard += max(0, to_come)
    request.num_output_placeholders = 0


def restart_waiting_loads(scheduler: Any, invalid: set[int], mine: Any) -> None:
    """Those that wait for loads of their own behind blocks that others' loads have spoiled: when these have
    ended, vLLM takes all of their blocks back and asks again what there is.
    """
    tables = scheduler.kv_cache_manager.get_block_ids
    for request in scheduler.requests.values():
        if request.status.name != "WAITING_FOR_REMOTE_KVS":
            continue
        if not all(invalid.isdisjoint(table) for table in tables(request.request_id)):
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
            mine.blocks_lost(request)
