"""Finds the KV that a request can load: what a prefiller hands over, or the longest stored prefix.

It knows hand-over tickets, shapes, and where loads of a request have failed. Of a prefix it keeps
what is worth loading (`load_or_compute`). It pins nothing in the node but a hand-over's chunks.
"""

from collections.abc import Callable

from vllm.logger import init_logger

from forebay._log import LimitedLog
from forebay.vllm.connector.config import Settings, Shape
from forebay.vllm.connector.finder import Finder
from forebay.vllm.connector.load_or_compute import CostModel
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.stats import Counts
from forebay.vllm.connector.tracked import (
    ChunkIds,
    Found,
    Lookup,
    PendingHandover,
    TrackedRequest,
    name_chunks,
)

limited = LimitedLog(init_logger("vllm.forebay.scheduler"))

# vLLM asks again with every step while a request has no room. An answer is fresh this long,
FRESH_S = 0.005
# may be used this long while the node is asked again, so that the request keeps its place,
STALE_S = 0.25
# and where steps are longer than that, may be used once more within this time.
STEP_S = 2.0
# The node is asked for a hand-over again after an eighth of the time waited, at most this.
ASK_AGAIN_S = 0.05


class Matcher:
    """Asks the node for requests."""

    def __init__(
        self,
        facts: Facts,
        settings: Settings,
        finder: Finder,
        cost_model: CostModel,
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        self.facts, self.settings, self.finder = facts, settings, finder
        self.cost_model, self.counts, self.clock = cost_model, counts, clock
        cuts = (facts.cut(shape) for shape in settings.also_read)
        self.shapes = (facts.shape, *(shape for shape in cuts if shape != facts.shape))

    def found(self, tracked: TrackedRequest, others: int) -> Found | None:
        """What a request can load while `others` compute. None: not known or stored yet."""
        now = self.clock()
        looked, tracked.looked_s = tracked.looked_s, now
        recent = tracked.found if tracked.found_held == tracked.held else None
        age_s = now - tracked.found_s
        if recent is not None and age_s < FRESH_S:
            return recent
        if tracked.ticket is not None and tracked.ticket.direct is not None:
            tracked.found = tracked.direct = tracked.direct or self.promised(tracked)
            return tracked.found
        has_ticket = tracked.ticket is not None
        found = self.handed_over(tracked, now) if has_ticket else self.prefix(tracked, others)
        if found is not None:
            tracked.found, tracked.found_s, tracked.found_held = found, now, tracked.held
        elif age_s < STALE_S or (tracked.found_s >= looked and age_s < STEP_S):
            return recent
        return found

    def answers(self, tracked: TrackedRequest, ask: Callable[[], list[Lookup]]) -> list[Found] | None:
        """The node's answers to the lookups of `ask`; None until it has answered all of them."""
        if tracked.asked is None:
            tracked.asked = ask()
        answers = [self.finder.answer(asked) for asked in tracked.asked]
        found = [answer for answer in answers if answer is not None]
        if len(found) < len(answers):
            return None
        tracked.asked = None
        return found

    def handed_over(self, tracked: TrackedRequest, now: float) -> Found | None:
        """All that the prefiller stores, or what has come when nothing new does for a while."""
        if tracked.pending_handover is None:
            tracked.pending_handover = PendingHandover(self.promised(tracked), now)
        pending, promised = tracked.pending_handover, tracked.pending_handover.promised
        if tracked.asked is None:
            if now < pending.ask_s:
                return None
            pending.asked_s = now
        answers = self.answers(tracked, lambda: self.ask_whole(promised, tracked.tenant))
        if answers is None:
            return None
        found, is_whole = answers[0], self.is_whole(promised, answers)
        if not is_whole and not self.gave_up(pending, found, tracked.tenant):
            return None
        self.counts.add("handovers" if is_whole else "handovers_late")
        if not is_whole:
            limited.warning(
                "request %s: hand-over failed, since only %d of %d tokens came and nothing new for %.1f s; "
                "the rest is computed",
                tracked.name,
                found.tokens,
                promised.tokens,
                self.settings.handover_wait_s,
            )
        tracked.ticket = None
        if not found.chunks or (self.facts.has_states and not is_whole):
            return None  # Another shape may have it, or a state nearer to the prompt's beginning.
        self.note_stored(tracked, found)
        tracked.handed = found
        return found

    def ask_whole(self, promised: Found, tenant: int | None) -> list[Lookup]:
        """Looks up all that was promised to a tenant, and the state at its end where layers have states."""
        asked = [self.finder.ask(promised.shape, promised.ids, promised.tokens, tenant=tenant)]
        if self.facts.has_states and promised.chunks:
            asked.append(self.finder.ask_state(promised, tenant))
        return asked

    def is_whole(self, promised: Found, answers: list[Found]) -> bool:
        found, *state = answers
        return found.tokens == promised.tokens and all(answer.chunks for answer in state)

    def note_stored(self, tracked: TrackedRequest, found: Found) -> None:
        """Chunks in the node's memory need not be stored again, nor those that left a window.

        Chunks that only its disk or its peers have are stored: if they are not loaded, nothing
        would be kept behind them.
        """
        if found.shape == self.facts.shape:
            chunks = found.chunks if self.facts.has_windows else found.in_memory
            tracked.known = min(chunks, found.tokens // self.facts.chunk_tokens)

    def gave_up(self, pending: PendingHandover, found: Found, tenant: int | None) -> bool:
        """Whether to stop waiting for the rest. New chunks are brought into memory meanwhile.

        Times are those of the question: vLLM may not look at a request for minutes.
        """
        if found.chunks > pending.chunks:
            if found.chunks > found.in_memory:
                news = [ids[pending.chunks :] for ids in found.ids]
                pending.holds += self.finder.hold(news, tenant, bring=True)
            pending.chunks, pending.since_s = found.chunks, pending.asked_s
        waited_s = pending.asked_s - pending.since_s
        pending.ask_s = pending.asked_s + min(ASK_AGAIN_S, waited_s / 8)
        return waited_s >= self.settings.handover_wait_s

    def promised(self, tracked: TrackedRequest) -> Found:
        ticket, size = tracked.ticket, self.facts.chunk_tokens
        assert ticket is not None
        prompt = tracked.request.all_token_ids[: tracked.request.num_prompt_tokens]
        most = len(prompt) - self.facts.ends_at_chunks  # the last one needs the state before
        ids = tracked.ids
        if ticket.shape != ids.shape:
            ids = self.ids_in(tracked, ticket.shape)
        ids.grow(prompt)
        whole = min(ticket.tokens, most) // size
        has_tail = ticket.tokens <= most and not self.facts.has_rings
        covered = ticket.tokens if has_tail else whole * size
        return Found(ticket.shape, ids.with_tail(prompt[:covered], whole), covered)

    def ids_in(self, tracked: TrackedRequest, shape: Shape) -> ChunkIds:
        """The chunk ids of a request in a shape, none yet."""
        media, shared = tracked.ids.media, tracked.shared_tokens
        return name_chunks(self.facts, shape, tracked.request, tracked.adapter, media, shared, tracked.tenant)

    def prefix(self, tracked: TrackedRequest, others: int) -> Found | None:
        """The longest prefix that is there and worth loading, in any shape that this engine reads.

        Where layers have states it ends at one. What was handed over is looked up again instead.
        """
        handed = tracked.handed
        if handed is not None:
            answers = self.answers(tracked, lambda: self.ask_whole(handed, tracked.tenant))
            if answers is None:
                return None
            self.note_stored(tracked, answers[0])
            if not self.facts.has_states or self.is_whole(handed, answers):
                return answers[0]
            tracked.handed = None
        if tracked.states is None:
            answers = self.answers(tracked, lambda: self.ask_each_shape(tracked))
            if answers is None:
                return None
            self.note_stored(tracked, answers[0])
            best = tracked.there = max(answers, key=lambda found: found.chunks)
            chunks = self.cost_model.chunks_to_load(best, tracked.request.num_tokens, tracked.held, others)
            best = self.finder.first(best, chunks)
            if not self.facts.has_states:
                return best
            tracked.states = self.finder.ask_states(best, tracked.held, tracked.tenant)
        found = self.finder.answer_states(tracked.states)
        if found is not None:
            tracked.states = None
        return found

    def ask_each_shape(self, tracked: TrackedRequest) -> list[Lookup]:
        """Looks up a request's whole chunks in each shape, up to where a load has failed."""
        tokens, size = tracked.request.all_token_ids, self.facts.chunk_tokens
        asked = []
        for shape in self.shapes:
            ids = tracked.ids if shape == self.facts.shape else tracked.other_ids.get(shape)
            if ids is None:
                ids = self.ids_in(tracked, shape)
                tracked.other_ids[shape] = ids
            ids.grow(tokens)
            limit = len(ids.ranks[0]) if tracked.chunk_limit is None else tracked.chunk_limit
            if self.facts.ends_at_chunks:
                # At least one token is computed, and a state cannot go back by one.
                limit = min(limit, (len(tokens) - 1) // size)
            named = [of_rank[:limit] for of_rank in ids.ranks]
            asked.append(self.finder.ask(shape, named, len(named[0]) * size, tracked.trace, tracked.tenant))
        return asked
