"""Tells the node why a request loads less than it could, for `forebay explain`.

It knows what was found and what is loaded, as words and numbers; it decides nothing. A node that is not there
does not hear of it.
"""

from typing import Any

from vllm.logger import init_logger

import forebay
from forebay._log import LimitedLog
from forebay.errors import ForebayError
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tenants import seen_by
from forebay.vllm.connector.tracked import Found, TrackedRequest

limited = LimitedLog(init_logger("vllm.forebay.scheduler"))

# Of a chunk that was not found, the ids of so many ranks are told.
MISSING_AT_MOST = 64


class Outcomes:
    """What the node of this engine is told."""

    def __init__(self, node: forebay.Node, facts: Facts) -> None:
        self.node, self.facts = node, facts
        facts.describe = self.describe

    def describe(self, fields: dict[str, Any], labels: dict[str, str], tenant: int) -> None:
        """What a namespace is made of that requests of a tenant use from now on."""
        node = seen_by(self.node, None if tenant == self.facts.tenant else tenant)
        try:
            node.describe(fields, self.facts.chunk_tokens, labels)
        except ForebayError as error:
            limited.warning("forebay explain will not know a namespace of this engine: %s", error)

    def left_alone(self, request: Any) -> None:
        """A request's KV depends on more than tokens, salt, adapter and named contents."""
        self.note(self.node, str(request.request_id), "left_alone", prompt_tokens=int(request.num_tokens))

    def admitted(self, tracked: TrackedRequest, loaded: int, may_load: bool) -> None:
        """A request has its blocks, and loads so many tokens into them."""
        there = seen(tracked)
        chunk = 0 if there is None else there.chunks
        self.note(
            seen_by(self.node, tracked.tenant),
            tracked.name,
            self.reason(tracked, loaded, may_load),
            prompt_tokens=int(tracked.request.num_tokens),
            held_tokens=tracked.held,
            loaded_tokens=loaded,
            found=(0, 0, 0) if there is None else (there.in_memory, there.on_disk, there.on_peers),
            missing=[ids[chunk] for ids in tracked.ids.ranks[:MISSING_AT_MOST] if len(ids) > chunk],
        )

    def reason(self, tracked: TrackedRequest, loaded: int, may_load: bool) -> str:
        """Why no more is loaded: the words of docs/explain.md."""
        size, held = self.facts.chunk_tokens, tracked.held
        whole = tracked.request.num_tokens // size
        found = seen(tracked)
        there = 0 if found is None else found.chunks
        chosen = 0 if tracked.found is None else tracked.found.chunks
        if whole == 0:
            return "shorter_than_a_chunk"
        if held // size >= whole:
            return "held"
        if not may_load:
            return "may_not_load"
        if tracked.chunk_limit is not None:
            return "load_failed"
        if chosen < there:
            return "computing_is_faster"
        if not loaded and chosen * size > held:
            return "no_room"
        if there >= whole:
            return "loaded"
        return "partly_found" if there else "not_found"

    def note(self, node: forebay.Node, name: str, reason: str, **numbers: Any) -> None:
        """Tells it."""
        try:
            node.note_outcome(name[-256:], reason, **numbers)
        except ForebayError as error:
            limited.warning("forebay explain will not know of request %s: %s", name, error)


def seen(tracked: TrackedRequest) -> Found | None:
    """All that was there: what was stored, or what a prefiller hands over."""
    known = [found for found in (tracked.there, tracked.found) if found is not None]
    return max(known, key=lambda found: found.chunks, default=None)
