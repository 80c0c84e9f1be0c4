"""Which answers keep vLLM's scheduler going, without vLLM: a small one that looks at requests as 0.26 does.

It takes requests in their order, stops at the first one without room, and gets blocks back only when a
request ends. What it does with many seeds, an engine does once in a while.
"""

import random
from dataclasses import dataclass

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from forebay.vllm.connector.admission import IDLE_PASSES, LoadAdmission  # noqa: E402
from forebay.vllm.connector.groups import Group  # noqa: E402
from forebay.vllm.connector.policies import State, Window  # noqa: E402

pytestmark = pytest.mark.smoke

BLOCKS = 20


@dataclass(eq=False)
class Request:
    """One that waits, is loaded, or runs."""

    name: str
    priority: int
    blocks: int  # of its prompt
    ahead: int  # that a step takes beside, when it computes
    loadable: bool
    load_passes: int  # that its load takes
    comes_pass: int  # when it is known what there is for it
    run_passes: int
    held: int = 0
    ends_pass: int | None = None  # its load
    loaded: bool = False

    @property
    def full(self) -> int:
        return min(self.blocks + self.ahead, BLOCKS)


class Scheduler:
    """vLLM's, as far as it matters here."""

    def __init__(self, requests: list[Request], by_priority: bool, admission: LoadAdmission) -> None:
        self.skipped: list[Request] = []
        self.waiting, self.running = list(requests), []
        self.by_priority, self.admission = by_priority, admission
        self.passes = 0
        self.answered: set[str] = set()

    @property
    def free(self) -> int:
        return BLOCKS - sum(one.held for one in self.skipped + self.waiting + self.running)

    def queue(self) -> list[Request] | None:
        if self.by_priority:
            both = [queue for queue in (self.waiting, self.skipped) if queue]
            for queue in both:
                queue.sort(key=lambda one: (one.priority, one.name))
            return min(both, key=lambda queue: (queue[0].priority, queue[0].name), default=None)
        return self.skipped or self.waiting or None

    def run(self) -> int:
        """One pass. How many requests compute in it."""
        self.passes += 1
        for one in list(self.running):
            one.run_passes -= 1
            if one.run_passes <= 0:
                self.running.remove(one)
                one.held = 0
        ended = [one.name for one in self.skipped if one.ends_pass == self.passes]
        self.admission.load_ended(ended)
        passed_over: list[Request] = []
        while (queue := self.queue()) is not None:
            one = queue[0]
            if one.ends_pass is not None and self.passes < one.ends_pass:
                passed_over.append(queue.pop(0))
                continue
            one.loaded, one.ends_pass = one.loaded or one.ends_pass is not None, None
            background = False
            if not one.held:
                answer = self.ask(one)
                if answer is None:
                    passed_over.append(queue.pop(0))
                    continue
                background = answer
            reserved = sum(one.full - one.held for one in self.skipped + passed_over if one.held)
            wanted = one.blocks if background else one.full
            if wanted - one.held > self.free - (reserved if background else 0):
                break
            queue.pop(0)
            one.held = wanted
            self.admission.left(one.name)
            self.answered.discard(one.name)
            if background:
                one.ends_pass = self.passes + one.load_passes
                self.admission.load_began(one.name, one.full)
                passed_over.append(one)
            else:
                self.running.append(one)
        self.skipped[:0] = passed_over
        loads = any(one.ends_pass is not None for one in self.skipped)
        self.admission.end_pass(bool(self.answered), idle=not self.running and not loads)
        self.answered.clear()
        return len(self.running)

    def ask(self, one: Request) -> bool | None:
        """As the scheduler's half does."""
        self.admission.left(one.name)
        if self.admission.loaded_go_first or self.passes < one.comes_pass:
            return None
        background = one.loadable and not one.loaded
        if background and not self.admission.may_begin(one.full):
            return None
        self.answered.add(one.name)
        return background


def crowd(seed: int) -> list[Request]:
    """Requests of all kinds."""
    draw = random.Random(seed)
    ahead = draw.choice((0, 0, 1, 3))
    return [
        Request(
            name=f"{number:02}",
            priority=draw.randrange(3),
            blocks=draw.randrange(1, BLOCKS - 3),
            ahead=ahead,
            loadable=draw.random() < 0.7,
            load_passes=draw.randrange(1, 6),
            comes_pass=draw.randrange(12),
            run_passes=draw.randrange(1, 8),
        )
        for number in range(draw.randrange(2, 14))
    ]


@pytest.mark.parametrize("by_priority", [False, True])
def test_all_requests_end_whoever_has_no_room(by_priority: bool) -> None:
    for seed in range(400):
        scheduler = Scheduler(crowd(seed), by_priority, LoadAdmission(BLOCKS))
        while scheduler.waiting or scheduler.skipped or scheduler.running:
            scheduler.run()
            assert scheduler.passes < 1000, f"seed {seed}: nothing ends any more"


def test_whoever_is_passed_over_is_asked_again_in_the_next_pass() -> None:
    admission = LoadAdmission(BLOCKS)
    admission.load_began("loaded", 10)
    admission.load_ended(["loaded", "of another connector"])
    for _ in range(3):
        assert not admission.loaded_go_first
        admission.end_pass(refused=True, idle=False)
        assert admission.loaded_go_first
        admission.end_pass(refused=False, idle=False)
    admission.end_pass(refused=True, idle=False)
    admission.left("loaded")
    assert not admission.loaded_go_first, "behind the last of them all are asked, also in this pass"


def test_nobody_is_passed_over_where_all_have_room() -> None:
    admission = LoadAdmission(BLOCKS)
    for name in ("one", "two"):
        admission.load_began(name, 10)
        admission.load_ended([name])
        admission.end_pass(refused=False, idle=False)
        assert not admission.loaded_go_first


def test_a_load_that_has_to_wait_keeps_its_place_before_others() -> None:
    admission = LoadAdmission(BLOCKS)
    assert admission.may_begin(BLOCKS + 5), "one always may"
    admission.load_began("one", 10)
    assert admission.may_begin(10) and not admission.may_begin(11)
    assert not admission.may_begin(1), "it came later"
    admission.end_pass(refused=False, idle=False)
    assert admission.may_begin(1)
    admission.left("one")
    assert admission.may_begin(BLOCKS)


def test_who_has_no_room_for_a_load_though_nothing_is_in_its_way_computes() -> None:
    admission = LoadAdmission(BLOCKS)
    for _ in range(IDLE_PASSES):
        assert not admission.is_stuck
        admission.end_pass(refused=True, idle=True)
    assert admission.is_stuck
    admission.end_pass(refused=False, idle=False)
    assert not admission.is_stuck


@pytest.mark.parametrize(
    ("group", "tokens", "blocks"),
    [
        (Group(16, 8), 33, 3),
        (Group(16, 8, Window(128)), 33, 3),
        (Group(16, 8, Window(128)), 10_000, (127 + 512 + 15) // 16 + 1),
        (Group(512, 1, State()), 10_000, 3),
        (Group(512, 1, State()), 600, 2),
    ],
)
def test_a_request_never_has_more_blocks_than_is_counted_on(group: Group, tokens: int, blocks: int) -> None:
    assert group.blocks_at_most(tokens, 512) == blocks
