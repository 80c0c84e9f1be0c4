"""`bench/sleep_vllm.py`: what it accepts as a wake-up and what it writes, on an engine that is made up."""

import importlib.util
import pathlib
import sys
import types
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "bench" / "sleep_vllm.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("sleep_vllm", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sleep_vllm", module)
    vllm = types.ModuleType("vllm")
    vllm.SamplingParams = lambda **settings: settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    spec.loader.exec_module(module)
    return module


class Llm:
    """An engine with two parameters. `damage` is done to it by the second wake-up."""

    def __init__(self, **damage: Any) -> None:
        self.wakes, self.slept, self.damage = 0, [], damage
        self.parameters, self.says = {"a": "1", "b": "2"}, [7, 8]

    def collective_rpc(self, method: Any) -> list[dict[str, str]]:
        assert method.__name__ == "digests"
        return [dict(self.parameters)]

    def sleep(self, level: int) -> None:
        self.slept.append(level)

    def wake_up(self) -> None:
        self.wakes += 1
        if self.wakes == 2:
            self.__dict__.update(self.damage)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
        said = types.SimpleNamespace(token_ids=self.says)
        return [types.SimpleNamespace(outputs=[said])]


def engine(bench: Any) -> Any:
    return bench.Engine("0.0", 16_000_000_000, 50.0)


def test_first_and_later_sleeps_are_told_apart(bench: Any) -> None:
    llm, measured = Llm(), engine(bench)
    bench.exercise(llm, measured, 3)
    assert llm.slept == [1, 1, 1, 1]
    assert len(measured.wakes_s) == 4 and len(measured.later_sleeps_s) == 3 and measured.first_sleep_s > 0


def test_a_parameter_that_differs_ends_it(bench: Any) -> None:
    with pytest.raises(SystemExit, match="wake 1: 1 of 2 parameters differ, such as b"):
        bench.exercise(Llm(parameters={"a": "1", "b": "3"}), engine(bench), 3)


def test_other_tokens_end_it(bench: Any) -> None:
    with pytest.raises(SystemExit, match="wake 1: other tokens"):
        bench.exercise(Llm(says=[7, 9]), engine(bench), 3)


def test_rows_have_names_that_stay_a_ceiling_and_vllm_beside_them(bench: Any) -> None:
    links = bench.Links(["H200"], h2d=100e9, d2h=80e9)
    stock, ours = engine(bench), engine(bench)
    for measured, seconds in ((stock, 0.4), (ours, 0.2)):
        measured.first_sleep_s, measured.later_sleeps_s = seconds, [seconds, seconds]
        measured.wakes_s, measured.wakes_cpu_s = [seconds] * 3, [seconds] * 3
    rows = {row["name"]: row for row in bench.rows(links, stock, ours, "")}
    assert set(rows) == {"sleep.wake_s.8b", "sleep.first_sleep_s.8b", "sleep.later_sleep_s.8b"}
    wake = rows["sleep.wake_s.8b"]
    assert wake["value"] == 0.2 and wake["runs"] == 3 and wake["peer"]["value"] == 0.4
    assert wake["ceiling"] == pytest.approx(0.16) and wake["ratio"] == pytest.approx(1.25)
    assert rows["sleep.later_sleep_s.8b"]["ceiling"] == pytest.approx(0.2)
