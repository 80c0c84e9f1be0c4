"""vLLM's KV connector on a Forebay node: `ForebayConnector`.

This file maps vLLM's interface to the two halves, `SchedulerHalf` and `WorkerHalf`; it decides
nothing. `load_or_compute.py` decides what is loaded.

    {"kv_connector": "ForebayConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"node": "/run/forebay/node.sock"}}
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

import forebay
from forebay.vllm import register
from forebay.vllm.connector import compat
from forebay.vllm.connector.config import Settings, settings_of
from forebay.vllm.connector.events import Events
from forebay.vllm.connector.metadata import Report, Step
from forebay.vllm.connector.namespace import facts_of
from forebay.vllm.connector.no_kv import NoKv
from forebay.vllm.connector.node_watch import NodeWatch
from forebay.vllm.connector.scheduler import SchedulerHalf
from forebay.vllm.connector.stats import PromMetrics, Stats
from forebay.vllm.connector.worker import WorkerHalf

__all__ = ["ForebayConnector"]

logger = init_logger("vllm.forebay")

# A MultiConnector looks up its connectors' statistics by name, even if vLLM was given this path.
register()


class ForebayConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there when types are checked
    """One half of the connector. vLLM makes one in its scheduler and one in each worker."""

    # The half that this is. Every step uses it, so it is no property.
    _plans: SchedulerHalf | NoKv
    _here: WorkerHalf
    _node_watch: NodeWatch | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerHalf | NoKv | None = None
        self._worker: WorkerHalf | None = None
        if role != KVConnectorRole.SCHEDULER:
            self._worker = self._here = worker = WorkerHalf(vllm_config, kv_cache_config, settings)
            if worker.groups:
                self._node_watch = NodeWatch(f"rank {worker.rank}", settings.node, worker.is_connected)
        elif kv_cache_config.kv_cache_groups:
            self._scheduler = self._plans = self._scheduler_half(vllm_config, kv_cache_config, settings)
        else:
            self._scheduler = self._plans = NoKv(vllm_config)

    def _scheduler_half(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> SchedulerHalf:
        transfer = vllm_config.kv_transfer_config
        facts = facts_of(vllm_config, kv_cache_config, settings)
        name = f"vllm {transfer.engine_id} scheduler"
        node = forebay.Node(settings.node, token=settings.token, name=name, tenant=settings.tenant, wait=True)
        blocks = compat.event_blocks(vllm_config, kv_cache_config)
        events = None if blocks is None else Events(node, blocks, facts.chunk_tokens)
        most = kv_cache_config.num_blocks - 1  # Nobody gets the first block.
        half = SchedulerHalf(vllm_config, facts, settings, node, most, events)
        self._node_watch = NodeWatch("scheduler", settings.node, lambda: node.is_connected)
        logger.info(
            "Forebay connector started as %s: identity %s, chunks of %d tokens and %d bytes per rank, "
            "%d groups of layers, layerwise loads %s, failed loads: %s; %s",
            transfer.kv_role,
            facts.identity(),
            facts.chunk_tokens,
            facts.chunk_bytes,
            len(facts.groups),
            "possible" if half.layerwise_possible else "not possible",
            transfer.kv_load_failure_policy,
            settings,
        )
        return half

    # Of a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._here.register(kv_caches)

    def get_handshake_metadata(self) -> Any:
        """What other engines need to read this worker's blocks."""
        return self._here.handshake()

    def unregister_kv_caches(self) -> None:
        """The KV cache is about to go. vLLM 0.33 calls this; before that see `compat.before_sleep`."""
        self._here.drain(keeps_kv=False)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert isinstance(kv_connector_metadata, Step)
        self._here.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._here.begin_step(self._get_connector_metadata(), forward_context)

    def has_connector_metadata(self) -> bool:
        """Whether layers wait for a load. vLLM asks this at each layer, and nowhere else."""
        return bool(self._here.layerwise)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._here.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are stored together, once the step was submitted."""

    def wait_for_save(self) -> None:
        self._here.start_stores()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._node_watch is not None:
            self._node_watch.look()
        return self._here.take_finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """`get_finished` from 0.32 on. It also says which loads have failed."""
        sent, received = self.get_finished(finished_req_ids)
        failed, self._here.failed = self._here.failed, set()
        return compat.transfer_results(sent, received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._here.invalid = self._here.invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> Report | None:
        return self._here.take_report()

    # Of the scheduler.

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._plans.workers_opened(metadata)

    def on_new_request(self, request: Any) -> None:
        self._plans.request_added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._plans.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._plans.blocks_allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        """The tiers that the tokens of a load are in. vLLM asks for this from 0.32 on."""
        return compat.hit_sources(self._plans.sources(request, num_external_tokens))

    def has_pending_block_frees(self) -> bool:
        """Whether blocks are free soon, so that none is preempted. vLLM asks from 0.32 on."""
        return self._plans.frees_soon()

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        if self._node_watch is not None:
            self._node_watch.look()
        return self._plans.build_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.finished_sending:
            self._plans.freed(connector_output.finished_sending)
        if connector_output.finished_recving:
            self._plans.received(connector_output.finished_recving)
        report = connector_output.kv_connector_worker_meta
        # Not `isinstance`: each step comes here, and the class is an ABC.
        self._plans.step_ended(report if type(report) is Report else None)

    def reset_cache(self) -> bool:
        return self._plans.reset()

    def take_events(self) -> list[Any]:
        return [] if self._plans.events is None else self._plans.events.take()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._plans.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._plans.request_finished(request, block_ids)

    # Of both.

    def get_kv_connector_stats(self) -> Stats | None:
        return self._plans.counts.take() if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        """When this returns, nothing touches the KV cache any more."""
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.close()
        self._node_watch = None

    # Of the class.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return compat.layout_name(settings_of(extra).layout)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        return Stats({} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
