"""When loading from an SSD pays: the formulas, against a table that was made without them, and themselves."""

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench"
KIB, GIB = 1 << 10, 1 << 30
# GB/s: a virtual disk twice, an SSD, GPUDirect Storage, the paper's two SSDs, a link, two links.
RATES = [2.2, 3.5, 7, 12.4, 25.9, 55, 110]
# Percent at 22.6 us a token, 0.459 ns a token squared and 128 KiB a token.
TABLE = {
    8 * KIB: [31.6, 42.7, 60.4, 73.4, 85.4, 92.6, 96.2],
    32 * KIB: [42.5, 55.1, 72.1, 82.6, 91.0, 95.6, 97.8],
    128 * KIB: [67.4, 77.6, 87.9, 92.9, 96.5, 98.3, 99.2],
}


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("ssd_formulas")


def test_crossovers_are_those_of_the_table(formulas: ModuleType) -> None:
    costs = formulas.Costs(linear_s=22.6e-6, pair_s=2 * 0.459e-9, token_bytes=128 * KIB)
    for tokens, expected in TABLE.items():
        found = [100 * costs.crossover(tokens, rate * 1e9) for rate in RATES]
        # The table has one decimal, and two of its figures are cut and not rounded.
        assert found == pytest.approx(expected, abs=0.1), tokens


@pytest.mark.parametrize("name", ["h100-llama-3.1-8b", "h20-qwen3-coder-30b-a3b"])
def test_at_the_crossover_loading_takes_as_long_as_computing_the_rest(
    formulas: ModuleType, name: str
) -> None:
    costs = formulas.profile(name)
    for tokens in (100, 8 * KIB, 128 * KIB):
        for rate in RATES:
            prefix = costs.crossover(tokens, rate * 1e9) * tokens
            assert 0 < prefix < tokens
            load, compute = costs.load_s(prefix, rate * 1e9), costs.prefill_s(tokens - prefix, prefix)
            assert load == pytest.approx(compute, rel=1e-9)


def test_a_prefix_is_worth_loading_from_the_length_on_at_which_computing_it_takes_as_long(
    formulas: ModuleType,
) -> None:
    costs = formulas.profile("h200-llama-3.1-8b")
    for rate in (2.2e9, 3.5e9):
        tokens = costs.worth_loading_tokens(rate)
        assert costs.load_s(tokens, rate) == pytest.approx(costs.prefill_s(tokens, 0))
        assert costs.load_s(tokens * 0.9, rate) > costs.prefill_s(tokens * 0.9, 0)
    # Above 6.07 GB/s a token is loaded sooner than it is computed without any attention.
    assert costs.worth_loading_tokens(6.1e9) == 0
    assert costs.worth_loading_tokens(6.0e9) > 0
    without_attention = formulas.Costs(linear_s=1e-6, pair_s=0, token_bytes=1000)
    assert without_attention.worth_loading_tokens(1e8) == math.inf


def test_a_prefill_costs_the_same_however_it_is_cut(formulas: ModuleType) -> None:
    costs = formulas.profile("h100-llama-3.1-8b")
    parts = costs.prefill_s(3000, 0) + costs.prefill_s(5000, 3000)
    assert parts == pytest.approx(costs.prefill_s(8000, 0))


def test_addresses_of_60_gib_are_120_mib_of_prp_entries_and_15_mib_of_sgl_descriptors(
    formulas: ModuleType,
) -> None:
    assert formulas.prp_bytes(60 * GIB) == 120 << 20
    assert formulas.sgl_bytes(60 * GIB, 64 * KIB) == 15 << 20
    # What the paper counts: a list of 64 KiB for each command of 1 MiB.
    assert formulas.prp_list_bytes(60 * GIB, 1 << 20, 64 * KIB) == 3.75 * GIB
