"""Which of vLLM's requests the scheduler's half tracks, and what their KV is named by.

A request is tracked once all is known that its KV depends on; an adapter may have to be read first.
Others are left alone: nothing of theirs is loaded or stored.
"""

from concurrent.futures import Future
from typing import Any

from vllm.logger import init_logger

import forebay
from forebay._log import LimitedLog
from forebay.errors import InvalidError
from forebay.vllm.connector import compat, handover
from forebay.vllm.connector.adapters import Adapter, Adapters
from forebay.vllm.connector.config import Settings
from forebay.vllm.connector.hints import Hints
from forebay.vllm.connector.media import Media, media_of
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.offers import Offers
from forebay.vllm.connector.outcomes import Outcomes
from forebay.vllm.connector.stats import Counts
from forebay.vllm.connector.tenants import seen_by
from forebay.vllm.connector.tracked import TrackedRequest, name_chunks

limited = LimitedLog(init_logger("vllm.forebay.scheduler"))


class Requests:
    """The tracked requests, by name."""

    def __init__(
        self,
        facts: Facts,
        settings: Settings,
        node: forebay.Node,
        offers: Offers,
        counts: Counts,
        lora_config: Any,
        stores_kv: bool,
        outcomes: Outcomes,
        hints: Hints,
    ) -> None:
        """`lora_config`: vLLM's, None without adapters."""
        self.facts, self.settings, self.node = facts, settings, node
        self.offers, self.counts, self.stores_kv = offers, counts, stores_kv
        self.outcomes, self.hints = outcomes, hints
        self.tracked: dict[str, TrackedRequest] = {}
        self.adapters = Adapters(lora_config)
        compat.when_adapters_load(self.adapters.look)
        # Requests whose adapters are being read.
        self.awaiting_adapter: dict[str, tuple[Media, int | None, Future[Adapter | None]]] = {}

    def add(self, request: Any) -> None:
        """Tracks a request if its KV depends on tokens, salt, adapter and named contents alone."""
        self.hints.added(request)
        try:
            tenant = self.hints.tenant(request)
        except InvalidError as error:
            limited.warning("request %s is left alone: %s", request.request_id, error)
            self.leave_alone(request)
            return
        media = media_of(request, self.facts.media)
        if (
            request.prompt_token_ids is None
            or request.prompt_embeds is not None
            or media is None
            or request.pooling_params is not None
            or request.resumable
        ):
            self.leave_alone(request)
            return
        if self.facts.has_states and self.stores_kv and handover.is_prefill(self.params(request)):
            # The decoder computes the last token from the state before it, so that must be stored.
            compat.cut_prompt(request)
        if request.lora_request is not None:
            finding = self.adapters.find(request.lora_request)
            self.awaiting_adapter[request.request_id] = media, tenant, finding
        else:
            self.track(request, media, tenant, None)

    def leave_alone(self, request: Any) -> None:
        """Nothing of a request is loaded or stored."""
        self.counts.add("requests_left_alone")
        self.outcomes.left_alone(request)

    def track(self, request: Any, media: Media, tenant: int | None, adapter: Adapter | None) -> None:
        """Begins to track a request, all of whose dependencies are known."""
        shared = self.hints.shared_tokens(request.request_id)
        ids = name_chunks(self.facts, self.facts.shape, request, adapter, media, shared, tenant)
        tracked = TrackedRequest(request, ids, adapter, self.facts.resets, shared, tenant)
        try:
            params, tokens = self.params(request), request.num_prompt_tokens
            tracked.ticket = handover.ticket_of(params, tokens, self.facts, self.offers.reader())
            tracked.keys = handover.keys_of(params, self.offers.engine)
        except InvalidError as error:
            self.counts.add("handovers_refused")
            limited.warning(
                "request %s: its hand-over is refused, its prompt is computed: %s", tracked.name, error
            )
        self.tracked[tracked.name] = tracked
        if tracked.ticket is None:
            self.announce_use(tracked)
        self.hints.tracked(tracked)

    def announce_use(self, tracked: TrackedRequest) -> None:
        """Tells the node which chunks a prompt needs: its disk admits chunks by their use.

        Once for a prompt. The prefiller does it for a prompt that is handed over.
        """
        tracked.ids.grow(tracked.request.prompt_token_ids)
        for of_rank in tracked.ids.ranks:
            if of_rank:
                node = seen_by(self.node, tracked.tenant)
                node.used(of_rank, self.facts.chunk_bytes // self.facts.chunks_of_rank)

    def params(self, request: Any) -> Any:
        """What a proxy says of a hand-over, unless another connector does hand-overs."""
        return request.kv_transfer_params if self.settings.handovers else None

    def is_named(self, request: Any) -> bool:
        """Whether a request's adapter has been read. If that is unknown, it is left alone."""
        waiting = self.awaiting_adapter.get(request.request_id)
        if waiting is None:
            return True
        media, tenant, finding = waiting
        if not finding.done():
            return False
        del self.awaiting_adapter[request.request_id]
        adapter = finding.result()
        if adapter is None:
            self.leave_alone(request)
            limited.warning(
                "request %s is left alone: what adapter %r holds is not certain",
                request.request_id,
                request.lora_request.lora_name,
            )
        else:
            self.track(request, media, tenant, adapter)
        return True

    def drop(self, name: str) -> TrackedRequest | None:
        """A request has ended: what was known of it, if it was tracked."""
        self.awaiting_adapter.pop(name, None)
        return self.tracked.pop(name, None)

    def close(self) -> None:
        """No adapter is read any more."""
        compat.not_when_adapters_load(self.adapters.look)
        self.adapters.close()
