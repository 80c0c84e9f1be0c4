"""vLLM's KV connector on a Forebay node: `ForebayConnector`.

Knows vLLM's interface, and which half answers which of its calls. Nothing is decided here.

    {"kv_connector": "ForebayConnector", "kv_connector_module_path": "forebay.vllm.connector",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"node": "/run/forebay/node.sock"}}
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

import forebay
from forebay.vllm import register
from forebay.vllm.connector import compat, step_recovery
from forebay.vllm.connector.config import settings_of
from forebay.vllm.connector.events import Events
from forebay.vllm.connector.metadata import Report, Step
from forebay.vllm.connector.namespace import facts_of
from forebay.vllm.connector.no_kv import NoKv
from forebay.vllm.connector.scheduler import SchedulerHalf
from forebay.vllm.connector.stats import PromMetrics, Stats
from forebay.vllm.connector.worker import WorkerHalf

__all__ = ["ForebayConnector"]

# A MultiConnector looks its connectors' statistics up by name, also where vLLM was told this module's path.
register()


class ForebayConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there when types are checked
    """One half of it: vLLM makes one of these in its scheduler and one in each worker."""

    # The half that this is; there is no other here. Each step uses it, so it is no property.
    _plans: SchedulerHalf | NoKv
    _here: WorkerHalf

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """The half that `role` names."""
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerHalf | NoKv | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER and not kv_cache_config.kv_cache_groups:
            self._scheduler = self._plans = NoKv(vllm_config)
        elif role == KVConnectorRole.SCHEDULER:
            facts = facts_of(vllm_config, kv_cache_config, settings)
            name = f"vllm {vllm_config.kv_transfer_config.engine_id} scheduler"
            node = forebay.Node(
                settings.node, token=settings.token, name=name, tenant=settings.tenant, wait=True
            )
            blocks = compat.blocks_of(vllm_config, kv_cache_config)
            events = None if blocks is None else Events(node, blocks, facts.chunk_tokens)
            # The first block of all is nobody's.
            most = kv_cache_config.num_blocks - 1
            self._scheduler = self._plans = SchedulerHalf(vllm_config, facts, settings, node, most, events)
        else:
            self._worker = self._here = WorkerHalf(vllm_config, kv_cache_config, settings)

    # Of a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The KV cache is there."""
        self._here.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """The KV cache's memory is about to go. Newer versions tell; in others `compat.before_sleep` does."""
        self._here.drain(keeps_kv=False)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Blocks are about to be given to others."""
        assert isinstance(kv_connector_metadata, Step)
        self._here.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """A step begins."""
        self._here.begin_step(self._get_connector_metadata(), forward_context)

    def has_connector_metadata(self) -> bool:
        """Whether layers are to wait for a load. vLLM asks this at each layer, and nowhere else."""
        return bool(self._here.layerwise)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A layer's KV is about to be read."""
        self._here.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer's KV was written. It is stored with all the others when the step was submitted."""

    def wait_for_save(self) -> None:
        """A step was submitted."""
        self._here.start_stores()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Which requests were sent and which ones received."""
        return self._here.take_finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same, and which of those received have failed. Newer versions ask for this."""
        sent, received = self._here.take_finished()
        failed, self._here.failed = self._here.failed, set()
        return compat.transfer_results(sent, received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were to be loaded and were not."""
        invalid, self._here.invalid = self._here.invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> Report | None:
        """What ended in this step."""
        return self._here.take_report()

    # Of the scheduler.

    def on_new_request(self, request: Any) -> None:
        """A request came."""
        self._plans.request_added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded, and whether in the background."""
        return self._plans.match(request, num_computed_tokens)

    def blocks_lost(self, request: Any) -> None:
        """A request will get other blocks than it waits with (`step_recovery.restart_waiting_loads`)."""
        self._plans.blocks_lost(request.request_id)

    def departed_requests(self) -> list[tuple[str, step_recovery.Tables]]:
        """Requests that may have computed from a load and have left their blocks since (`step_recovery`)."""
        return self._plans.departed_requests()

    def step_undone(self, request: Any, block: int, is_counted: bool) -> None:
        """A step is undone that computed wrong KV from a request's `block` on (`step_recovery.preempt`)."""
        self._plans.corrections.step_undone(request, block, is_counted)

    def correct(self, own: Any, external: Any) -> None:
        """vLLM's counts are about to be read (`corrections.before_counts_are_read`)."""
        self._plans.corrections.take_off(own, external)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request got blocks."""
        self._plans.blocks_allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        """Where the tokens of a load are. Newer versions ask for this."""
        return compat.hit_sources(self._plans.sources(request, num_external_tokens))

    def has_pending_block_frees(self) -> bool:
        """Whether blocks are free soon, so that nobody needs to be preempted. Newer versions ask for this."""
        return self._plans.frees_soon()

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """What the workers do in this step."""
        return self._plans.build_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have done."""
        if connector_output.finished_sending:
            self._plans.freed(connector_output.finished_sending)
        if connector_output.finished_recving:
            self._plans.received(connector_output.finished_recving)
        report = connector_output.kv_connector_worker_meta
        self._plans.step_ended(
            report if type(report) is Report else None
        )  # `isinstance` asks an ABC, each step.

    def reset_cache(self) -> bool:
        """What is stored is not to be used any more: weights may be others from now on."""
        return self._plans.reset()

    def take_events(self) -> list[Any]:
        """What there is to tell of blocks in the node, if vLLM tells of blocks at all."""
        return [] if self._plans.events is None else self._plans.events.take()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended."""
        return self._plans.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended."""
        return self._plans.request_finished(request, block_ids)

    # Of both.

    def get_kv_connector_stats(self) -> Stats | None:
        """What was counted since the last time."""
        return self._plans.counts.take() if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        """Ends; nothing touches the KV cache any more."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # Of the class.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Each block of a layer in one piece, as the setting `layout` says."""
        return compat.layout_name(
            settings_of(vllm_config.kv_transfer_config.kv_connector_extra_config).layout
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        """Counters as they were sent."""
        return Stats({} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PromMetrics:
        """Prometheus metrics."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
