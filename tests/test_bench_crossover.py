"""`bench/vllm_crossover.py`: what it makes of what was measured, without a vLLM."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
RATE = 2e9
LAYERS = 32
SIZES = (8192, 32768)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("vllm_crossover")


@pytest.fixture
def site(bench: Any, tmp_path: Path) -> Any:
    return bench.Site(tmp_path, False, 0, 0, "")


def true_costs(bench: Any, site: Any) -> Any:
    return bench.Costs(24e-6, 0.9e-9, site.bytes_per_token)


def measured(bench: Any, site: Any, around: tuple[float, ...]) -> list[Any]:
    """Lengths as an ideal engine would be measured: it waits for its first layer, and for what is late."""
    costs, lengths = true_costs(bench, site), []
    for tokens in SIZES:
        length = bench.Length(tokens, [costs.prefill_s(tokens, 0)], disk_bytes_s=[RATE])
        whole_s = costs.load_s(tokens, RATE)
        length.whole = bench.Share(tokens, [whole_s + 0.02], [0.02], [0.0], [0])
        predicted = costs.crossover(tokens, RATE)
        for part in around:
            prefix = bench.chunks_of(tokens, predicted * part)
            computing_s, load_s = costs.prefill_s(tokens - prefix, prefix), costs.load_s(prefix, RATE)
            wait_s = load_s / LAYERS + max(0.0, load_s - computing_s)
            share = bench.Share(prefix, [computing_s + wait_s], [computing_s], [wait_s], [1])
            length.shares.append(share)
        lengths.append(length)
    return lengths


def test_what_computing_costs_is_found_from_two_lengths(bench: Any, site: Any) -> None:
    found, true = bench.costs(site, measured(bench, site, (1.0,))), true_costs(bench, site)
    assert found.linear_s == pytest.approx(true.linear_s)
    assert found.pair_s == pytest.approx(true.pair_s)


def test_the_crossover_of_an_ideal_engine_is_the_predicted_one(bench: Any, site: Any) -> None:
    for length in measured(bench, site, bench.AROUND):
        predicted = true_costs(bench, site).crossover(length.tokens, RATE)
        assert length.rate(site) == pytest.approx(RATE)
        assert bench.crossover(site, length) == pytest.approx(predicted, abs=0.01)


def test_where_all_loads_hide_or_none_does_there_is_no_crossover(bench: Any, site: Any) -> None:
    for around in ((0.2, 0.5, 0.8), (1.2, 1.4, 1.6)):
        lengths = measured(bench, site, around)
        assert [bench.crossover(site, length) for length in lengths] == [None, None]
        names = [row["name"] for row in bench.rows(site, lengths)]
        assert "vllm.share.ttft_s.8k.8192" in names and not any("crossover" in name for name in names)


def test_a_load_in_the_background_says_nothing_of_waits(bench: Any, site: Any) -> None:
    (length, _) = measured(bench, site, bench.AROUND)
    before = bench.crossover(site, length)
    length.shares.append(bench.Share(7040, [9.0], [0.1], [0.0], [0], layerwise=False))
    assert bench.crossover(site, length) == before
    rows = {row["name"]: row for row in bench.rows(site, measured(bench, site, bench.AROUND))}
    assert rows["vllm.crossover.8k"]["predicted_minus_measured"] == pytest.approx(0, abs=1)


def test_a_share_is_of_whole_chunks_and_never_all(bench: Any) -> None:
    assert bench.chunks_of(1024, 0.0) == 64
    assert bench.chunks_of(1024, 0.5) == 512
    assert bench.chunks_of(1024, 1.7) == 960
