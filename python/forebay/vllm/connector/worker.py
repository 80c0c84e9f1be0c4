"""The worker's half: it moves what the scheduler's half planned, with a `forebay.PagedCache`.

It knows the engine's tensors and the order of a step. vLLM calls each method once a step, or once a
layer.
"""

import time
from collections.abc import Iterable
from typing import Any, TypeAlias

from vllm.logger import init_logger

import forebay
from forebay._log import LimitedLog
from forebay.errors import ForebayError, InvalidError
from forebay.vllm.connector import compat
from forebay.vllm.connector.config import Settings
from forebay.vllm.connector.direct import AHEAD_S, OFFER_S, Handshake
from forebay.vllm.connector.groups import (
    can_cut_heads,
    cells_of,
    fail_as_one,
    groups_of,
    is_cut_by_heads,
    layers_of,
    page_bytes_of,
)
from forebay.vllm.connector.metadata import Load, LoadResult, Read, Report, Source, Step, StoreResult
from forebay.vllm.connector.namespace import (
    chunk_tokens_of,
    is_alone,
    refuse_another_policy,
    refuse_what_is_not_supported,
)
from forebay.vllm.connector.states import WithStates, open_states
from forebay.vllm.connector.stats import Deltas, Stats

logger = init_logger("vllm.forebay.worker")
limited = LimitedLog(logger)

# Address, blocks, bytes from block to block, bytes of a block, group of layers.
Place: TypeAlias = tuple[int, int, int, int, int]

# An engine that only waits for loads and stores sleeps this long, longer each time. A request that
# comes meanwhile waits for that.
IDLE_S = (0.0002, 0.0005)
# After this time a line in the log says that copies still use blocks. The wait goes on.
DRAIN_WARNING_S = 30.0


class WorkerHalf:
    """Lives in a worker. The thread that runs the model calls it."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        refuse_what_is_not_supported(vllm_config)
        refuse_another_policy(vllm_config)
        self.vllm_config, self.settings = vllm_config, settings
        groups = groups_of(kv_cache_config, vllm_config.parallel_config.decode_context_parallel_size)
        self.chunk_tokens = chunk_tokens_of(settings, groups)
        self.is_alone = is_alone(vllm_config)
        self.may_back_off = not compat.in_lockstep(vllm_config)
        self.as_one = fail_as_one(groups)
        named = list(zip(groups, kv_cache_config.kv_cache_groups, strict=True))
        self.groups = [one for one, _ in named if one.paged]
        self.layers_of_groups = [layers_of(group) for one, group in named if one.paged]
        self.with_states = [group.layer_names for one, group in named if one.state]
        self.cuts_heads = settings.layout == "HND" and can_cut_heads(groups)
        self.num_blocks = kv_cache_config.num_blocks
        self.rank, self.ranks = compat.world(vllm_config)
        self.cache: forebay.PagedCache | WithStates | None = None
        self.kv: forebay.PagedCache | None = None  # of it, what hands over directly
        self.device: Any = None
        self.layers: dict[str, int] = {}
        self.tensors: list[Any] = []  # kept alive: `cache` has their addresses
        self.loads: dict[int, Load] = {}
        self.layerwise: set[int] = set()  # loads of this step
        self.dropped: set[int] = set()  # loads whose blocks slept meanwhile
        self.stores: set[int] = set()
        self.step: Step | None = None
        self.held_for_stores: dict[str, set[int]] = {}  # finished requests, by name: their stores
        self.offered: dict[bytes, str] = {}  # finished requests whose blocks are offered, by key
        self.invalid: set[int] = set()  # blocks that were not loaded
        self.failed: set[str] = set()  # the same as requests, where vLLM asks for these
        self.report = Report(0)
        self.received: set[str] = set()
        self.idle_steps = 0
        self.deltas = Deltas()
        self.stalls: list[float] = []  # seconds that steps waited, for each layerwise load

    @property
    def is_idle(self) -> bool:
        return not (self.loads or self.stores or self.held_for_stores or self.offered or self.received)

    def is_connected(self) -> bool:
        return self.cache is not None and self.cache.is_connected

    def register(self, tensors: dict[str, Any]) -> None:
        """Opens the KV cache, if the model has one.

        Layers that share pages are one. Layers of several groups may share memory: each block of it
        belongs to one of them at a time.
        """
        if not self.groups:
            return
        layers = [(name, number) for number, names in enumerate(self.layers_of_groups) for name in names]
        layers = [(name, number) for name, number in layers if name in tensors]
        layers.sort(key=lambda layer: compat.layer_number(layer[0]))
        absent = set(range(len(self.groups))) - {number for _, number in layers}
        if absent:
            raise InvalidError(
                f"rank {self.rank} has no layer of group {min(absent)}; allowed are pipeline stages with "
                "layers of each group"
            )
        places: list[Place] = []
        for name, number in layers:
            place = self.place(name, tensors[name], number)
            if place not in places:
                places.append(place)
            self.layers[name] = places.index(place)
        compat.before_sleep(self.drain)
        if compat.runs_v2(self.vllm_config):
            compat.before_writes(self.before_writes)
        self.tensors = [tensors[name] for name, _ in layers]
        self.device = self.tensors[0].device
        kv = self.open(
            places,
            page_tokens=[group.block_tokens for group in self.groups],
            chunk_tokens=self.chunk_tokens,
            heads=[group.heads if self.cuts_heads else 1 for group in self.groups],
            kept_pages=[group.kept_pages(self.chunk_tokens) for group in self.groups],
        )
        self.cache = self.kv = kv
        if self.with_states:
            self.cache = WithStates(kv, open_states(self.with_states, tensors, self.num_blocks, self.open))
        logger.info(
            "rank %d of %d: %d layers with %d blocks on %s, node at %s",
            self.rank,
            self.ranks,
            len(places),
            self.num_blocks,
            self.device,
            self.settings.node,
        )

    def handshake(self) -> Handshake | None:
        """What other engines need to read this worker's blocks; None if it offers none."""
        metadata = None if self.kv is None else self.kv.metadata
        return None if metadata is None else Handshake(metadata, self.device.type)

    def hands_over_directly(self) -> bool:
        asked = self.settings.direct_handover
        is_plain = self.ranks == self.vllm_config.parallel_config.tensor_parallel_size
        wanted = self.device.type == "cuda" if asked is None else asked
        return bool(wanted and self.settings.handovers and is_plain and not self.with_states)

    def open(self, places: list[Place], **shape: Any) -> forebay.PagedCache:
        return forebay.PagedCache(
            self.settings.node,
            places,
            **shape,
            device=self.device.index or 0 if self.device.type == "cuda" else None,
            token=self.settings.token,
            name=f"vllm {self.vllm_config.kv_transfer_config.engine_id} rank {self.rank}",
            tenant=self.settings.tenant,
            copy_threads=self.settings.copy_threads,
            verify=self.settings.verify,
            sibling_devices=compat.devices_of_ranks(self.vllm_config),
            direct=f"{self.vllm_config.kv_transfer_config.engine_id}.{self.rank}"
            if self.hands_over_directly()
            else None,
        )

    def place(self, name: str, tensor: Any, group: int) -> Place:
        """Where a layer's pages lie. Refuses pages whose bytes are in another order than `layout`
        says: checksums would not tell them apart.
        """
        if tensor.shape[0] % self.num_blocks:
            raise InvalidError(
                f"layer {name} has {tensor.shape[0]} blocks; allowed are multiples of {self.num_blocks}"
            )
        parts = tensor.shape[0] // self.num_blocks  # kernels may have smaller blocks
        spec, layout = self.layers_of_groups[group][name], self.settings.layout
        page_bytes = tensor[0].numel() * tensor.element_size() * parts
        if page_bytes != page_bytes_of(spec):
            raise InvalidError(
                f"layer {name} has pages of {page_bytes} bytes, {tuple(tensor.shape[1:])}; its "
                f"specification says {page_bytes_of(spec)}: set another --attention-backend"
            )
        heads, page = spec.num_kv_heads, tuple(tensor.shape[1:])
        one_head = not is_cut_by_heads(spec) or (heads == 1 and page[:-2] in ((), (1,)))
        tokens = cells_of(spec) // (parts if layout == "NHD" else 1)
        if not one_head and page[:-1] != (heads, tokens):
            raise InvalidError(
                f"layer {name} has pages of {page}; allowed are {heads} heads of {tokens} tokens with both "
                "keys and values: set another --attention-backend or a smaller --block-size"
            )
        pages = tensor if one_head or layout == "HND" else tensor.transpose(1, 2)  # in memory order
        if not pages[0].is_contiguous() or (parts > 1 and not pages.is_contiguous()):
            raise InvalidError(
                f"layer {name} has pages with strides {tensor.stride()}; allowed is the layout {layout}: set "
                "layout in kv_connector_extra_config to that of the --attention-backend, and no "
                "VLLM_KV_CACHE_LAYOUT"
            )
        stride_bytes = tensor.stride(0) * tensor.element_size() * parts
        return tensor.data_ptr(), self.num_blocks, stride_bytes, page_bytes, group

    def drain(self, keeps_kv: bool) -> None:
        """The KV cache is about to go. When this returns, no copy touches it any more.

        Unless its contents come back, loads whose end was not reported yet have failed.
        """
        if self.cache is None:
            return
        logger.info(
            "rank %d: the KV cache goes to sleep%s: waiting for %d loads and %d stores",
            self.rank,
            " and keeps its contents" if keeps_kv else "",
            len(self.loads),
            len(self.stores),
        )
        if self.kv is not None:
            self.kv.withdraw_offers()
        while self.stores and not self.cache.wait_stored(list(self.stores), DRAIN_WARNING_S):
            logger.warning("stores have not ended in %d s; sleep waits for them", DRAIN_WARNING_S)
        while self.loads and not self.cache.wait_loaded(list(self.loads), DRAIN_WARNING_S):
            logger.warning("loads have not ended in %d s; sleep waits for them", DRAIN_WARNING_S)
        if not keeps_kv:
            self.dropped.update(self.loads)

    # In the order of a step.

    def before_step(self, step: Step) -> None:
        """Waits for the stores that still read blocks of this step, which are about to be written.

        Loads begin here too, milliseconds before the forward pass, if nobody else touches their
        blocks in this step. Another connector might: it may still have stores that read them.
        """
        self.flush(step)
        if step.early and self.is_alone and self.cache is not None:
            self.start_loads(step, compat.stream_of(self.device))

    def before_writes(self, message: Any) -> None:
        """The same wait, sooner. Under a MultiConnector, `message` has those of all connectors."""
        for one in (message, *getattr(message, "metadata", ())):
            if isinstance(one, Step):
                self.flush(one)

    def flush(self, step: Step) -> None:
        """Waits for the stores that still read blocks which this step writes."""
        if self.cache is None:
            return
        if self.step is not None and self.step.stores:
            # With a drafter, vLLM 0.26 to 0.33 tell only the last pipeline stage to save.
            self.start_stores()
        if step.flush:
            mine = [job for job in step.flush if job in self.stores]
            while mine and not self.cache.wait_stored(mine, DRAIN_WARNING_S):
                logger.warning("stores have not ended in %d s; the engine waits for them", DRAIN_WARNING_S)

    def begin_step(self, step: Step, forward_context: Any) -> None:
        """The forward pass begins. Starts the loads that `before_step` has not started."""
        if self.cache is None or not (step.loads or self.layerwise):
            self.step = step
            return
        stream = compat.stream_of(self.device)
        self.start_loads(step, stream)
        if self.layerwise and compat.runs_whole_graph(forward_context):
            self.cache.wait_loads(stream)

    def start_loads(self, step: Step, stream: int) -> None:
        """Starts a step's loads, once."""
        assert self.cache is not None
        if step is self.step:
            return
        self.step = step
        for load in step.loads:
            self.loads[load.job] = load
            if load.reads is not None:
                self.start_read(load, load.reads[self.rank], stream)
                continue
            more: dict[str, Any] = {}
            if load.states is not None:
                more = {"state": load.states[self.rank], "state_pages": load.state_pages}
            if load.trace is not None:
                more["trace"] = load.trace
            if load.tenant is not None:
                more["tenant"] = load.tenant
            try:
                self.cache.load(
                    load.job,
                    self.sources(load.sources[self.rank]),
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

    def start_read(self, load: Load, reads: list[Read], stream: int) -> None:
        """Starts a load from a prefiller's blocks."""
        assert self.kv is not None
        try:
            self.kv.read(
                load.job,
                reads,
                load.digest,
                load.pages,  # type: ignore[arg-type]
                first_token=load.first_token,
                tokens=load.tokens,
                wait_s=AHEAD_S if load.ahead else 0.0,
                stream=stream,
            )
        except ForebayError as error:
            self.load_ended(load.job, 0, str(error))

    def start_offers(self, step: Step) -> None:
        """Offers blocks of finished requests, and tells prefillers whose offers nobody reads."""
        if self.kv is None:
            return
        for offer in step.offers:
            key = offer.keys[self.rank]
            pages: Any = offer.pages
            try:
                self.kv.offer(key, offer.digest, pages, tokens=offer.tokens, ttl_s=OFFER_S)
            except ForebayError as error:
                # The decoder hears that nothing is offered, and asks its node.
                limited.warning("request %s: its blocks are not offered: %s", offer.request, error)
            else:
                self.offered[key] = offer.request
        for metadata, key in step.declined[self.rank :: self.ranks]:
            try:
                self.kv.decline(metadata, key)
            except ForebayError as error:
                limited.warning("a prefiller is not told that nobody reads its blocks: %s", error)
        step.offers, step.declined = [], []

    def end_offers(self) -> None:
        """Takes in which offers have ended."""
        if not self.offered or self.kv is None:
            return
        for key, how in self.kv.take_offers_ended():
            request = self.offered.pop(bytes(key), None)
            if request is not None and how != "closed":
                limited.warning("request %s: its blocks were offered for nothing: %s", request, how)

    def sources(self, planned: list[Source]) -> list[Source]:
        """The chunks of a load, as this rank's cache takes them.

        vLLM tells the scheduler of one layer of a group only. So it may have planned with heads where
        other layers have none: there a page is one part.
        """
        if self.cuts_heads or len(planned) != 1:
            return planned
        ((ids, there, here, _),) = planned
        return [(ids, there, here, 1)]

    def wait_for_layer(self, name: str) -> None:
        """Has the engine's stream wait for the load of a layer."""
        number = self.layers.get(name)  # None: the layer reads the KV of an earlier one.
        if self.layerwise and self.cache is not None and number is not None:
            self.cache.wait_layer(number, compat.stream_of(self.device))

    def start_stores(self) -> None:
        """The forward pass was submitted. Stores run behind it in the engine's stream."""
        step = self.step
        if self.cache is None or step is None or not step.stores:
            return
        stream = compat.stream_of(self.device)
        for store in step.stores:
            parts = store.chunks[self.rank]
            if not parts:
                self.report.stores[store.job] = StoreResult(1)
                continue
            more: dict[str, Any] = {"state": store.state} if self.with_states else {}
            if store.tenant is not None:
                more["tenant"] = store.tenant
            try:
                self.cache.store(
                    store.job,
                    parts,
                    store.pages,  # type: ignore[arg-type]
                    stream=stream,
                    **more,
                )
                self.stores.add(store.job)
            except ForebayError as error:
                limited.warning("a store of %d chunks was refused: %s", len(parts[0]), error)
                self.report.stores[store.job] = StoreResult(1, set(range(len(parts[0]))))
        step.stores = []

    def take_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks no store reads any more, and requests whose load has ended."""
        step = self.step
        if self.cache is None or step is None:
            return None, None
        if step.idle:
            self.start_stores()  # vLLM does not call it. In other steps a drafter may still write.
        if step.offers or step.declined:
            self.start_offers(step)
        if self.is_idle and not (step.sent or step.idle):
            self.idle_steps = 0
            return None, None  # As in most steps.
        if self.loads or self.stores:
            self.poll_cache()
        while self.layerwise:
            # The stream has passed these loads. How they ended must be known before the tokens are.
            self.cache.wait_loaded(list(self.layerwise), DRAIN_WARNING_S)
            self.poll_cache()
        self.end_offers()
        for name, jobs in step.sent.items():
            self.held_for_stores[name] = set(jobs)
        sent, received = self.take_ends(step)
        if not (sent or received) and self.back_off(step):
            self.poll_cache()
            sent, received = self.take_ends(step)
        if sent or received:
            self.idle_steps = 0
        return sent or None, received or None

    def take_ends(self, step: Step) -> tuple[set[str], set[str]]:
        """What `take_finished` returns, as far as it is known."""
        under_way = self.stores.union(store.job for store in step.stores)
        offered = set(self.offered.values())
        held = self.held_for_stores.items()
        sent = {name for name, jobs in held if jobs.isdisjoint(under_way) and name not in offered}
        for name in sent:
            del self.held_for_stores[name]
        received, self.received = self.received, set()
        return sent, received

    def poll_cache(self) -> None:
        assert self.cache is not None
        loads, stores = self.cache.take_ended()
        self.report.rates += self.cache.take_measured()
        self.stalls += [seconds for _, seconds, _ in self.cache.take_bubbles()]
        for job, tokens, why in loads:
            self.load_ended(job, tokens, why)
        for job, missing in stores:
            self.stores.discard(job)
            self.report.stores[job] = StoreResult(1, set(missing))

    def load_ended(self, job: int, tokens: int, why: str | None) -> None:
        """A load has ended. Its first `tokens` may be used."""
        load = self.loads.pop(job)
        self.layerwise.discard(job)
        if job in self.dropped:
            self.dropped.discard(job)
            tokens, why = 0, "the KV cache has slept meanwhile"
        self.report.loads[job] = LoadResult(1, tokens)
        if not load.layerwise:
            self.received.add(load.request)
        if tokens >= load.tokens:
            return
        limited.warning("request %s: %d of %d tokens were loaded: %s", load.request, tokens, load.tokens, why)
        if self.as_one and compat.FAILURES_BY_REQUEST:
            self.failed.add(load.request)
        else:
            self.invalid.update(self.bad_blocks(load, 0 if self.as_one else tokens))

    def bad_blocks(self, load: Load, tokens: int) -> Iterable[int]:
        """The blocks of a load that are wrong if only its first `tokens` came."""
        for group, pages in zip(self.groups, load.pages, strict=True):
            bad = pages[tokens // group.block_tokens :]
            yield from bad[bad >= 0].tolist()

    def back_off(self, step: Step) -> bool:
        """Sleeps a little if the engine has nothing to compute and only polls. True: what it polls
        for has ended meanwhile."""
        assert self.cache is not None
        if not step.idle or step.loads or not self.may_back_off:
            self.idle_steps = 0
            return False
        limit_s = IDLE_S[min(self.idle_steps, len(IDLE_S) - 1)]
        self.idle_steps += 1
        if self.loads:
            return self.cache.wait_loaded(list(self.loads), limit_s)
        if self.stores:
            return self.cache.wait_stored(list(self.stores), limit_s)
        time.sleep(limit_s)
        return False

    def take_report(self) -> Report | None:
        """The report to the scheduler's half; None in most steps."""
        report, step = self.report, self.step
        if step is None or not (step.timed or report.loads or report.stores or report.rates):
            return None
        report.step, self.report = step.number, Report(0)
        return report

    def take_stats(self) -> Stats | None:
        report = self.report
        if self.cache is None or not (report.loads or report.stores):
            return None
        stalls, self.stalls = self.stalls, []
        return self.deltas.take(self.cache.stats(), load_bubble_seconds=stalls)

    def close(self) -> None:
        """When this returns, nothing touches the tensors any more."""
        if self.cache is not None:
            compat.not_before_sleep(self.drain)
            compat.not_before_writes(self.before_writes)
            self.cache.close()
            self.cache = self.kv = None
