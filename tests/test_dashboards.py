"""The boards and rules, asked of a system that runs: each expression has a series, and faults are seen.

Prometheus scrapes a small system for half a minute, in which an engine and a node die and a disk loses what
it holds. With `FOREBAY_DASHBOARDS_JSON=FILE` the count of panels is written there.
"""

import json
import math
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dashboards
import pytest
from boards import BOARDS, Board
from metrics_reference import parsed
from prometheus import Prometheus, Series, program
from results import row, write
from rules import ALERTS, RECORDED
from small_system import SmallSystem

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
ALL_ALERTS = [alert for alerts in ALERTS.values() for alert in alerts]
RATE = re.compile(r"\b(?:rate|irate|increase)\(([\w:]+)")
NAME = re.compile(r"\b(?:forebay_|vllm:)\w+")
WELL_S, BROKEN_S = 14, 12


@dataclass
class Lived:
    """What is left of the system: Prometheus, when it lived and was broken, and the pages of its metrics."""

    prometheus: Prometheus
    start: float
    broken: float
    end: float
    pages: list[str]

    def range(self, expression: str) -> list[Series]:
        """The series of an expression over the system's life."""
        return self.prometheus.range(expression, self.start, self.end)


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lived]:
    """Half a minute of a system, with faults."""
    program("prometheus")
    folder = tmp_path_factory.mktemp("small")
    system, prometheus = SmallSystem(folder), Prometheus(folder)
    try:
        system.start()
        system.start_agents()
        prometheus.start(system)
        start = time.time()
        time.sleep(WELL_S)
        broken = time.time()
        system.kill("e2")
        system.spoil_disk("left")
        system.kill("right")
        time.sleep(BROKEN_S)
        pages = [system.page(*one) for one in (("router", "router"), ("node", "left"), ("engine", "e0"))]
        yield Lived(prometheus, start, broken, time.time(), pages)
    finally:
        system.stop()
        prometheus.stop()


def shown(board: Board) -> list[tuple[str, str]]:
    """Title and expression of each query of a board, as Grafana would ask it."""
    panels = json.loads((DEPLOY / f"chart/dashboards/{board.name}.json").read_text())["panels"]
    asked = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]
    return [(title, substituted(expression)) for title, expression in asked]


def substituted(expression: str) -> str:
    """With values of the variables: all that there is, and a window of ten scrapes."""
    return re.sub(r"\$(?!__)\w+", ".*", expression.replace("$__rate_interval", "10s"))


def unfit(expression: str, series: list[Series]) -> str | None:
    """What is wrong with an answer. A quantile of no observations is no number, and nothing else is."""
    values = [value for one in series for _, value in one.values]
    if not values:
        return "no series"
    if any(map(math.isinf, values)):
        return "an infinite value"
    if any(map(math.isnan, values)) and "histogram_quantile" not in expression:
        return "a value that is no number"
    return None if any(map(math.isfinite, values)) else "no finite value"


def test_what_is_generated_is_what_is_committed() -> None:
    for path, text in dashboards.files().items():
        assert path.read_text() == text, f"{path.name}: run deploy/dashboards.py"
    assert {path.name for path in (DEPLOY / "chart/dashboards").iterdir()} == {
        f"{b.name}.json" for b in BOARDS
    }


def test_every_panel_has_a_series_of_finite_values(lived: Lived) -> None:
    panels: dict[tuple[str, str], list[str]] = {}
    for board in BOARDS:
        for title, expression in shown(board):
            wrong = unfit(expression, lived.range(expression))
            panels.setdefault((board.name, title), []).extend([f"{expression}: {wrong}"] if wrong else [])
    good = sum(not wrong for wrong in panels.values())
    rows = [row("dash.panels.total", "panels", len(panels)), row("dash.panels.with_series", "panels", good)]
    print(*(f"{one['name']} {one['value']}" for one in rows), sep="\n")
    if path := os.environ.get("FOREBAY_DASHBOARDS_JSON"):
        write(Path(path), "dashboards", rows, ROOT)
    assert not {panel: wrong for panel, wrong in panels.items() if wrong}


def test_every_rule_has_a_series_of_finite_values(lived: Lived) -> None:
    parts = [*RECORDED, *RECORDED.values(), *(part for alert in ALL_ALERTS for part in alert.watched)]
    wrong = {part: why for part in parts if (why := unfit(RECORDED.get(part, part), lived.range(part)))}
    assert not wrong


@pytest.mark.parametrize("name", ["EngineDown", "PeerUnreached", "CorruptChunks"])
def test_an_alert_sees_the_fault_that_it_is_for_and_nothing_before(lived: Lived, name: str) -> None:
    (alert,) = [alert for alert in ALL_ALERTS if alert.name == name]
    times = [time for series in lived.range(alert.expression) for time, _ in series.values]
    assert times and min(times) >= lived.broken - 1


def misuse(expression: str, kinds: dict[str, str]) -> str | None:
    """What an expression asks that its metrics cannot answer, or answer wrongly."""
    named, rated = NAME.findall(expression), RATE.findall(expression)
    if unknown := set(named) - kinds.keys():
        return f"no metric is named {unknown.pop()}"
    for name in named:
        if kinds[name] == "gauge" and name in rated:
            return f"{name} may fall, and has no rate"
        if kinds[name] == "counter" and name not in rated and f"0 * {name}" not in expression:
            return f"{name} is shown as a total since the start"
    if "histogram_quantile" in expression and not re.search(r"sum by \([\w, ]*\ble\b", expression):
        return "a quantile of buckets that are not summed"
    return None


def test_each_expression_asks_for_metrics_that_there_are_as_their_kind_allows(lived: Lived) -> None:
    kinds = {name: family.kind for page in lived.pages for name, family in parsed(page).items()}
    histograms = [name for name, kind in kinds.items() if kind == "histogram"]
    kinds |= {f"{name}_{end}": "counter" for name in histograms for end in ("bucket", "sum", "count")}
    asked = [expression for board in BOARDS for _, expression in shown(board)]
    asked += [*RECORDED.values(), *(alert.expression for alert in ALL_ALERTS)]
    assert not {expression: why for expression in asked if (why := misuse(expression, kinds))}


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("sum(forebay_gone)", "no metric is named forebay_gone"),
        ("rate(forebay_chunks[1m])", "forebay_chunks may fall"),
        ("sum(forebay_a_total) / 2", "forebay_a_total is shown as a total"),
        ("histogram_quantile(0.9, rate(forebay_s_bucket[1m]))", "not summed"),
        ("histogram_quantile(0.9, sum by (peer) (rate(forebay_s_bucket[1m])))", "not summed"),
    ],
)
def test_an_expression_that_asks_wrongly_is_found(expression: str, why: str) -> None:
    kinds = {"forebay_chunks": "gauge", "forebay_a_total": "counter", "forebay_s_bucket": "counter"}
    assert why in str(misuse(expression, kinds))
    good = "sum by (peer, le) (rate(forebay_s_bucket[1m])) + forebay_chunks + rate(forebay_a_total[1m])"
    assert misuse(f"histogram_quantile(0.9, {good})", kinds) is None


def test_alerts_fire_when_they_shall_and_not_otherwise() -> None:
    promtool = program("promtool")
    for command in (
        ["check", "rules", "deploy/chart/rules.yaml"],
        ["test", "rules", "tests/rules_test.yaml"],
    ):
        done = subprocess.run([promtool, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = (ROOT / "tests/rules_test.yaml").read_text()
    assert len({alert.name for alert in ALL_ALERTS if f"Forebay{alert.name}" in tested}) >= 8


def test_each_alert_has_a_section_in_the_runbook_that_says_what_it_is_not_for() -> None:
    page = (ROOT / "docs/runbook.md").read_text()
    sections = {title: text for title, text in re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, re.M | re.S)}
    assert sections.keys() == {f"Forebay{alert.name}" for alert in ALL_ALERTS}
    for alert in ALL_ALERTS:
        text = " ".join(sections[f"Forebay{alert.name}"].split())
        assert f"*Not for*: {alert.not_for}" in text, alert.name


def test_boards_are_as_grafana_imports_them() -> None:
    for board in BOARDS:
        made = json.loads((DEPLOY / f"chart/dashboards/{board.name}.json").read_text())
        assert (made["schemaVersion"], made["uid"]) == (39, f"forebay-{board.name}")
        panels = [panel for panel in made["panels"] if panel["type"] != "row"]
        assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
        for panel in panels:
            assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"], panel
        variables = {variable["name"] for variable in made["templating"]["list"]}
        text = json.dumps(made["panels"])
        assert set(re.findall(r"\$\{?([a-z]+)\}?", text)) <= variables
