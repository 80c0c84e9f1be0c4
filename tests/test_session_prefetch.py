"""What saying `prefetch` gains: the replay of a trace made by hand, and the benchmark with a real node."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from processes import binary

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("session_gaps")


def trace(gaps: ModuleType) -> list[object]:
    """`a` pauses for 100 s, in which `b` takes all of a memory of four blocks."""
    said = [
        {"session": "a", "turn": 0, "arrival_us": 0, "service_us": 5_000_000, "blocks": [1, 2, 3]},
        {"session": "a", "turn": 1, "arrival_us": 105_000_000, "service_us": 0, "blocks": [1, 2, 3, 4]},
        {"session": "b", "turn": 0, "arrival_us": 50_000_000, "service_us": 0, "blocks": [11, 12, 13, 14]},
    ]
    turns: list[object] = gaps.gaps(said)
    return turns


def test_a_gap_is_from_the_end_of_an_answer_to_the_next_question(gaps: ModuleType) -> None:
    assert [turn.gap_s for turn in trace(gaps)] == [None, 100.0, None]


def found(gaps: ModuleType, room: int, lead_s: float | None) -> list[tuple[int, int]]:
    lead = None if lead_s is None else lambda *_: lead_s
    replayed = gaps.replay(trace(gaps), room, lead, ssd_blocks_per_s=1.0)
    return [(one.in_memory, one.on_ssd) for _, one in replayed]


def test_kv_that_others_pushed_out_of_memory_is_found_on_the_ssd(gaps: ModuleType) -> None:
    assert found(gaps, room=4, lead_s=None) == [(0, 3)]
    assert found(gaps, room=5, lead_s=None) == [(1, 2)]
    assert found(gaps, room=7, lead_s=None) == [(3, 0)]


def test_memory_drops_the_end_of_the_prompt_that_was_used_longest_ago(gaps: ModuleType) -> None:
    memory = gaps.Memory(3)
    memory.use([1, 2])
    memory.use([11, 12])
    assert sorted(memory.held) == [1, 11, 12]


def test_what_is_said_ahead_brings_as_much_as_the_ssd_reads_until_then(gaps: ModuleType) -> None:
    assert found(gaps, room=4, lead_s=2.0) == [(2, 1)]
    assert found(gaps, room=4, lead_s=30.0) == [(3, 0)]
    # Said before `b` came, it is of no use.
    assert found(gaps, room=4, lead_s=90.0) == [(0, 3)]


def test_a_longer_prompt_is_said_sooner_if_the_lead_is_what_it_needs(gaps: ModuleType) -> None:
    needed = gaps.LEADS["needed"]
    assert [needed(blocks, 1.0) for blocks in (1, 8, 100)] == [2.0, 10.0, 30.0]
    (found,) = gaps.replay(trace(gaps), 4, needed, ssd_blocks_per_s=1.0)
    assert found[1] == gaps.Return(3, 0), "3.75 s before, in which all three blocks come"


def test_turns_at_the_same_time_are_replayed_in_their_order(gaps: ModuleType) -> None:
    said = [
        {"session": "a", "turn": turn, "arrival_us": 0, "service_us": 0, "blocks": [1]} for turn in (0, 1)
    ]
    (found,) = gaps.replay(gaps.gaps(said), 4, lambda *_: 2.0, ssd_blocks_per_s=1.0)
    assert found[1] == gaps.Return(1, 0)


def test_a_load_takes_the_time_of_both_tiers(gaps: ModuleType) -> None:
    assert gaps.load_s(gaps.Return(10, 4), {"memory": 5.0, "ssd": 1.0}, 10**9) == pytest.approx(6.0)


def test_the_recorded_sessions_pause_between_turns(gaps: ModuleType) -> None:
    beside = ROOT.parent / "shared" / "traces"
    traces = Path(os.environ.get("FOREBAY_TRACES", beside))
    if not (traces / gaps.TRACE).exists():
        pytest.skip(f"SKIPPED: no public traces at {traces}; set FOREBAY_TRACES")
    turns, block_tokens = gaps.read(binary(), traces, 3600)
    rows = {row["name"]: row["value"] for row in gaps.gap_rows(turns)}
    assert block_tokens == 64 and 0 < rows["hints.gap_s.p50"] < rows["hints.gap_s.p99"]


def test_a_session_that_was_announced_in_time_comes_from_memory_and_right(tmp_path: Path) -> None:
    pytest.importorskip("forebay._forebay", reason="SKIPPED: no wheel: `make wheel`")
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "bench/session_prefetch.py"), "--dir", str(tmp_path)]
    command += ["--rounds", "1", "--chunks", "16", "--json", str(out)]
    # The script compares every byte that it loads.
    done = subprocess.run(
        command, env=os.environ | {"FOREBAY": binary()}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["hints.load_ms.memory"]["disk_percent"] == 0
    assert rows["hints.load_ms.ssd"]["disk_percent"] == 100
    assert rows["hints.load_ms.ahead.2000ms"]["disk_percent"] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"], "the node's log is removed"
