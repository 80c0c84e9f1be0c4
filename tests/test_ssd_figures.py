"""Tutti's figures beside ours: what the page says is in the results, and what the scripts do is undone."""

import importlib
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from processes import binary

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
FILES = [name for name in ("ssd-figures", "ssd-contexts", "ssd-loop") if (RESULTS / f"{name}.json").exists()]
BLOCK_TOKENS = 512  # Of Mooncake's traces.


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", FILES)
def test_each_row_says_on_which_device_and_how_it_was_made(name: str) -> None:
    said = json.loads((RESULTS / f"{name}.json").read_text())
    assert said["commit"] and said["date"] and said["machine"]["cpus"] and said["rows"]
    for row in said["rows"]:
        assert row.keys() >= {"name", "unit", "value", "min", "max", "runs", "device", "how"}, row["name"]
        assert row["min"] <= row["value"] <= row["max"], row["name"]


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    page = script("ssd_page")
    text = page.PAGE.read_text()
    assert page.written(text, page.read()) == text, "bench/ssd_page.py writes another page"


def test_a_section_that_lost_its_table_is_an_error() -> None:
    page = script("ssd_page")
    text = page.PAGE.read_text().replace("## Bytes of addresses", "## Bytes")
    with pytest.raises(ValueError, match="Bytes of addresses"):
        page.written(text, page.read())


def write_trace(folder: Path, prompts: list[list[int]]) -> None:
    """A trace of prompts of whole blocks, a second apart, where `conversation` is looked for."""
    file = folder / script("ssd_figures").TRACES["conversation"]
    file.parent.mkdir(parents=True)
    lines = [
        {
            "timestamp": 1000 * number,
            "input_length": BLOCK_TOKENS * len(blocks),
            "output_length": 1,
            "hash_ids": blocks,
        }
        for number, blocks in enumerate(prompts)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_hits_are_of_the_first_tier_that_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = script("ssd_figures")
    block = BLOCK_TOKENS * figures.TOKEN_BYTES
    # Room for two blocks, two more and four more: of six, HBM has the first two again, and so on.
    for tier, blocks in (("HBM", 2), ("DRAM", 2), ("SSD", 64)):
        monkeypatch.setattr(figures, tier, blocks * block)
    write_trace(tmp_path, [[1, 2], [1, 2], [3, 4], [1, 2], [5, 6], [7, 8], [1, 2]])
    hits = figures.tier_hits(figures.Forebay(binary()), "conversation", tmp_path)
    assert hits["tokens"] == 14 * BLOCK_TOKENS
    found = {tier: round(14 * hits[tier]) for tier in ("hbm", "dram", "ssd", "hbm_ssd", "no_limit")}
    assert found == {"hbm": 2, "dram": 4, "ssd": 6, "hbm_ssd": 6, "no_limit": 6}
    rows = figures.hit_rows("conversation", hits)
    assert [row["paper"]["loogle"] for row in rows if "paper" in row] == [4, 24, 86]


def test_a_million_tokens_cost_what_the_gpu_and_the_tiers_cost() -> None:
    figures, costs = script("ssd_figures"), script("ssd_formulas").profile("h100-llama-3.1-8b")
    tokens, hours = 2e6, 3.0
    hits = {"hbm": 0.1, "dram": 0.3, "ssd": 0.7, "hbm_ssd": 0.6, "tokens": tokens, "hours": hours}
    rows = figures.cost_rows(figures.Forebay(binary()), "x", hits)
    computed = costs.prefill_s(8192, 0) / 8192 * 1e6 / 3600 * 5
    dram, ssd = (256 * 0.0088 * hours / 2, 14_000 * 0.000082 * hours / 2)
    expected = {
        "computed": computed,
        "hbm": 0.9 * computed,
        "dram": 0.7 * computed + dram,
        "ssd": 0.3 * computed + dram + ssd,
        "hbm_ssd": 0.4 * computed + ssd,
    }
    assert {row["name"].removeprefix("ssd.cost.x."): row["value"] for row in rows} == pytest.approx(expected)


def test_a_rate_of_times_has_the_slowest_run_as_its_smallest() -> None:
    figures = script("ssd_figures")
    time = {"value": 100.0, "min": 80.0, "max": 200.0, "ceiling": 50.0, "runs": 3}
    rate = figures.in_gb_per_s("x", figures.rate_of(time, 10**9), "memory", "by hand")
    assert [rate[key] for key in ("value", "min", "max", "ceiling")] == pytest.approx([10, 5, 12.5, 20])
    assert rate["ratio"] == pytest.approx(0.5)


def left(loop: ModuleType) -> tuple[list[Path], list[str]]:
    """Folders and mounts of loop devices of ours."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if "/ssd-loop-" in line]
    images = subprocess.run(["losetup", "--list"], capture_output=True, text=True, check=True).stdout
    return list(loop.MEMORY.glob("ssd-loop-*")), mounts + [
        one for one in images.splitlines() if "ssd-loop-" in one
    ]


def test_nothing_is_left_of_loop_devices_after_an_error() -> None:
    loop, each = script("ssd_loop"), 64 << 20
    if reason := loop.why_not(2 * each):
        pytest.skip(f"SKIPPED: {reason}")
    with pytest.raises(ZeroDivisionError):
        with loop.devices(2, each) as folders:
            for folder in folders:
                file = os.open(folder / "direct", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
                os.posix_fallocate(file, 0, 1 << 20)
                os.close(file)
            assert len(left(loop)[1]) == 4
            raise ZeroDivisionError
    assert left(loop) == ([], [])


def test_a_device_that_is_another_file_s_is_not_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = script("ssd_loop")
    if reason := loop.why_not(64 << 20):
        pytest.skip(f"SKIPPED: {reason}")
    said, commands = loop.said, []

    def foreign(*command: Any) -> str:
        commands.append(command[0])
        answer: str = said(*command)
        return "/another/file" if "BACK-FILE" in command else answer

    monkeypatch.setattr(loop, "said", foreign)
    with pytest.raises(RuntimeError, match="is not the device of"):
        with loop.devices(1, 64 << 20):
            pass
    assert "mkfs.ext4" not in commands
    assert left(loop) == ([], [])


def test_the_gate_loads_from_the_length_on_that_is_predicted() -> None:
    pytest.importorskip("forebay._forebay", reason="SKIPPED: no wheel: `make wheel`")
    loop = script("ssd_loop")
    rows = loop.gate_rows({"slow": 2.2, "fast": 3.5, "faster than computing": 25.9})
    assert len(rows) == 3 * len(loop.PROFILES)
    for row in rows:
        # In whole chunks, and a step has its floor.
        assert abs(row["value"] - row["predicted"]) <= max(0.01 * row["predicted"], 2 * loop.CHUNK_TOKENS), (
            row
        )
        for times in row["asked"].values():
            assert times["loads"] == (times["load_s"] < times["compute_s"]), row
