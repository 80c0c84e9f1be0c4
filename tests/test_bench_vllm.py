"""`bench/vllm_ttft.py` and `bench/vllm_load.py`: what they make of what was measured, without a vLLM."""

import importlib.util
import json
import pathlib
import sys
from typing import Any

import pytest

BENCH = pathlib.Path(__file__).parent.parent / "bench"


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ttft(monkeypatch: pytest.MonkeyPatch) -> Any:
    return script("vllm_ttft", monkeypatch)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    return script("vllm_load", monkeypatch)


def part(ttft: Any, way: str, warm_s: float, **more: Any) -> Any:
    size = ttft.Size(cold_s=[1.0, 2.0, 3.0], warm_s=[warm_s] * 3, cached=[8192] * 3, said=[[1, 2]])
    return ttft.Part(way, "0.0", 50.0, {"8192": size}, **more)


def found(ttft: Any, **warm_s: float) -> Any:
    parts = {way: part(ttft, way, seconds) for way, seconds in warm_s.items()}
    return ttft.Found({"gpus": ["H200"], "one": 50e9, "all": 200e9}, parts, 131072)


def test_the_floor_is_the_bytes_over_the_link_and_a_hit_in_hbm(ttft: Any) -> None:
    warm = {"plain": 0.01, "offloading": 0.08, "memory": 0.04, "multipath": 0.02}
    rows = {row["name"]: row for row in ttft.rows(found(ttft, **warm))}
    one, every = rows["vllm.ttft.memory.8k"], rows["vllm.ttft.multipath.8k"]
    moved = 8192 * 131072
    assert one["ceiling"] == pytest.approx(moved / 50e9 + 0.01) and one["ratio"] == 0.04 / one["ceiling"]
    assert every["ceiling"] == pytest.approx(moved / 200e9 + 0.01)
    assert one["peer"] == {"name": "OffloadingConnector", "version": "0.0", "value": 0.08}
    assert one["x_recompute"] == 0.02 and one["loaded_tokens"] == 8192 and one["runs"] == 3
    assert rows["vllm.ttft.recompute.8k"]["value"] == 2.0 and rows["vllm.ttft.hbm.8k"]["value"] == 0.01
    assert rows["vllm.restore_gbps.8k"]["value"] == pytest.approx(moved / 0.04 / 1e9)
    assert rows["vllm.restore_gbps.8k"]["ratio"] == pytest.approx(1 / one["ratio"])


def test_an_ssd_is_compared_with_what_its_disk_reads(ttft: Any) -> None:
    measured = found(ttft, plain=0.01)
    measured.parts["ssd"] = part(ttft, "ssd", 0.5)
    measured.parts["ssd"].sizes["8192"].disk_bytes_s = [4e9, 5e9, 9e9]
    row = next(row for row in ttft.rows(measured) if row["name"] == "vllm.ttft.ssd.8k")
    assert row["ceiling"] == pytest.approx(8192 * 131072 / 5e9 + 0.01) and "peer" not in row


def test_what_was_computed_has_no_rate_of_loading(ttft: Any) -> None:
    measured = found(ttft, plain=0.01, memory=0.04)
    for cached, restored in (([0, 8192, 8192], False), ([256, 8192, 8192], True)):
        measured.parts["memory"].sizes["8192"].cached = cached
        names = {row["name"] for row in ttft.rows(measured)}
        assert "vllm.ttft.memory.8k" in names and ("vllm.restore_gbps.8k" in names) == restored


def test_other_tokens_than_vllm_alone_says_are_told(ttft: Any, tmp_path: pathlib.Path) -> None:
    measured = found(ttft, plain=0.01, memory=0.04)
    measured.parts["plain"].sizes["8192"].said.append([1, 3])
    for said, wrong in (([1, 3], 0), ([1, 4], 1)):
        measured.parts["memory"].sizes["8192"].said = [said]
        assert len(ttft.wrong_tokens(measured)) == wrong
    (tmp_path / "links.json").write_text(json.dumps(measured.links))
    for way, one in measured.parts.items():
        ttft.keep(tmp_path / f"{way}.json", one)
    site = ttft.Site(tmp_path, False, 0, 0, "")
    with pytest.raises(SystemExit, match="memory 8192: .1, 4., not one of"):
        ttft.merge(tmp_path, site)
    assert (tmp_path / "ttft.json").exists() and "Forebay" in (tmp_path / "restore.svg").read_text()


def test_an_engine_that_computes_otherwise_has_to_say_again_what_it_said_cold(ttft: Any) -> None:
    measured = found(ttft, plain=0.01, memory=0.04)
    size = measured.parts["memory"].sizes["8192"]
    for cold, said, wrong in (([1], [1, 9], 1), ([4], [4, 9], 0), ([4], [1, 2], 1), ([], [4, 9], 1)):
        size.said_cold, size.said = cold, [said]
        assert len(ttft.wrong_tokens(measured)) == wrong, (cold, said)


def test_every_point_of_the_picture_lies_in_its_panel(ttft: Any) -> None:
    plot = sys.modules["vllm_plot"]
    curve = plot.Curve("Forebay", "#1d4ed8", False, [(1024, 3.0), (131072, 54.9)])
    picture = plot.svg([("one", [curve]), ("none", []), ("two", [curve])])
    points = [line for line in picture.splitlines() if "<circle" in line]
    x = [float(point.split('cx="')[1].split('"')[0]) for point in points]
    y = [float(point.split('cy="')[1].split('"')[0]) for point in points]
    wide, left, right = plot.PANEL_WIDE, plot.LEFT, plot.PANEL_WIDE - plot.RIGHT
    assert x == [left, right, wide + left, wide + right]
    assert all(plot.TOP <= height <= plot.HIGH - plot.BOTTOM for height in y)
    assert picture.endswith("</svg>\n") and plot.svg([]).endswith("</svg>\n")


def test_a_prompt_is_the_last_one_its_answer_and_something_new(load: Any) -> None:
    def turn(tokens: int) -> Any:
        return load.Turn(tokens, 10, 50, 7, 0.0)

    transcript, other = load.Transcript(1, 1000), load.Transcript(2, 1000)
    first, new = transcript.ask(turn(100))
    assert len(first) == 100 and new == 50 and first[:50] == other.ask(turn(80))[0][:50]
    transcript.note([11, 12, 13])
    second, new = transcript.ask(turn(120))
    assert second[:103] == [*first, 11, 12, 13] and len(second) == 120 and new == 17
    transcript.note([14] * 40)
    grown, new = transcript.ask(turn(130))
    assert grown[:160] == [*second, *[14] * 40] and new == 1, "an answer longer than what is to be new"
    compacted, new = transcript.ask(turn(70))
    assert compacted[:50] == first[:50] and len(compacted) == 70 and new == 20


def test_what_is_said_of_a_load(load: Any) -> None:
    def measured(*runs_ttft_s: float) -> Any:
        def answer(turn: int, ttft_s: float) -> Any:
            return load.Answer(0, turn, 100, 10, 90, 11, 0.0, ttft_s / 2, ttft_s, ttft_s + 0.1)

        return [
            load.Run("0.0", ["H200"], 50.0, 10.0, [answer(turn, ttft_s * turn) for turn in range(1, 101)])
            for ttft_s in runs_ttft_s
        ]

    parts = {"hbm": measured(0.01), "offloading": measured(0.04), "memory": measured(0.02, 0.01, 0.05)}
    rows = {row["name"]: row for row in load.rows(parts)}
    p99 = rows["vllm.load.ttft_p99_s"]
    assert p99["value"] == pytest.approx(1.98) and p99["ceiling"] == pytest.approx(0.99)
    assert p99["min"] == pytest.approx(0.99) and p99["max"] == pytest.approx(4.95) and p99["runs"] == 3
    assert p99["peer"]["value"] == pytest.approx(3.96) and p99["requests"] == 100
    assert rows["vllm.load.queued_mean_s"]["value"] == pytest.approx(1.01 / 2)
    assert rows["vllm.load.ttft_mean_s"]["value"] == pytest.approx(1.01)
    assert rows["vllm.load.tpot_p50_s"]["value"] == pytest.approx(0.01)
    assert rows["vllm.load.tokens_per_s"]["value"] == 110 and rows["vllm.load.cached_percent"]["value"] == 90
    assert "peer" not in rows["vllm.load.ttft_p99_s.offloading"]
