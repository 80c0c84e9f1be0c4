"""The worker's half: moves what the scheduler's half planned, by `forebay.PagedCache`.

Knows the engine's tensors and the moments of a step. Must never know tokens, or why something moves. Each
method is called once a step, or once a layer; none of them looks at single blocks and layers.
"""

import time
from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger

import forebay
from forebay.errors import ForebayError, InvalidError
from forebay.vllm.connector import compat
from forebay.vllm.connector.config import Settings
from forebay.vllm.connector.groups import fail_as_one, groups_of, heads_of
from forebay.vllm.connector.metadata import Ended, Kept, Load, Report, Step
from forebay.vllm.connector.namespace import (
    chunk_tokens_of,
    is_alone,
    refuse_another_policy,
    refuse_early_zeroing,
    refuse_what_is_not_supported,
)
from forebay.vllm.connector.states import WithStates, open_states
from forebay.vllm.connector.stats import Deltas, Stats, with_values

logger = init_logger("vllm.forebay.worker")

# An engine that only waits for loads and stores looks again after this time at the latest.
IDLE_S = (0.0002, 0.0005, 0.001, 0.002)
# How long copies may take to let go of blocks before it is said aloud; it is waited for in any case.
QUIET_S = 30.0


class WorkerHalf:
    """Lives in a worker. The thread that runs the model calls it."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        """Of a worker whose tensors are still to come."""
        refuse_what_is_not_supported(vllm_config)
        refuse_another_policy(vllm_config)
        self.vllm_config, self.settings = vllm_config, settings
        groups = groups_of(kv_cache_config)
        self.chunk_tokens = chunk_tokens_of(settings, groups)
        self.is_alone = is_alone(vllm_config)
        self.may_back_off = not compat.in_lockstep(vllm_config)
        self.as_one = fail_as_one(groups)
        named = list(zip(groups, kv_cache_config.kv_cache_groups, strict=True))
        self.groups = [one for one, _ in named if not one.state]
        self.names = [group.layer_names for one, group in named if not one.state]
        self.specs = [group.kv_cache_spec for one, group in named if not one.state]
        self.with_states = [group.layer_names for one, group in named if one.state]
        self.num_blocks = kv_cache_config.num_blocks
        self.rank, self.ranks = compat.world(vllm_config)
        self.cache: forebay.PagedCache | WithStates | None = None
        self.device: Any = None
        self.layers: dict[str, int] = {}
        self.tensors: list[Any] = []  # Kept: `cache` has their addresses.
        self.loads: dict[int, Load] = {}
        self.layerwise: set[int] = set()  # loads of this step
        self.dropped: set[int] = set()  # loads whose pages have been dropped
        self.stores: set[int] = set()
        self.step: Step | None = None
        self.held_for_stores: dict[str, set[int]] = {}
        self.invalid: set[int] = set()
        self.failed: set[str] = set()  # requests, where vLLM asks for these and not for blocks
        self.report = Report(0)
        self.received: set[str] = set()
        self.idle_steps = 0
        self.deltas = Deltas()
        self.stalls: list[float] = []  # seconds that a step waited, of each load that one waited for

    def register(self, tensors: dict[str, Any]) -> None:
        """The KV cache is there, if the model has any. Layers of a group that have the same pages are one.

        Layers of several groups may lie in the same place: they have it by turns, block by block.
        """
        if not self.groups:
            return
        layers = [(name, number) for number, names in enumerate(self.names) for name in names]
        layers = [(name, number) for name, number in layers if name in tensors]
        layers.sort(key=lambda layer: compat.layer_number(layer[0]))
        absent = set(range(len(self.groups))) - {number for _, number in layers}
        if absent:
            raise InvalidError(
                f"rank {self.rank} has no layer of group {min(absent)}; allowed are pipeline stages with "
                "layers of each group"
            )
        places: list[tuple[int, int, int, int, int]] = []
        for name, number in layers:
            place = self.place(name, tensors[name], number)
            if place not in places:
                places.append(place)
            self.layers[name] = places.index(place)
        compat.before_sleep(self.drain)
        self.tensors = [tensors[name] for name, _ in layers]
        self.device = self.tensors[0].device
        kv = self.open(
            places,
            page_tokens=[group.block_tokens for group in self.groups],
            chunk_tokens=self.chunk_tokens,
            heads=[group.heads if self.settings.layout == "HND" else 1 for group in self.groups],
        )
        self.cache = kv
        if self.with_states:
            refuse_early_zeroing(self.vllm_config, self.device.type)
            self.cache = WithStates(kv, open_states(self.with_states, tensors, self.num_blocks, self.open))

    def open(self, places: list[tuple[int, int, int, int, int]], **shape: Any) -> forebay.PagedCache:
        """A cache of what lies there."""
        return forebay.PagedCache(
            self.settings.node,
            places,
            **shape,
            device=self.device.index or 0 if self.device.type == "cuda" else None,
            token=self.settings.token,
            name=f"vllm {self.vllm_config.kv_transfer_config.engine_id} rank {self.rank}",
            tenant=self.settings.tenant,
            copy_threads=self.settings.copy_threads,
            sibling_devices=compat.devices_of_ranks(self.vllm_config),
        )

    def place(self, name: str, tensor: Any, group: int) -> tuple[int, int, int, int, int]:
        """Where a layer's pages lie. Each has its heads one after the other, or its tokens, as the setting
        `layout` says, and no finer cut: another order of the same bytes has the same checksum.
        """
        if tensor.shape[0] % self.num_blocks:
            raise InvalidError(
                f"layer {name} has {tensor.shape[0]} blocks; allowed are multiples of {self.num_blocks}"
            )
        parts = tensor.shape[0] // self.num_blocks  # Kernels may use smaller blocks than the scheduler.
        width, layout = tensor.element_size(), self.settings.layout
        heads, page = heads_of(self.specs[group], name), tuple(tensor.shape[1:])
        one_head = heads == 1 and page[:-2] in ((), (1,))
        tokens = self.groups[group].block_tokens // (parts if layout == "NHD" else 1)
        if not one_head and page[:-1] != (heads, tokens):
            raise InvalidError(
                f"layer {name} has pages of {page}; allowed are {heads} heads of {tokens} tokens with both "
                "keys and values: set another --attention-backend or a smaller --block-size"
            )
        pages = tensor if one_head or layout == "HND" else tensor.transpose(1, 2)  # as they lie in memory
        if not pages[0].is_contiguous() or (parts > 1 and not pages.is_contiguous()):
            raise InvalidError(
                f"layer {name} has pages with strides {tensor.stride()}; allowed is the layout {layout}: set "
                "layout in kv_connector_extra_config to that of the --attention-backend, and no "
                "VLLM_KV_CACHE_LAYOUT"
            )
        page_bytes = tensor[0].numel() * width * parts
        stride_bytes = tensor.stride(0) * width * parts
        return tensor.data_ptr(), self.num_blocks, stride_bytes, page_bytes, group

    def drain(self, keeps_kv: bool) -> None:
        """The KV cache's memory is about to go: nothing touches it any more when this returns.

        Unless it comes back with what it had, loads that nobody has heard of yet are lost.
        """
        if self.cache is None:
            return
        while self.stores and not self.cache.wait_stored(list(self.stores), QUIET_S):
            logger.warning("stores have not ended in %d s; sleep waits for them", QUIET_S)
        while self.loads and not self.cache.wait_loaded(list(self.loads), QUIET_S):
            logger.warning("loads have not ended in %d s; sleep waits for them", QUIET_S)
        if not keeps_kv:
            self.dropped.update(self.loads)

    # The moments of a step, in the order of a step.

    def before_step(self, step: Step) -> None:
        """Blocks are about to be written: stores that still read them end first. Loads begin if nobody else
        writes these blocks in the step: vLLM prepares it for some milliseconds now. Nor reads them: a
        connector that is told after ours may have stores of its own that it waits for only then.
        """
        if self.cache is None:
            return
        if self.step is not None and self.step.stores:
            self.start_stores()  # With a drafter, 0.26 to 0.33 say so to the last stage of a pipeline alone.
        if step.flush:
            mine = [job for job in step.flush if job in self.stores]
            while mine and not self.cache.wait_stored(mine, QUIET_S):
                logger.warning("stores have not ended in %d s; the engine waits for them", QUIET_S)
        if step.early and self.is_alone:
            self.start_loads(step, compat.stream_of(self.device))

    def begin_step(self, step: Step, forward_context: Any) -> None:
        """The forward pass begins, and loads that have not yet."""
        if self.cache is None or not (step.loads or self.layerwise):
            self.step = step
            return
        stream = compat.stream_of(self.device)
        self.start_loads(step, stream)
        if self.layerwise and compat.runs_whole_graph(forward_context):
            self.cache.wait_loads(stream)

    def start_loads(self, step: Step, stream: int) -> None:
        """Begins a step's loads, once."""
        assert self.cache is not None
        if step is self.step:
            return
        self.step = step
        for load in step.loads:
            self.loads[load.job] = load
            more: dict[str, Any] = {}
            if load.states is not None:
                more = {"state": load.states[self.rank], "state_pages": load.state_pages}
            try:
                self.cache.load(
                    load.job,
                    load.sources[self.rank],
                    load.pages,  # type: ignore[arg-type]  # numpy's arrays are buffers, its types do not say so
                    tokens=load.tokens,
                    source_page_tokens=load.source_page_tokens,
                    layerwise=load.layerwise,
                    stream=stream,
                    **more,
                )
            except ForebayError as error:
                self.load_ended(load.job, 0, str(error))
                continue
            if load.layerwise:
                self.layerwise.add(load.job)

    def wait_for_layer(self, name: str) -> None:
        """A layer is about to be used."""
        number = self.layers.get(name)  # None: it reads another layer's KV, which came before it.
        if self.layerwise and self.cache is not None and number is not None:
            self.cache.wait_layer(number, compat.stream_of(self.device))

    def start_stores(self) -> None:
        """The forward pass was submitted: what it computes is stored behind it."""
        step = self.step
        if self.cache is None or step is None or not step.stores:
            return
        stream = compat.stream_of(self.device)
        for store in step.stores:
            if not store.chunks[self.rank]:
                self.report.stores[store.job] = Kept(1)
                continue
            more: dict[str, Any] = {"state": store.state} if self.with_states else {}
            try:
                self.cache.store(
                    store.job,
                    store.chunks[self.rank],
                    store.pages,  # type: ignore[arg-type]
                    stream=stream,
                    **more,
                )
                self.stores.add(store.job)
            except ForebayError as error:
                logger.warning("chunks were not stored: %s", error)
                self.report.stores[store.job] = Kept(1, set(range(len(store.chunks[self.rank]))))
        step.stores = []

    def take_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Which requests' blocks are no longer read, and which ones' are filled."""
        step = self.step
        if self.cache is None or step is None:
            return None, None
        if step.idle:
            self.start_stores()  # vLLM does not say so. In other steps a drafter may still have to write.
        if not (self.loads or self.stores or self.held_for_stores or self.received or step.sent or step.idle):
            self.idle_steps = 0
            return None, None  # As after most steps.
        if self.loads or self.stores:
            self.poll_cache()
        while self.layerwise:
            # A step's own loads have ended for the engine's stream; how, must be known before its tokens are.
            self.cache.wait_loaded(list(self.layerwise), QUIET_S)
            self.poll_cache()
        for name, jobs in step.sent.items():
            self.held_for_stores[name] = set(jobs)
        under_way = self.stores.union(store.job for store in step.stores)
        sent = {name for name, jobs in self.held_for_stores.items() if jobs.isdisjoint(under_way)}
        for name in sent:
            del self.held_for_stores[name]
        received, self.received = self.received, set()
        self.back_off(step, bool(sent or received))
        return sent or None, received or None

    def poll_cache(self) -> None:
        """What the cache says has ended."""
        assert self.cache is not None
        loads, stores = self.cache.take_ended()
        self.report.rates += self.cache.take_measured()
        self.stalls += [seconds for _, seconds, _ in self.cache.take_bubbles()]
        for job, tokens, why in loads:
            self.load_ended(job, tokens, why)
        for job, missing in stores:
            self.stores.discard(job)
            self.report.stores[job] = Kept(1, set(missing))

    def load_ended(self, job: int, tokens: int, why: str | None) -> None:
        """A load is over, with `tokens` that may be used."""
        load = self.loads.pop(job)
        self.layerwise.discard(job)
        if job in self.dropped:
            self.dropped.discard(job)
            tokens, why = 0, "the KV cache has slept since"
        self.report.loads[job] = Ended(1, tokens)
        if not load.layerwise:
            self.received.add(load.request)
        if tokens >= load.tokens:
            return
        logger.warning("request %s: %d of %d tokens were loaded: %s", load.request, tokens, load.tokens, why)
        if not self.as_one:
            self.invalid.update(self.bad_blocks(load, tokens))
        elif compat.FAILURES_BY_REQUEST:
            self.failed.add(load.request)
        else:
            self.invalid.update(self.bad_blocks(load, 0))

    def bad_blocks(self, load: Load, tokens: int) -> Iterable[int]:
        """The blocks of a load that do not hold what they should if only `tokens` came."""
        for group, pages in zip(self.groups, load.pages, strict=True):
            bad = pages[tokens // group.block_tokens :]
            yield from bad[bad >= 0].tolist()

    def back_off(self, step: Step, ended: bool) -> None:
        """An engine with nothing to compute asks again and again; others need the processor meanwhile."""
        assert self.cache is not None
        if not step.idle or ended or step.loads or not self.may_back_off:
            self.idle_steps = 0
            return
        limit_s = IDLE_S[min(self.idle_steps, len(IDLE_S) - 1)]
        self.idle_steps += 1
        if self.loads:
            self.cache.wait_loaded(list(self.loads), limit_s)
        elif self.stores:
            self.cache.wait_stored(list(self.stores), limit_s)
        else:
            time.sleep(limit_s)

    def take_report(self) -> Report | None:
        """What the scheduler's half is told of this step: most often nothing."""
        report, step = self.report, self.step
        if step is None or not (step.timed or report.loads or report.stores or report.rates):
            return None
        report.step, self.report = step.number, Report(0)
        return report

    def take_stats(self) -> Stats | None:
        """What was counted since the last time, where something may have been."""
        report = self.report
        if self.cache is None or not (report.loads or report.stores):
            return None
        stalls, self.stalls = self.stalls, []
        return with_values(self.deltas.take(self.cache.stats()), "load_bubble_seconds", stalls)

    def close(self) -> None:
        """Returns when nothing touches the tensors any more."""
        if self.cache is not None:
            compat.not_before_sleep(self.drain)
            self.cache.close()
            self.cache = None
