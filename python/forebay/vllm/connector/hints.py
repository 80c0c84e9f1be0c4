"""What an orchestrator says is to become of a request's KV, and how the node is told.

It comes as vLLM's `kv_hints`, or as `kv_hint` in `kv_transfer_params`, which is what Dynamo's router
sends. Nothing in it is trusted, and none of it changes a token. The engine's thread reads and answers;
the node is told on a thread of its own, since it answers when it likes.
"""

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

import forebay
from forebay._log import LimitedLog
from forebay.errors import InvalidError, PeerLostError
from forebay.vllm.connector.config import number
from forebay.vllm.connector.load_or_compute import CostModel
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.stats import Counts
from forebay.vllm.connector.tenants import Tenants, seen_by
from forebay.vllm.connector.tracked import ChunkIds, TrackedRequest, state_id

logger = init_logger("vllm.forebay.scheduler")
limited = LimitedLog(logger)

# The actions, all of version 1.0, and what the node is asked for.
VERBS = {
    "kv.fetch": "prefetch",
    "kv.prefetch": "prefetch",
    "kv.pin": "pin",
    "kv.unpin": "unpin",
    "kv.demote": "demote",
    "kv.share": "share",
    "kv.tenant": "tenant",
    "kv.forget": "forget",
}
ACTION_VERSION = "1.0"
# Of one request. Those behind them are not read.
ACTIONS_MAX = 16
# Actions of all requests that wait for their time.
WAITING_MAX = 1024
DAY_MS = 24 * 3600 * 1000
# A session's KV is fetched so long before the session comes back, or as long as its disk needs for
# all of it and a quarter more.
AHEAD_S, AHEAD_MOST_S = 2.0, 30.0
SPARE = 1.25
# Of a disk from which nothing was loaded yet.
UNKNOWN_BYTES_PER_S = 1e9
# The stores of a request that has ended are waited for so long at most, and so is the SSD.
STORES_END_S = 10.0
DISK_WRITES_S = 30.0
ASK_AGAIN_S = 0.02
# A node that is away, busy with what others said, or does not reach a peer that is to forget, is
# asked again for so long.
BUSY_S, BUSY_AGAIN_S = 30.0, 0.25
# Chunks that the node is told of at a time.
TOGETHER_MAX = 8192


@dataclass(frozen=True)
class Action:
    """What is to be done with the chunks that lie within some of a request's tokens."""

    verb: str
    first_token: int = 0
    end_token: int | None = None  # None: all of them
    ttl_ms: int = 0  # of a pin
    back_in_ms: int | None = None  # after the request has ended, the session comes back
    tenant: str | None = None  # whom the request is for, by name

    @property
    def is_of_the_present(self) -> bool:
        """Whether it is done when the request comes."""
        return self.verb == "prefetch" and self.back_in_ms is None

    @property
    def is_of_the_end(self) -> bool:
        """Whether it is done when the request has ended. Others say how its chunks are named."""
        return not self.is_of_the_present and self.verb not in ("share", "tenant")


@dataclass
class RequestHints:
    """The hints of one request, and what is answered to each."""

    # What is to be done, and what is answered to it.
    actions: list[tuple[Action, dict[str, str]]] = field(default_factory=list)
    answers: list[dict[str, str]] = field(default_factory=list)
    tracked: TrackedRequest | None = None

    @property
    def tenant(self) -> str | None:
        """Whom the request is for, by name, if a hint says so."""
        return next((action.tenant for action, _ in self.actions if action.verb == "tenant"), None)

    def answer(self, said: object, verdict: str, reason: str = "none") -> dict[str, str]:
        self.answers.append({"action_id": str(said)[:256], "verdict": verdict, "reason": reason})
        return self.answers[-1]

    def refuse_all(self, reason: str) -> None:
        """What was accepted is not done."""
        for _, answer in self.actions:
            answer.update(verdict="rejected", reason=reason)
        self.actions.clear()


def read(envelope: object) -> RequestHints:
    """The actions of an envelope, each with its answer."""
    hinted = RequestHints()
    actions = part(envelope, "actions")
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        hinted.answer("", "rejected", f"actions is {kind(actions)}; allowed is a list")
        return hinted
    for at, said in enumerate(actions[:ACTIONS_MAX]):
        name = part(said, "action_id")
        try:
            action, reason = read_action(said)
            if action.verb == "tenant" and hinted.tenant is not None:
                raise InvalidError("a second kv.tenant; allowed is one")
        except InvalidError as error:
            hinted.answer(at if name is None else name, "rejected", str(error))
            continue
        answer = hinted.answer(name, "accepted" if reason == "none" else "clipped", reason)
        hinted.actions.append((action, answer))
    if len(actions) > ACTIONS_MAX:
        reason = f"there are {len(actions)} actions; allowed are {ACTIONS_MAX}"
        hinted.answer(part(actions[ACTIONS_MAX], "action_id"), "rejected", reason)
    return hinted


def read_action(said: object) -> tuple[Action, str]:
    """An action, and the reason if not all of it is done."""
    name, version = part(said, "action_type"), part(said, "action_version")
    verb = VERBS.get(name) if isinstance(name, str) else None
    if verb is None:
        raise InvalidError(f"action_type is {kind(name)}; allowed are {', '.join(VERBS)}")
    if version != ACTION_VERSION:
        raise InvalidError(f"action_version is {kind(version)}; allowed is {ACTION_VERSION}")
    payload = part(said, "payload")
    if not isinstance(payload, Mapping):
        raise InvalidError(f"payload is {kind(payload)}; allowed is an object")
    if name == "kv.fetch":
        return Action(verb), "none"  # It says who has the blocks: the node knows that by itself.
    if verb == "tenant":
        return Action(verb, tenant=read_tenant(payload.get("tenant"))), "none"
    first, end = read_range(payload.get("tokens"))
    if verb == "share" and (first != 0 or end is None):
        raise InvalidError("tokens of kv.share must be [0, END]")
    ttl_ms, reason = 0, "none"
    if verb == "pin":
        ttl_ms = number("ttl_ms", payload.get("ttl_ms"), 1, (1 << 63) - 1, "payload")
        ttl_ms, reason = min(ttl_ms, DAY_MS), "ttl_cut" if ttl_ms > DAY_MS else "none"
    back_in_ms = payload.get("back_in_ms")
    if back_in_ms is not None:
        back_in_ms = number("back_in_ms", back_in_ms, 0, DAY_MS, "payload")
    return Action(verb, first, end, ttl_ms, back_in_ms), reason


def read_tenant(name: object) -> str:
    """Whom a request is for."""
    if not isinstance(name, str) or not name:
        raise InvalidError(f"payload: tenant is {kind(name)}; allowed is a name")
    return name


def read_range(tokens: object) -> tuple[int, int | None]:
    """Some of a request's tokens: the first one, and the one behind the last one."""
    if tokens is None:
        return 0, None
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes) or len(tokens) != 2:
        raise InvalidError(f"payload: tokens is {kind(tokens)}; allowed is [FIRST, END]")
    first = number("tokens[0]", tokens[0], 0, 1 << 30, "payload")
    return first, number("tokens[1]", tokens[1], first, 1 << 30, "payload")


def part(whole: object, name: str) -> Any:
    """A field of JSON, or of vLLM's type of the same shape."""
    return whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)


def kind(value: object) -> str:
    """A value in an error, which may be long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass
class Job:
    """An action on its way to the node."""

    action: Action
    answer: dict[str, str]
    tracked: TrackedRequest
    since_s: float  # when it was to be done
    ids: list[list[bytes]] | None = None  # None: not before its stores have ended


class Hints:
    """The hints of all requests. One thread calls it, that of the scheduler."""

    def __init__(
        self,
        node: forebay.Node,
        facts: Facts,
        counts: Counts,
        obeyed: str,
        tenants: Tenants,
        cost_model: CostModel,
    ) -> None:
        """`obeyed`: a value of the setting `kv_hints`."""
        self.facts, self.counts, self.obeyed, self.tenants = facts, counts, obeyed, tenants
        self.cost_model = cost_model
        self.of: dict[str, RequestHints] = {}
        self.executor = HintExecutor(node, facts)

    def added(self, request: Any) -> None:
        """Reads the hints of a new request, if it has any."""
        typed, params = getattr(request, "kv_hints", None), request.kv_transfer_params
        loose = params.get("kv_hint") if isinstance(params, Mapping) else None
        if self.obeyed == "off" or (typed is None and loose is None):
            return
        hinted = read(loose if typed is None else typed)
        if typed is None and self.obeyed != "any":
            hinted.refuse_all('not_allowed: "kv_hints": "any" lets clients send them')
        self.of[request.request_id] = hinted

    def tenant(self, request: Any) -> int | None:
        """The tenant that a request is for; None: the engine's own. Raises if it is nobody's."""
        hinted = self.of.get(request.request_id)
        try:
            return self.tenants.of(request.cache_salt, None if hinted is None else hinted.tenant)
        except InvalidError as error:
            if hinted is not None:
                hinted.refuse_all(str(error))
            raise

    def shared_tokens(self, name: str) -> int:
        """So many tokens, from the first one on, are named without the request's salt."""
        hinted = self.of.get(name)
        actions = [] if hinted is None else hinted.actions
        return max((action.end_token or 0 for action, _ in actions if action.verb == "share"), default=0)

    def tracked(self, tracked: TrackedRequest) -> None:
        """A request's chunks have names: what it says of the present is done."""
        hinted = self.of.get(tracked.name)
        if hinted is None:
            return
        hinted.tracked = tracked
        for action, answer in hinted.actions:
            if action.is_of_the_present:
                ids = within(action, tracked.ids.ranks, self.facts.chunk_tokens)
                self.executor.put(Job(action, answer, tracked, time.monotonic(), ids), 0.0)

    def finished(self, name: str) -> list[dict[str, str]]:
        """A request has ended: what was left for then is done. Gives the answers to all its hints."""
        hinted = self.of.pop(name, None)
        if hinted is None:
            return []
        if hinted.tracked is None:
            hinted.refuse_all("left_alone")
        for action, answer in hinted.actions:
            if hinted.tracked is None or not action.is_of_the_end:
                continue
            wait_s = 0.0
            if action.back_in_ms is not None:
                wait_s = max(0.0, action.back_in_ms / 1000 - self.ahead_s(action, hinted.tracked))
            self.executor.put(Job(action, answer, hinted.tracked, time.monotonic() + wait_s), wait_s)
        for verdict, count in Counter(answer["verdict"] for answer in hinted.answers).items():
            self.counts.add(f"hints_{verdict}", count)
        for answer in hinted.answers:
            if answer["verdict"] == "rejected":
                limited.warning("request %s: a hint is rejected: %s", name, answer["reason"])
        return hinted.answers

    def ahead_s(self, action: Action, tracked: TrackedRequest) -> float:
        """How long before a session comes back its KV is fetched, wherever it lies by then."""
        computed, size = tracked.request.num_computed_tokens, self.facts.chunk_tokens
        end = computed if action.end_token is None else min(computed, action.end_token)
        disk_bytes = max(0, end - action.first_token) // size * self.facts.chunk_bytes
        disk_s = self.cost_model.disk_s(disk_bytes)
        if disk_s is None:
            disk_s = disk_bytes / UNKNOWN_BYTES_PER_S
        return min(max(AHEAD_S, SPARE * disk_s), AHEAD_MOST_S)

    def close(self) -> None:
        """What has not been done yet is not done any more."""
        self.of.clear()
        self.executor.close()


class HintExecutor:
    """Tells the node of actions, each at its time, on a thread that is started with the first one."""

    def __init__(self, node: forebay.Node, facts: Facts) -> None:
        self.node, self.facts = node, facts
        self.changed = threading.Condition()
        self.waiting: list[tuple[float, int, Job]] = []  # by time
        self.numbers = itertools.count()
        self.thread: threading.Thread | None = None
        self.closed = False

    def put(self, job: Job, wait_s: float) -> None:
        """Has an action done after this time, unless too many wait."""
        with self.changed:
            if self.closed or len(self.waiting) >= WAITING_MAX:
                job.answer.update(verdict="rejected", reason="busy")
                return
            self.wait(job, wait_s)
            if self.thread is None:
                self.thread = threading.Thread(target=self.run, name="forebay-hints", daemon=True)
                self.thread.start()

    def wait(self, job: Job, wait_s: float) -> None:
        """Has an action wait for its time. `changed` is held."""
        entry = time.monotonic() + wait_s, next(self.numbers), job
        heapq.heappush(self.waiting, entry)
        if self.waiting[0] is entry:
            self.changed.notify()

    def run(self) -> None:
        while (job := self.next()) is not None:
            try:
                wait_s = self.do(job)
            except Exception as error:  # The thread has others' actions to do.
                is_away = isinstance(error, PeerLostError)
                wait_s = BUSY_AGAIN_S if is_away and time.monotonic() - job.since_s < BUSY_S else None
                limited.warning(
                    "request %s: its hint %s failed: %s", job.tracked.name, job.action.verb, error
                )
            if wait_s is not None:
                # It was accepted: however many wait by now, it is not dropped.
                with self.changed:
                    self.wait(job, wait_s)

    def next(self) -> Job | None:
        """The next action, at its time; None at the end."""
        with self.changed:
            while not self.closed:
                wait_s = self.waiting[0][0] - time.monotonic() if self.waiting else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self.waiting)[2]
                self.changed.wait(wait_s)
        return None

    def do(self, job: Job) -> float | None:
        """Does what can be done of an action. Gives after what time it is to be asked for again."""
        action, waited_s = job.action, time.monotonic() - job.since_s
        if job.ids is None:
            tracked = job.tracked
            if (tracked.stores or not tracked.is_stored) and waited_s < STORES_END_S:
                return ASK_AGAIN_S
            job.ids, job.since_s = self.ids_of(tracked, action), time.monotonic()
            waited_s = 0.0
        node = seen_by(self.node, job.tracked.tenant)
        reports = [report for ids in job.ids for report in tell(node, action, ids)]
        reasons = Counter(reason for _, reason, _, _ in reports)
        if action.verb == "demote" and reasons["not_on_disk"] and waited_s < DISK_WRITES_S:
            return ASK_AGAIN_S
        if reasons["busy"] and action.is_of_the_end and waited_s < BUSY_S:
            return BUSY_AGAIN_S
        if reasons["peers_unreached"] and waited_s < BUSY_S:
            # A silent peer holds this thread up for a second each time: more and more seldom.
            return max(BUSY_AGAIN_S, waited_s)
        undone = {reason: count for reason, count in reasons.items() if reason not in ("none", "not_stored")}
        if undone:
            limited.warning(
                "request %s: its hint %s did not reach all of %d chunks: %s",
                job.tracked.name,
                action.verb,
                len(reports),
                ", ".join(f"{reason} {count}" for reason, count in undone.items()),
            )
        return None

    def ids_of(self, tracked: TrackedRequest, action: Action) -> list[list[bytes]]:
        """The chunks of a request that has ended: sequences, each of which is told by itself."""
        request, size, named = tracked.request, self.facts.chunk_tokens, tracked.ids
        # The engine's thread may still use the request's own.
        ids = ChunkIds(named.shape, named.namespaces, size, named.media, named.shared)
        tokens = list(request.all_token_ids[: request.num_computed_tokens])
        ids.grow(tokens)
        found = within(action, ids.ranks, size)
        if action.end_token is None:
            prompt = tokens[: request.num_prompt_tokens]
            if action.verb == "forget" and len(prompt) % size:
                tails = ids.with_tail(prompt, len(prompt) // size)
                found += [[of_rank[-1]] for of_rank in tails]
        if self.facts.has_states:
            states = [state_id(one) for of_rank in found for one in of_rank]
            places = seen_by(self.node, tracked.tenant).list_chunks(states[:TOGETHER_MAX])
            found += [[one] for one, report in zip(states, places, strict=False) if report[2] != "nowhere"]
        return found

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify()
        if self.thread is not None:
            self.thread.join(timeout=5)
        if self.waiting:
            logger.warning("the engine ends before %d hints were done", len(self.waiting))


def tell(node: forebay.Node, action: Action, ids: list[bytes]) -> list[tuple[str, str, str, int]]:
    """Tells the node. What continues a chunk leaves memory before it."""
    parts = [ids[at : at + TOGETHER_MAX] for at in range(0, len(ids), TOGETHER_MAX)]
    if action.verb in ("demote", "unpin"):
        parts.reverse()
    told = {} if action.verb != "pin" else {"ttl_ms": action.ttl_ms}
    verb = getattr(node, action.verb)
    return [report for some in parts for report in verb(some, **told)]


def within(action: Action, ranks: Sequence[Sequence[bytes]], size: int) -> list[list[bytes]]:
    """The ids of the whole chunks within an action's tokens, for each rank."""
    first = -(-action.first_token // size)
    end = None if action.end_token is None else action.end_token // size
    return [list(of_rank[first:end]) for of_rank in ranks]
