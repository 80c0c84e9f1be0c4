"""The scheduler's half: what a request loads from the node, and what of it is stored there.

It knows vLLM's requests and its scheduler's calls, in the order of a request's life and of a step.
The workers move the bytes. Decisions that need no vLLM are elsewhere: whether to load in
`load_or_compute`, how in `load_mode`, when in `admission`, and what to store in `stores`.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from vllm.logger import init_logger

import forebay
from forebay._log import LimitedLog
from forebay.vllm.connector import compat, handover, loads, step_recovery
from forebay.vllm.connector.admission import LoadAdmission
from forebay.vllm.connector.config import Settings
from forebay.vllm.connector.corrections import Corrections, before_counts_are_read
from forebay.vllm.connector.events import Events
from forebay.vllm.connector.finder import Finder
from forebay.vllm.connector.groups import fail_as_one
from forebay.vllm.connector.hints import Hints
from forebay.vllm.connector.load_mode import layerwise_is_possible, runs_layerwise
from forebay.vllm.connector.load_or_compute import CostModel
from forebay.vllm.connector.matcher import Matcher
from forebay.vllm.connector.metadata import NOTHING, Load, Pages, Report, Step
from forebay.vllm.connector.namespace import Facts, is_alone
from forebay.vllm.connector.offers import Offers
from forebay.vllm.connector.outcomes import Outcomes
from forebay.vllm.connector.requests import Requests
from forebay.vllm.connector.stats import Counts, tenant_tokens
from forebay.vllm.connector.stores import Stores
from forebay.vllm.connector.tenants import Tenants, seen_by
from forebay.vllm.connector.tracked import Found, Loading, TrackedRequest, state_id

logger = init_logger("vllm.forebay.scheduler")
limited = LimitedLog(logger)

FINISHED_WELL = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
# Stores of a finished request mostly end in this time. With a stuck node they take longer.
FREE_SOON_S = 0.05


class SchedulerHalf:
    """Lives in the process of vLLM's scheduler. One thread calls it."""

    def __init__(
        self,
        vllm_config: Any,
        facts: Facts,
        settings: Settings,
        node: forebay.Node,
        blocks: int,
        events: Events | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For an engine with so many blocks. `events`: where vLLM publishes KV events."""
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self.facts, self.settings, self.node, self.clock = facts, settings, node, clock
        self.events = events
        self.engine_id = str(transfer.engine_id)
        self.loads_kv, self.stores_kv = bool(transfer.is_kv_consumer), bool(transfer.is_kv_producer)
        self.in_lockstep = compat.in_lockstep(vllm_config)
        drafts = compat.drafts_of(vllm_config)
        self.layerwise_possible = layerwise_is_possible(
            recovers_steps=step_recovery.install_step_recovery(),
            pipeline_ranks=parallel.pipeline_parallel_size,
            fails_whole=fail_as_one(facts.groups),
        )
        if fail_as_one(facts.groups):
            compat.find_failures_in_all_groups()
        if facts.has_states:
            compat.hit_only_where_states_are()
        self.workers = parallel.world_size
        self.longest, self.ahead, self.step_tokens = compat.most_tokens(vllm_config)
        self.admission = LoadAdmission(blocks)
        recomputes = transfer.kv_load_failure_policy == "recompute"
        self.offers = Offers(facts, blocks, reads=recomputes)
        block_tokens = facts.groups[0].block_tokens
        self.corrections = Corrections(facts.chunk_tokens, block_tokens, is_alone(vllm_config))
        before_counts_are_read()
        self.finder = Finder(node, facts, clock)
        self.stores = Stores(
            facts,
            self.workers,
            drafts,
            on_v1=not compat.runs_v2(vllm_config),
            needs_drafts=facts.has_states and drafts > 0 and compat.needs_drafts(),
        )
        self.cost_model = CostModel(facts, settings.profile, settings.gate)
        self.counts = Counts()
        self.outcomes = Outcomes(node, facts)
        tenants = Tenants(settings.tenant, dict(settings.tenants))
        self.hints = Hints(node, facts, self.counts, settings.kv_hints, tenants, self.cost_model)
        facts.namespaces(None, facts.shape)  # described before a request comes
        self.matcher = Matcher(facts, settings, self.finder, self.cost_model, self.counts, clock)
        self.requests = Requests(
            facts,
            settings,
            node,
            self.offers,
            self.counts,
            vllm_config.lora_config,
            self.stores_kv,
            self.outcomes,
            self.hints,
        )
        self.tracked = self.requests.tracked
        self.running: set[str] = set()  # computed in the last step, or admitted to this one
        self.unstored: dict[str, TrackedRequest] = {}  # with computed chunks to store
        self.finishing: dict[str, TrackedRequest] = {}  # finished, and not stored
        self.freeing: dict[str, float] = {}  # finished, and still read by stores: since when
        self.loading: dict[int, Loading] = {}
        # Who gave up blocks while a layerwise load was in flight: the last job then, name, blocks.
        self.departures: list[tuple[int, str, step_recovery.Tables]] = []
        self.new_loads: list[Load] = []
        self.new_blocks: set[int] = set()  # given out since the last step
        self.last_job = 0
        self.step = 0
        self.quiet_steps = 0  # so many steps of one token per request end no chunk

    def workers_opened(self, workers: Mapping[int, object]) -> None:
        """What the workers say of themselves, by rank."""
        self.offers.workers_opened(workers, self.workers)
        logger.info("direct hand-overs are %s", "off" if self.offers.engine is None else "on")

    # What vLLM tells about requests.

    def request_added(self, request: Any) -> None:
        """vLLM has a new request, which may wait for long."""
        self.requests.add(request)

    def match(self, request: Any, held: int) -> tuple[int | None, bool]:
        """How many tokens to load behind the `held` ones, and whether in the background.

        None: vLLM asks again, since the node has not answered, a hand-over is not complete, or
        other requests go first (`admission`). Nothing is pinned in the node yet.
        """
        name = request.request_id
        self.admission.left(name)
        self.corrections.asked(self.tracked.get(name), request)
        if self.admission.loaded_go_first:
            return None, False
        tokens, in_background = self.find_load(request, held)
        if in_background:
            if self.admission.is_stuck:
                tokens, in_background = 0, False
                limited.warning("request %s: no room for its load, its prompt is computed", name)
            elif not self.admission.may_begin(self.blocks_of(request)):
                return None, False
        if tokens is not None:
            self.corrections.answered[name] = held
        return tokens, in_background

    def may_load(self, request: Any) -> bool:
        is_known = request.request_id in self.tracked
        # One token is computed anyway. If none were, vLLM would ask again after the load, for ever.
        return is_known and self.loads_kv and request.num_tokens > 1 and not request.skip_reading_prefix_cache

    def blocks_of(self, request: Any) -> int:
        """How many blocks a request may need for its prompt and the drafts behind it."""
        tokens = min(request.num_tokens + self.ahead, self.longest)
        return sum(group.blocks_at_most(tokens, self.step_tokens) for group in self.facts.groups)

    def find_load(self, request: Any, held: int) -> tuple[int | None, bool]:
        """`match`, without regard to other requests that wait."""
        if not self.requests.is_named(request):
            return None, False
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        self.notice_preemption(tracked)
        tracked.held, tracked.blocks = held, []  # vLLM asks only for requests without blocks.
        if compat.may_end(request):
            return 0, False
        size = self.facts.chunk_tokens
        if self.stores_kv and self.facts.has_states:
            compat.stop_at(request, (request.num_tokens - 1) // size * size)
        if not self.may_load(request):
            return 0, False
        others = len(self.running - {tracked.name})
        found = self.matcher.found(tracked, others)
        if found is None:
            return None, False
        usable = min(found.tokens, request.num_tokens)
        if usable - held <= 0:
            return 0, False
        # If all is found, the last token is computed again. On CPUs that may write its page while
        # the page is compared with its checksum.
        is_compared = self.facts.on_cpu and usable == request.num_tokens
        tracked.layerwise = runs_layerwise(
            layerwise_possible=self.layerwise_possible and not is_compared,
            handed_over=tracked.handed is not None or tracked.direct is not None,
            others=others + self.in_lockstep,
            load_s=self.cost_model.load_s(found, held),
            compute_s=self.cost_model.compute_s(request.num_tokens - usable, usable),
            in_memory=found.in_memory == found.chunks,
        )
        if tracked.layerwise or self.facts.has_windows:
            # At least one token is computed, and windows must still hold what it sees. On GPUs its
            # page may be loaded and written in any order: both writers hold the same token.
            usable = min(usable, request.num_tokens - 1)
        return max(0, usable - held), usable > held and not tracked.layerwise

    def blocks_allocated(self, request: Any, blocks: Any, external: int) -> None:
        """A request got `blocks`, its whole table. `external` tokens are to be loaded into them."""
        tracked = self.tracked.get(request.request_id)
        self.admission.left(request.request_id)
        self.corrections.admitted(tracked, request, external, self.may_load(request))
        table = [[0 if block.is_null else block.block_id for block in group] for group in blocks.blocks]
        if tracked is None:
            self.new_blocks.update(block for group in table for block in group)
            return
        self.notice_preemption(tracked)
        held = [tracked.held // group.block_tokens for group in self.facts.groups]
        mine = [len(group) for group in tracked.blocks] or held
        for group, have in zip(table, mine, strict=True):
            self.new_blocks.update(group[have:])
        if not tracked.blocks:
            # A background load that failed half way has left tokens that vLLM counts by itself.
            begun = max(tracked.held + external, request.num_computed_tokens)
            tracked.reset_progress(begun)
            tracked.stale = tracked.stale and begun > 0
            # vLLM's own cache may have KV of what the adapter's name stood for before.
            renamed = tracked.adapter is not None and tracked.adapter.renamed
            tracked.gap = tracked.stale or (tracked.held > 0 and renamed)
        tracked.blocks = table
        self.running.add(tracked.name)
        self.quiet_steps = 0
        self.outcomes.admitted(tracked, external, self.may_load(request))
        if external > 0:
            self.plan_load(tracked, external)
        self.decline(tracked)
        tracked.since = self.last_job
        # These pinned a prefiller's chunks until now, and waited for the node's answers.
        tracked.pending_handover = tracked.asked = tracked.states = None

    def blocks_lost(self, name: str) -> None:
        """A request starts over when its load has ended: it shares blocks whose load failed."""
        tracked = self.tracked.get(name)
        if tracked is not None:
            tracked.blocks = []

    def plan_load(self, tracked: TrackedRequest, external: int) -> None:
        """Plans the load of what was found, which vLLM counts as `external` tokens."""
        assert tracked.found is not None
        self.last_job += 1
        states, state_pages = self.state_to_load(tracked, tracked.found)
        message, load = loads.plan(
            self.facts, self.finder, tracked, external, self.last_job, states, state_pages
        )
        self.new_loads.append(message)
        tracked.loading = load
        self.loading[self.last_job] = load
        if load.direct:
            self.counts.add("handovers_direct")
            # The prefiller stores them.
            tracked.known = tracked.found.tokens // self.facts.chunk_tokens
        else:
            self.cost_model.load_began(load)
        self.corrections.load_began(load)
        if not tracked.layerwise:
            self.running.discard(tracked.name)
            self.admission.load_began(tracked.name, self.blocks_of(tracked.request))
        for tier, chunks in load.tiers.items():
            if chunks:
                tokens = chunks * self.facts.chunk_tokens
                self.counts.add(f"tokens_{tier}", tokens)
                if tracked.tenant is not None:
                    self.counts.add(tenant_tokens(tracked.tenant, tier), tokens)

    def decline(self, tracked: TrackedRequest) -> None:
        """A request reads nothing directly, or nothing more. Should it fail, it asks the node."""
        tracked.direct = None
        if tracked.ticket is None or tracked.ticket.direct is None:
            return
        is_read = tracked.loading is not None and tracked.loading.direct
        self.offers.decline(tracked.ticket.direct.unread if is_read else tracked.ticket.direct.offers)
        tracked.ticket = handover.Ticket(tracked.ticket.tokens, tracked.ticket.shape)

    def state_to_load(self, tracked: TrackedRequest, found: Found) -> tuple[list[bytes], Pages]:
        """The state at the end of what was found, for each rank, and the blocks that it goes to."""
        if not self.facts.has_states:
            return [], []
        states = [state_id(of_rank[-1]) for of_rank in found.ids]
        seen_by(self.node, tracked.tenant).used(states, self.facts.state_bytes)
        groups = zip(self.facts.groups, tracked.blocks, strict=True)
        blocks = [group.block_ending(table, found.tokens) for group, table in groups if group.state]
        assert all(blocks), "vLLM gives a block for the state at the end of what is loaded"
        return states, [np.array([block], dtype=np.int32) for block in blocks]

    def sources(self, request: Any, external: int) -> dict[str, int]:
        """How many of the `external` tokens, whose load was just planned, are in which tier."""
        tracked = self.tracked.get(request.request_id)
        if tracked is None or tracked.loading is None:
            return {}
        return tracked.loading.tiers_of(tracked.held, tracked.held + external, self.facts.chunk_tokens)

    def frees_soon(self) -> bool:
        """Whether blocks of a finished request are free as soon as its stores have ended."""
        youngest_s = next(reversed(self.freeing.values()), None)
        return youngest_s is not None and self.clock() - youngest_s < FREE_SOON_S

    def freed(self, names: Iterable[str]) -> None:
        """Nothing reads the blocks of these finished requests any more."""
        for name in names:
            self.freeing.pop(name, None)
            self.offers.freed(name)

    def received(self, names: Iterable[str]) -> None:
        """vLLM has heard that the background loads of these requests have ended."""
        self.admission.load_ended(names)

    def request_finished(
        self, request: Any, blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether stores read its blocks, and what its client is told."""
        waits, params = self.end_request(request, blocks)
        answers = self.hints.finished(request.request_id)
        # Another connector that does hand-overs may have something to say, and only one may.
        if answers and self.settings.handovers:
            params = {**(params or {}), "kv_hint_answers": answers}
        return waits, params

    def end_request(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether stores read its blocks, and what a prefiller hands over."""
        name = request.request_id
        self.running.discard(name)
        self.admission.left(name)
        self.corrections.left(name)
        self.note_departure(name, blocks)
        tracked = self.requests.drop(name)
        if tracked is not None:
            self.decline(tracked)
        if tracked is None or tracked.loading is not None and not tracked.loading.layerwise:
            self.unstored.pop(name, None)
            return False, None  # vLLM itself waits for the end of a background load.
        params, well = None, request.status.name in FINISHED_WELL
        if well and self.stores_kv and not tracked.gap:
            self.set_store_goal(tracked, request.num_computed_tokens)
            if tracked.states_to_store:
                self.stores.keep_certain_states(tracked)
            if handover.is_prefill(self.requests.params(request)):
                offered = self.offers.offer(tracked, blocks, tracked.keys)
                if offered is not None:
                    self.counts.add("offers")
                params = handover.answer(request, blocks, self.engine_id, self.facts, offered)
        if well and not tracked.is_stored:
            self.unstored[name] = tracked
        else:
            self.unstored.pop(name, None)
        if not well or (tracked.is_stored and not tracked.stores and name not in self.offers.kept):
            # An aborted request may wait for another connector's load, whose end frees its blocks.
            # Stores that still read them end before others write there, as after a preemption.
            return False, params
        self.finishing[name] = tracked
        self.freeing[name] = self.clock()
        return True, params

    # What happens in a step.

    def build_step(self, output: Any) -> Step:
        """What the workers do in the step that vLLM has just scheduled."""
        self.step += 1
        self.finder.new_step()
        for name in output.preempted_req_ids or ():
            self.preempted(name)
        self.follow_step(output)
        tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        answered = self.corrections.answered
        self.admission.end_pass(bool(answered), idle=not (tokens or self.loading or self.freeing))
        answered.clear()
        something = (
            self.new_blocks or self.new_loads or self.unstored or self.finishing or not self.offers.is_quiet()
        )
        if 0 < tokens == requests and not something:
            return NOTHING  # As in most steps.
        step = Step(self.step, idle=tokens == 0)
        if self.new_blocks:
            step.flush = self.stores.touched(self.new_blocks)
            self.new_blocks.clear()
        if self.new_loads:
            step.loads, self.new_loads = self.new_loads, []
            step.early = any(load.layerwise for load in step.loads) and not compat.writes_kv_first(output)
        self.offers.tell(step)
        for name, tracked in list(self.unstored.items()):
            self.plan_stores(tracked, step)
            if tracked.is_stored:
                del self.unstored[name]
        for name, tracked in list(self.finishing.items()):
            if tracked.is_stored:
                step.sent[name] = sorted(tracked.stores)
                del self.finishing[name]
        if tokens > requests and not step.loads:
            step.timed = True
            self.cost_model.step_began(self.step, output.num_scheduled_tokens, self.tracked, self.clock())
        return step

    def follow_step(self, output: Any) -> None:
        """Follows which blocks requests have and which tokens the step computes."""
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        if any(cached.new_block_ids):
            self.extend_blocks(cached)
        if self.new_blocks and self.facts.has_states:
            lost = self.stores.drop_lost_states(self.unstored.values(), self.new_blocks)
            if lost:
                self.counts.add("states_lost", lost)
        if output.scheduled_new_reqs or cached.resumed_req_ids:
            self.note_begun([*(new.req_id for new in output.scheduled_new_reqs), *cached.resumed_req_ids])
        if scheduled.keys() != self.running:
            self.running = set(scheduled)
        elif self.quiet_steps > 0 and output.total_num_scheduled_tokens == len(scheduled):
            self.quiet_steps -= 1
            return
        self.quiet_steps = 0
        if not self.stores_kv:
            return
        # The only loop over all requests; quiet steps have returned above.
        nearest, unverified = sys.maxsize, self.oldest_unverified
        for name, tokens in scheduled.items():
            tracked = self.tracked.get(name)
            if tracked is not None and tracked.since >= unverified:
                nearest = 1  # What it computes is right only if the load was: look again next step.
            elif tracked is not None:
                computed = tracked.request.num_computed_tokens + tokens
                if computed >= tracked.next_tokens:
                    self.set_store_goal(tracked, computed)
                nearest = min(nearest, tracked.next_tokens - computed)
                if self.facts.has_states:
                    drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
                    nearest = min(nearest, self.note_state(tracked, tokens, drafts))
        self.quiet_steps = nearest - 1

    def note_begun(self, names: Iterable[str]) -> None:
        for name in names:
            tracked = self.tracked.get(name)
            if tracked is not None and tracked.request.num_computed_tokens > tracked.begun:
                tracked.gap = True  # Another connector loaded the rest: it is not verified.

    def extend_blocks(self, cached: Any) -> None:
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new is None or name in cached.resumed_req_ids:
                continue  # `blocks_allocated` had the whole table of a resumed request.
            for group in new:
                self.new_blocks.update(group)
            tracked = self.tracked.get(name)
            if tracked is not None and tracked.blocks:
                for have, more in zip(tracked.blocks, new, strict=True):
                    have.extend(more)

    def set_store_goal(self, tracked: TrackedRequest, computed: int) -> None:
        """The chunks among the first `computed` tokens are to be stored."""
        self.stores.set_goal(tracked, computed, handover.is_prefill(self.requests.params(tracked.request)))
        if not tracked.is_stored:
            self.unstored[tracked.name] = tracked

    def note_state(self, tracked: TrackedRequest, tokens: int, drafts: int) -> int:
        """Notes the state that a step may compute. Returns how many tokens are left to the next one."""
        is_prefill = handover.is_prefill(self.requests.params(tracked.request))
        if self.stores.note_state(tracked, tokens, drafts, is_prefill):
            self.unstored[tracked.name] = tracked
        end = tracked.request.num_computed_tokens + tokens
        return int(self.facts.chunk_tokens - end % self.facts.chunk_tokens)

    def plan_stores(self, tracked: TrackedRequest, step: Step) -> None:
        tracked.computed = tracked.request.num_computed_tokens
        store = self.stores.plan(tracked, self.last_job + 1)
        if store is not None:
            self.last_job += 1
            step.stores.append(store)
        for due in self.stores.due_states(tracked) if tracked.states_to_store else ():
            state = self.stores.plan_state(tracked, due, self.last_job + 1)
            if state is not None:
                self.last_job += 1
                step.stores.append(state)
                node = seen_by(self.node, tracked.tenant)
                node.used([of_rank[0][0][0] for of_rank in state.chunks], self.facts.state_bytes)

    def preempted(self, name: str) -> None:
        """A request lost its blocks. It may have new ones already."""
        self.running.discard(name)
        tracked = self.tracked.get(name)
        if tracked is not None:
            self.notice_preemption(tracked)

    def notice_preemption(self, tracked: TrackedRequest) -> None:
        """Takes in that a request has lost its blocks, if it has since the last time."""
        lost = tracked.notice_preemption()
        if lost:
            self.note_departure(tracked.name, lost)

    def note_departure(self, name: str, tables: step_recovery.Tables) -> None:
        """Remembers the blocks that a request gave up while others computed from a load in flight.

        If that load fails, they may be wrong, and vLLM would not look there.
        """
        if self.oldest_unverified <= self.last_job:
            self.departures.append((self.last_job, name, tables))

    @property
    def oldest_unverified(self) -> int:
        """The oldest layerwise load in flight, or a number beyond all jobs.

        A request that got its blocks before it has none of those that it fills.
        """
        return min((job for job, load in self.loading.items() if load.layerwise), default=sys.maxsize)

    def departed_requests(self) -> list[tuple[str, step_recovery.Tables]]:
        return [(name, tables) for _, name, tables in self.departures]

    def step_ended(self, report: Report | None) -> None:
        """A step has ended, with what the workers report of it."""
        if report is None and not self.cost_model.steps:
            return  # As after most steps, which nobody times.
        self.cost_model.step_ended(None if report is None else report.step, self.clock())
        if report is None:
            return
        self.cost_model.note_rates(report.rates)
        for job, result in report.stores.items():
            stored = self.stores.ended(job, result)
            if stored is not None and self.events is not None and stored.resets == self.facts.resets:
                self.events.chunks_stored(stored.owner.request, stored.owner.ids.ranks, stored.chunks_taken)
        for job, ended in report.loads.items():
            load = self.loading.get(job)
            if load is None:
                continue
            load.workers += ended.workers
            load.usable = min(load.usable, ended.tokens)
            if load.workers >= self.workers:
                del self.loading[job]
                self.load_ended(load.owner, load)
        if self.departures:
            oldest = self.oldest_unverified
            self.departures = [one for one in self.departures if one[0] >= oldest]

    def load_ended(self, tracked: TrackedRequest, load: Loading) -> None:
        """A load has ended at all workers. The request does not ask again for what did not come."""
        if not load.direct:
            self.cost_model.load_ended(load)
        for hold in load.holds:
            hold.release()
        if self.events is not None and load.resets == self.facts.resets and not load.direct:
            chunks = load.usable // self.facts.chunk_tokens
            self.events.chunks_stored(
                tracked.request, load.ids, range(load.first_chunk, load.first_chunk + chunks)
            )
        if load.usable < load.tokens:
            self.corrections.load_fell_short(tracked, load)
        if tracked.loading is not load:
            return  # It was preempted and has begun another load into other blocks.
        tracked.loading = None
        if load.usable >= load.tokens:
            if load.direct:
                tracked.ticket = None
            return
        if load.direct:
            # The node may have what the prefiller's blocks did not give.
            self.counts.add("handovers_direct_failed")
            tracked.found, tracked.known, tracked.blocks = None, 0, []
            return
        tracked.chunk_limit = load.first_chunk + load.usable // self.facts.chunk_tokens
        tracked.known = min(tracked.known, tracked.chunk_limit)
        tracked.found = tracked.handed = tracked.ticket = None
        self.counts.add("loads_failed")
        if load.layerwise:
            tracked.planned = min(tracked.planned, tracked.known)
            tracked.goal, tracked.next_tokens, self.quiet_steps = tracked.planned, 0, 0
        else:
            tracked.blocks = []

    def reset(self) -> bool:
        """Gives KV new names: nothing of before is found. False: loads are in flight."""
        if self.settings.keep_on_reset:
            return not self.loading
        self.facts.forget()
        self.facts.namespaces(None, self.facts.shape)
        if self.events is not None:
            self.events.forget()
        for tracked in self.tracked.values():
            named = len(tracked.ids.ranks[0])
            tracked.ids = self.matcher.ids_in(tracked, self.facts.shape)
            tracked.ids.grow(tracked.request.all_token_ids, named)
            tracked.resets = self.facts.resets
            tracked.forget()
        limited.info("reset %d: KV that was stored until now is not found any more", self.facts.resets)
        return not self.loading

    def close(self) -> None:
        for load in self.loading.values():
            for hold in load.holds:
                hold.release()
        self.requests.close()
        self.hints.close()
        self.node.close()
