"""What is worth loading follows from what loads have taken, of every tier for itself."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from forebay.vllm.connector.load_or_compute import CostModel  # noqa: E402
from forebay.vllm.connector.metadata import LoadResult, Report, Step, StoreResult  # noqa: E402
from forebay.vllm.connector.tracked import Found  # noqa: E402
from forebay.vllm.connector.worker import WorkerHalf  # noqa: E402

pytestmark = pytest.mark.smoke

CHUNK_TOKENS, CHUNK_BYTES = 256, 32 << 20
# Eight chunks take 53 ms at this rate and 50 to compute.
DISK_BYTES_S = 5e9


@pytest.fixture
def cost_model() -> CostModel:
    """An engine that computes a token in 25 us."""
    facts: Any = SimpleNamespace(layers=4, chunk_tokens=CHUNK_TOKENS, chunk_bytes=CHUNK_BYTES)
    made = CostModel(facts, None)
    now = 0.0
    for step, tokens in enumerate((512, 2048, 8192)):
        made.step_began(step, {"one": tokens}, {}, now)
        now += 25e-6 * tokens
        made.step_ended(step, now)
    return made


def found(memory: int = 0, disk: int = 0) -> Any:
    """So many chunks."""
    chunks = memory + disk
    return Found(SimpleNamespace(), [[bytes(32)] * chunks], chunks * CHUNK_TOKENS, memory, disk, 0)  # type: ignore[arg-type]


def loading(**tiers: int) -> Any:
    return SimpleNamespace(tiers=tiers)


def worth(cost_model: CostModel, what: Any, others: int = 0) -> int:
    return cost_model.chunks_to_load(
        what, what.tokens + 600, 0, others
    )  # Less takes as long as a step of 512.


def test_a_disk_that_is_slower_than_computing_is_left_alone_and_memory_is_not(cost_model: CostModel) -> None:
    assert worth(cost_model, found(disk=8)) == 8, "nobody knows yet"
    cost_model.note_rates([("disk", 1 << 30, (1 << 30) / DISK_BYTES_S), ("memory", 1 << 30, 0.02)])
    assert [worth(cost_model, found(disk=8)) for _ in range(15)] == [0] * 15
    assert worth(cost_model, found(disk=8)) == 1, "now and then a little, so that a faster disk gets known"
    assert worth(cost_model, found(disk=8), others=31) == 8, "computing would hold up 31 others"
    assert worth(cost_model, found(memory=8)) == 8
    cost_model.gate = False
    assert [worth(cost_model, found(disk=8)) for _ in range(15)] == [8] * 15, (
        "whoever says so has all of it loaded"
    )


def test_what_is_being_loaded_already_is_waited_for_and_so_counts(cost_model: CostModel) -> None:
    cost_model.note_rates([("disk", 1 << 30, (1 << 30) / (4 * DISK_BYTES_S)), ("memory", 1 << 30, 0.02)])
    assert worth(cost_model, found(disk=8)) == 8
    alone_s = cost_model.load_s(found(disk=8), 0)
    other = loading(memory=0, disk=40, peer=0)
    cost_model.load_began(other)
    behind_s = cost_model.load_s(found(disk=8), 0)
    assert alone_s is not None and behind_s == pytest.approx(6 * alone_s)
    assert worth(cost_model, found(disk=8)) == 0
    assert worth(cost_model, found(memory=8)) == 8, "memory has no queue"
    cost_model.load_ended(other)
    assert cost_model.load_s(found(disk=8), 0) == alone_s


def test_how_long_a_load_takes_is_not_known_before_its_tiers_are(cost_model: CostModel) -> None:
    assert cost_model.load_s(found(memory=1), 0) is None
    cost_model.note_rates([("memory", 1 << 30, 0.02)])
    assert cost_model.load_s(found(memory=1), 0) == pytest.approx(CHUNK_BYTES / (1 << 30) * 0.02)
    assert cost_model.load_s(found(memory=1, disk=1), 0) is None
    assert cost_model.load_s(found(memory=1, disk=1), CHUNK_TOKENS + CHUNK_TOKENS) == 0


def test_what_every_worker_has_measured_is_heard() -> None:
    one = Report(1, {5: LoadResult(1, 64)}, rates=[("memory", 10, 1.0)])
    both = one.aggregate(Report(1, {5: LoadResult(1, 32)}, rates=[("memory", 20, 1.0)]))
    assert both.rates == [("memory", 10, 1.0), ("memory", 20, 1.0)]
    assert both.loads[5] == LoadResult(2, 32)


def test_a_step_that_nobody_times_still_ends_before_the_next_one_begins_to_count() -> None:
    facts: Any = SimpleNamespace(layers=4, chunk_tokens=CHUNK_TOKENS, chunk_bytes=CHUNK_BYTES)
    timed: list[float] = []
    cost_model = CostModel(facts, None)
    cost_model.learned = SimpleNamespace(note_step=lambda new, before, seconds: timed.append(seconds))
    cost_model.step_began(2, {"one": 512}, {}, 1.0)  # Scheduled while the step before it runs.
    cost_model.step_ended(None, 1.5)
    cost_model.step_ended(2, 2.25)
    assert timed == [0.75]


@pytest.mark.parametrize(
    ("timed", "report", "says"),
    [
        (False, Report(0), False),
        (True, Report(0), True),
        (False, Report(0, loads={1: LoadResult(1, 64)}), True),
        (False, Report(0, stores={1: StoreResult(1)}), True),
        (False, Report(0, rates=[("memory", 1, 1.0)]), True),
    ],
)
def test_a_worker_says_all_that_it_has_to_say_once_and_of_which_step(
    timed: bool, report: Report, says: bool
) -> None:
    half: Any = object.__new__(WorkerHalf)
    half.report, half.step = report, Step(9, idle=False, timed=timed)
    told = half.take_report()
    assert told is (report if says else None)
    assert told is None or told.step == 9
    half.step = Step(10, idle=False)
    assert half.take_report() is None
