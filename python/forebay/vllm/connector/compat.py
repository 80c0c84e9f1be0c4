"""What differs between vLLM 0.26 to 0.33, and what the connector needs of vLLM's private parts.

The other files of the connector use only what all of these versions have.
"""

import importlib.util
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.outputs import KVConnectorOutput

from forebay.errors import InvalidError
from forebay.vllm.connector.groups import fail_as_one, groups_of, layers_of

# Each block of a layer in one piece, heads before tokens or behind them: old names and new ones.
LAYOUT_NAMES = {"HND": "LBHNC", "NHD": "LBNHC"}
LAYOUTS_HAVE_NEW_NAMES = importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None

# Whether workers report failed loads by request. If not, they report blocks.
FAILURES_BY_REQUEST = "failed_recving" in {field.name for field in fields(KVConnectorOutput)}


def cpu_kernel(vllm_config: Any, block_tokens: int, head_size: int) -> str | None:
    """How vLLM on this CPU lays out a block; None on other platforms."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype = vllm_config.model_config.dtype
    return str(_get_attn_isa(dtype, block_tokens, head_size, vllm_config.cache_config.cache_dtype))


def layer_number(name: str) -> int:
    """The place of a layer in the model: the first number in its name."""
    found = re.search(r"\d+", name)
    return int(found.group()) if found else -1


def transfer_results(sent: set[str] | None, received: set[str] | None, failed: set[str]) -> Any:
    """A worker's answer, where it reports failed loads by request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(sent or set(), received or set(), failed)


def hit_sources(tokens: Mapping[str, int]) -> Any:
    """Loaded tokens by tier, in vLLM's words, which it has from 0.32 on."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    names = {"memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "peer": CacheHitSource.P2P}
    return {names[tier]: count for tier, count in tokens.items() if count}


# Called before this worker's GPU memory goes, with whether KV will survive.
_before_sleep: list[Callable[[bool], None]] = []


def before_sleep(drain: Callable[[bool], None]) -> None:
    """Has `drain` called before vLLM's sleep mode unmaps the KV cache. 0.33 does so itself."""
    from vllm.v1.worker.gpu_worker import Worker

    _before_sleep.append(drain)
    sleep = Worker.sleep
    if hasattr(KVConnectorBase_V1, "unregister_kv_caches") or sleep.__module__ == __name__:
        return

    def sleep_when_drained(self: Any, level: int = 1) -> None:
        find = getattr(self, "_get_sleep_mode_backend", None)  # Since 0.32 it is a property.
        backend = self.sleep_mode_backend if find is None else find()
        keeps_kv = getattr(backend, "keeps_kv", None)
        for drain in _before_sleep:
            drain(keeps_kv is not None and keeps_kv(level))
        sleep(self, level)

    Worker.sleep = sleep_when_drained


def not_before_sleep(drain: Callable[[bool], None]) -> None:
    """Takes `before_sleep` back."""
    _before_sleep.remove(drain)


# Called before the V2 model runner writes to this worker's blocks, with the connector's message.
_before_writes: list[Callable[[Any], None]] = []


def before_writes(flush: Callable[[Any], None]) -> None:
    """Has `flush` called before the V2 model runner zeroes blocks and copies to them.

    It does so before connectors hear of the step that these blocks were given out for. V1 does not.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    update = getattr(GPUModelRunner, "update_requests", None)
    if update is None:
        raise InvalidError(
            "the V2 model runner has no update_requests, so it might write to blocks that are still stored; "
            "allowed is VLLM_USE_V2_MODEL_RUNNER=0"
        )
    _before_writes.append(flush)
    if update.__module__ == __name__:
        return

    def flush_and_update(self: Any, scheduler_output: Any) -> None:
        for flush in _before_writes:
            flush(scheduler_output.kv_connector_metadata)
        update(self, scheduler_output)

    GPUModelRunner.update_requests = flush_and_update


def not_before_writes(flush: Callable[[Any], None]) -> None:
    """Takes `before_writes` back."""
    if flush in _before_writes:
        _before_writes.remove(flush)


# Called before and after workers read an adapter's files.
_when_adapters_load: list[Callable[[Any], None]] = []


def when_adapters_load(look: Callable[[Any], None]) -> None:
    """Has `look` called before and after workers load an adapter without a prompt that uses it."""
    from vllm.v1.engine.core import EngineCore

    _when_adapters_load.append(look)
    add = EngineCore.add_lora
    if add.__module__ == __name__:
        return

    def add_and_look(self: Any, lora_request: Any) -> bool:
        for look in _when_adapters_load:
            look(lora_request)
        added = bool(add(self, lora_request))
        for look in _when_adapters_load:
            look(lora_request)
        return added

    EngineCore.add_lora = add_and_look


def not_when_adapters_load(look: Callable[[Any], None]) -> None:
    """Takes `when_adapters_load` back."""
    if look in _when_adapters_load:
        _when_adapters_load.remove(look)


def find_failures_in_all_groups() -> None:
    """Has vLLM compute requests whose loads fail as a whole from their first token on.

    Where blocks are reported, vLLM expects one group of layers, ends with an error if there are
    several, and goes on behind blocks of a window that it does not have.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    find_blocks = Scheduler._update_requests_with_invalid_blocks
    if FAILURES_BY_REQUEST or find_blocks.__module__ == __name__:
        return

    def find(
        self: Any,
        requests: Iterable[Any],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,
    ) -> Any:
        if not fail_as_one(groups_of(self.kv_cache_config)):
            return find_blocks(self, requests, invalid_block_ids, num_scheduled_tokens, evict_blocks)
        tables = self.kv_cache_manager.get_block_ids
        failed = [
            request
            for request in requests
            if not all(invalid_block_ids.isdisjoint(table) for table in tables(request.request_id))
        ]
        if evict_blocks:  # Requests that compute. There is none: these have waited for their loads.
            return find_blocks(self, failed, invalid_block_ids, num_scheduled_tokens, evict_blocks)
        tokens = sum(request.num_computed_tokens for request in failed)
        for request in failed:
            request.num_computed_tokens = 0  # vLLM takes its blocks back and asks again.
        return {request.request_id for request in failed}, tokens, set()

    Scheduler._update_requests_with_invalid_blocks = find


def end_of(position: Any) -> int:
    """The first token behind an image."""
    return int(position.offset + position.length)


@dataclass(frozen=True)
class EventBlocks:
    """What KV events say of blocks. Those of one group of layers stand for those of all groups."""

    group: int
    block_tokens: int
    hash_tokens: int  # of each hash of a request; a block may have several
    kind: str
    window: int | None

    def hashes(self, request: Any, start: int, end: int) -> list[Any]:
        """The hashes of the whole blocks from token `start` to `end`: the last hash of each."""
        last = self.block_tokens // self.hash_tokens - 1
        found = request.block_hashes[start // self.hash_tokens : end // self.hash_tokens]
        return [maybe_convert_block_hash(one) for one in found[last :: last + 1]]

    def extra_keys(self, request: Any, start: int, end: int) -> list[Any]:
        """For each of these blocks, what its hash depends on beside tokens, as events say it."""
        size, keys = self.block_tokens, []
        # The first image that ends behind `start`. vLLM would search from the first image on.
        image = bisect_right(request.mm_features, start, key=lambda one: end_of(one.mm_position))
        for first in range(start, end, size):
            of_block, image = generate_block_hash_extra_keys(request, first, first + size, image)
            keys.append(of_block)
        # From 0.32 on a key says its kind, which events leave out.
        plain = getattr(kv_cache_utils, "to_event_extra_keys", list)
        return list(plain(keys))

    def hash_before(self, request: Any, start: int) -> Any:
        """The hash of the block that ends at `start`."""
        return maybe_convert_block_hash(request.block_hashes[start // self.hash_tokens - 1])


def event_blocks(vllm_config: Any, kv_cache_config: Any) -> EventBlocks | None:
    """Blocks of the first group with KV of all tokens, or with any. None: no events wanted."""
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    windows = [get_kv_cache_spec_sliding_window(spec) for spec in specs]
    groups = groups_of(kv_cache_config, vllm_config.parallel_config.decode_context_parallel_size)
    of_tokens = [number for number, one in enumerate(groups) if one.paged]
    group = next((number for number in of_tokens if not groups[number].leaves), of_tokens[0])
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    kind = str(get_kv_cache_spec_kind(specs[group]).value)
    return EventBlocks(group, groups[group].block_tokens, hash_tokens, kind, windows[group])


def hit_only_where_states_are() -> None:
    """Has vLLM's own cache hit only up to where all groups of layers hit.

    With a connector, 0.26 hits as far as any group does, and expects the connector to bring the
    states. From 0.32 on vLLM asks the connector whether it does.
    """
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

    if hasattr(KVConnectorBase_V1, "supports_divergent_local_hybrid_hits"):
        return

    def find(self: Any, block_hashes: Any, longest: int) -> Any:
        blocks, tokens, *_ = self.find_longest_cache_hit(block_hashes, longest)
        return blocks, (tokens,) * len(blocks)

    HybridKVCacheCoordinator.find_longest_cache_hit_per_group = find


def refuse_foreign_managers(kv_cache_config: Any) -> None:
    """Refuses layers whose blocks something else than vLLM manages: it may give them back anywhere."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    for group in kv_cache_config.kv_cache_groups:
        for name, spec in layers_of(group).items():
            manager = KVCacheSpecRegistry.get_manager_class(spec)
            if manager is not None and not manager.__module__.startswith("vllm.v1."):
                raise InvalidError(
                    f"layer {name}: the blocks of {type(spec).__name__} are managed by "
                    f"{manager.__module__}.{manager.__name__}; allowed are vLLM's own managers"
                )


def stop_at(request: Any, token: int) -> None:
    """Has vLLM end a step at this token if a block ends there, so that there is a state."""
    request.shared_prefix_boundary = token


def cut_prompt(request: Any) -> None:
    """Cuts the last token off a new prompt. The request then ends with one useless token."""
    if request.num_prompt_tokens > 1:
        request.prompt_token_ids.pop()
        request._all_token_ids.pop()
        request.num_prompt_tokens -= 1
        request.max_tokens = 1


def trace_of(request: Any) -> str | None:
    """The `traceparent` that came with a request. vLLM keeps it if it traces itself."""
    headers = getattr(request, "trace_headers", None)
    return headers.get("traceparent") if headers else None


def may_end(request: Any) -> bool:
    """Whether a request that asks for blocks may end before it gets them, by a token in flight.

    With three steps in flight, 0.26 asks for a request that it has just preempted. If a token ends
    it then, 0.26 does not find it among waiting requests, and dies. 0.32 and 0.33 do not ask.
    """
    in_flight = request.num_preemptions and request.num_in_flight_tokens
    return bool(in_flight) and not getattr(request, "async_tokens_to_discard", 0)


def most_tokens(vllm_config: Any) -> tuple[int, int, int]:
    """The longest request, how far beyond its tokens a step may take blocks for drafts, and the
    tokens that a step computes at most.
    """
    drafts = drafts_of(vllm_config)
    drafts = 2 * (drafts + 1) if drafts else 0
    most = vllm_config.model_config.max_model_len
    return int(most), 1 + drafts, int(vllm_config.scheduler_config.max_num_batched_tokens)


def drafts_of(vllm_config: Any) -> int:
    """The most drafts of a request in a step."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens)


def runs_v2(vllm_config: Any) -> bool:
    """Whether the V2 model runner is used. CPUs have V1."""
    from vllm.platforms import current_platform

    return bool(not current_platform.is_cpu() and getattr(vllm_config, "use_v2_model_runner", False))


def needs_drafts() -> bool:
    """Whether a step without drafts reads the wrong state, behind a step of which some were accepted."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return "zero_draft_decode_mask" not in GPUModelRunner._prepare_inputs.__code__.co_varnames


def in_lockstep(vllm_config: Any) -> bool:
    """Whether other engines wait for each step of this one, even for those that compute nothing."""
    several = vllm_config.parallel_config.data_parallel_size > 1
    return bool(several and vllm_config.model_config.is_moe)


def state_order() -> str:
    """How vLLM lays out the states of convolutions."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return "DS" if is_conv_state_dim_first() else "SD"


def writes_kv_first(output: Any) -> bool:
    """Whether workers write to blocks before they compute, and before layers are loaded."""
    return bool(output.new_block_ids_to_zero or output.kv_cache_block_copies)


def runs_whole_graph(forward_context: Any) -> bool:
    """Whether no layer's hook is called in this step: it computes nothing, or is one CUDA graph."""
    mode = forward_context.cudagraph_runtime_mode.name
    return forward_context.attn_metadata is None or mode == "FULL"


def stream_of(device: Any) -> int:
    """The stream of the engine's kernels; 0 on CPUs."""
    if device.type != "cuda":
        return 0
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def layout_name(layout: str) -> str:
    """What vLLM calls a layout."""
    return LAYOUT_NAMES[layout] if LAYOUTS_HAVE_NEW_NAMES else layout


def devices_of_ranks(vllm_config: Any) -> range:
    """The GPUs of all workers on this host. vLLM gives them out from 0 on."""
    parallel = vllm_config.parallel_config
    return range(parallel.local_world_size * max(1, parallel.data_parallel_size_local))


def world(vllm_config: Any) -> tuple[int, int]:
    """This worker's rank, tensor-parallel ranks first, and the number of ranks."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    rank, ranks = 0, 1
    for group in (get_pp_group(), get_pcp_group(), get_tp_group()):
        rank, ranks = rank * group.world_size + group.rank_in_group, ranks * group.world_size
    return rank, ranks
