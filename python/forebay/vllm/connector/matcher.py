"""What there is for a request: what a prefiller stored for it, or the longest prefix that pays.

Knows tickets, shapes and where loads have failed before. Must never know blocks, and keeps
nothing in the node.
"""

from collections.abc import Callable

from forebay.vllm.connector.config import Settings, Shape
from forebay.vllm.connector.finder import Finder
from forebay.vllm.connector.load_or_compute import CostModel
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.stats import Counts
from forebay.vllm.connector.tracked import ChunkIds, Found, Lookup, PendingHandover, TrackedRequest

# What was found is true for so long; vLLM asks again with every step while a request has no room.
FRESH_S = 0.005
# And for so long while the node is asked again: who waits for room keeps its place before others.
STALE_S = 0.25
# Also where steps are longer than that: what was said the last time that vLLM asked holds once more, so long.
STEP_S = 2.0
# What a prefiller stores is asked for again after an eighth of the time that it was waited for, and no later.
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
        """Asks by `finder`; what pays, `cost_model` says."""
        self.facts, self.settings, self.finder = facts, settings, finder
        self.cost_model, self.counts, self.clock = cost_model, counts, clock
        cuts = (facts.cut(shape) for shape in settings.also_read)
        self.shapes = (facts.shape, *(shape for shape in cuts if shape != facts.shape))

    def found(self, tracked: TrackedRequest, others: int) -> Found | None:
        """What there is for a request while so many others compute, as of a moment ago.

        None if it is still to come or to be said.
        """
        now = self.clock()
        looked, tracked.looked_s = tracked.looked_s, now
        if (
            tracked.found is not None
            and now - tracked.found_s < FRESH_S
            and tracked.found_held == tracked.held
        ):
            return tracked.found
        found = self.handed_over(tracked, now) if tracked.ticket is not None else self.kept(tracked, others)
        if found is not None:
            tracked.found, tracked.found_s, tracked.found_held = found, now, tracked.held
        elif tracked.found is not None and tracked.found_held == tracked.held:
            age_s = now - tracked.found_s
            if age_s < STALE_S or (tracked.found_s >= looked and age_s < STEP_S):
                return tracked.found
        return found

    def answers(self, tracked: TrackedRequest, ask: Callable[[], list[Lookup]]) -> list[Found] | None:
        """What the node says to what is asked, once it has said all of it."""
        if tracked.asked is None:
            tracked.asked = ask()
        answers = [self.finder.answer(asked) for asked in tracked.asked]
        found = [answer for answer in answers if answer is not None]
        if len(found) < len(answers):
            return None
        tracked.asked = None
        return found

    def handed_over(self, tracked: TrackedRequest, now: float) -> Found | None:
        """All that the prefiller stores, or what is there when nothing has come for a while."""
        if tracked.pending_handover is None:
            tracked.pending_handover = PendingHandover(self.promised(tracked), now)
        pending, promised = tracked.pending_handover, tracked.pending_handover.promised
        if tracked.asked is None:
            if now < pending.ask_s:
                return None
            pending.asked_s = now
        answers = self.answers(tracked, lambda: self.ask_whole(promised))
        if answers is None:
            return None
        found, is_whole = answers[0], self.is_whole(promised, answers)
        if not is_whole and not self.gave_up(pending, found):
            return None
        self.counts.add("handovers" if is_whole else "handovers_late")
        tracked.ticket = None
        if not found.chunks or (self.facts.has_states and not is_whole):
            return None  # There may be something in a shape that is read here, or a state further in front.
        self.know(tracked, found)
        tracked.handed = found
        return found

    def ask_whole(self, promised: Found) -> list[Lookup]:
        """Asks for all that was promised, and for the state at the end of it where layers have states."""
        asked = [self.finder.ask(promised.shape, promised.ids, promised.tokens)]
        if self.facts.has_states and promised.chunks:
            asked.append(self.finder.ask_state(promised))
        return asked

    def is_whole(self, promised: Found, answers: list[Found]) -> bool:
        """Whether all that was asked for is there."""
        found, *state = answers
        return found.tokens == promised.tokens and all(answer.chunks for answer in state)

    def know(self, tracked: TrackedRequest, found: Found) -> None:
        """What is in the node's memory need not be stored, nor what windows have left by now.

        What only its disk or its peers have must: if it is not loaded, nothing is kept behind it.
        """
        if found.shape == self.facts.shape:
            chunks = found.chunks if self.facts.has_windows else found.in_memory
            tracked.known = min(chunks, found.tokens // self.facts.chunk_tokens)

    def gave_up(self, pending: PendingHandover, found: Found) -> bool:
        """Whether the rest is not waited for any more. What is new comes nearer meanwhile.

        An answer is of when it was asked for: vLLM looks at nobody, maybe for minutes, while it has no room.
        """
        if found.chunks > pending.chunks:
            if found.chunks > found.in_memory:
                pending.holds += self.finder.bring([ids[pending.chunks :] for ids in found.ids])
            pending.chunks, pending.since_s = found.chunks, pending.asked_s
        waited_s = pending.asked_s - pending.since_s
        pending.ask_s = pending.asked_s + min(ASK_AGAIN_S, waited_s / 8)
        return waited_s >= self.settings.handover_wait_s

    def promised(self, tracked: TrackedRequest) -> Found:
        """What a ticket says that there will be."""
        ticket, size = tracked.ticket, self.facts.chunk_tokens
        assert ticket is not None
        prompt = tracked.request.all_token_ids[: tracked.request.num_prompt_tokens]
        most = len(prompt) - self.facts.has_states  # The last token is computed from the state before it.
        ids = ChunkIds(ticket.shape, self.namespaces(tracked, ticket.shape), size, tracked.ids.media)
        ids.grow(prompt)
        whole = min(ticket.tokens, most) // size
        covered = ticket.tokens if ticket.tokens <= most else whole * size
        return Found(ticket.shape, ids.with_tail(prompt[:covered], whole), covered)

    def namespaces(self, tracked: TrackedRequest, shape: Shape) -> list[bytes]:
        """Of a request's chunks, if an engine of that shape has stored them."""
        digest = tracked.adapter.digest if tracked.adapter is not None else None
        return self.facts.namespaces(tracked.request.cache_salt, shape, digest)

    def kept(self, tracked: TrackedRequest, others: int) -> Found | None:
        """The longest prefix that is there and pays, in this engine's shape or another that it reads. Where
        layers have states, it ends at one.
        """
        handed = tracked.handed
        if handed is not None:
            said = self.answers(tracked, lambda: self.ask_whole(handed))
            if said is None:
                return None
            self.know(tracked, said[0])
            if not self.facts.has_states or self.is_whole(handed, said):
                return said[0]
            tracked.handed = None
        if tracked.states is None:
            answers = self.answers(tracked, lambda: self.in_each_shape(tracked))
            if answers is None:
                return None
            self.know(tracked, answers[0])
            best = max(answers, key=lambda found: found.chunks)
            worth = self.cost_model.chunks_to_load(best, tracked.request.num_tokens, tracked.held, others)
            best = self.finder.first(best, worth)
            if not self.facts.has_states:
                return best
            tracked.states = self.finder.ask_states(best, tracked.held)
        found = self.finder.answer_states(tracked.states)
        if found is not None:
            tracked.states = None
        return found

    def in_each_shape(self, tracked: TrackedRequest) -> list[Lookup]:
        """Asks for a request's whole chunks in each shape, its own first, up to where loading has failed."""
        tokens, size = tracked.request.all_token_ids, self.facts.chunk_tokens
        asked = []
        for shape in self.shapes:
            ids = tracked.ids if shape == self.facts.shape else tracked.other_ids.get(shape)
            if ids is None:
                ids = tracked.other_ids[shape] = ChunkIds(
                    shape, self.namespaces(tracked, shape), size, tracked.ids.media
                )
            ids.grow(tokens)
            limit = len(ids.ranks[0]) if tracked.chunk_limit is None else tracked.chunk_limit
            if self.facts.has_states:
                # One token at least is computed, and no state goes back by one.
                limit = min(limit, (len(tokens) - 1) // size)
            named = [of_rank[:limit] for of_rank in ids.ranks]
            asked.append(self.finder.ask(shape, named, len(named[0]) * size))
        return asked
