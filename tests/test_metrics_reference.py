"""`docs/reference/metrics.md` is what `testing/metrics_reference.py` writes, from processes that run."""

from pathlib import Path

import pytest
from metrics_reference import PAGE, PROCESSES, Family, merged, parsed, promised, written
from small_system import SmallSystem

SHOWN = """# HELP a_total How many.
# TYPE a_total counter
a_total{end="good",peer="x"} 1
a_total{end="b\\"ad",peer="y"} 2
# HELP b_seconds Time.
# TYPE b_seconds histogram
b_seconds_bucket{peer="x",le="0.1"} 1
b_seconds_sum{peer="x"} 0.1
b_seconds_count{peer="x"} 1
"""
KEPT = (
    "a_total counter\n    How many.\n    {end,peer}\nb_seconds histogram\n    Time.\n    _bucket{peer,le}\n"
)


def test_the_page_is_what_running_processes_show(tmp_path: Path) -> None:
    system = SmallSystem(tmp_path)
    try:
        system.start()
        pages = {kind: system.pages(kind) for kind in PROCESSES}
    finally:
        system.stop()
    assert PAGE.read_text() == written(pages), "run `make dashboards`"


def test_a_page_is_read_with_its_kinds_labels_and_their_values() -> None:
    families = parsed(SHOWN)
    assert families["a_total"].labels == {"end": {"good", 'b\\"ad'}, "peer": {"x", "y"}}
    assert families["b_seconds"] == Family("histogram", "Time.", {"peer": {"x"}})
    assert (
        families["a_total"].row("a_total") == '| `a_total` | counter | end: b\\"ad, good; peer | How many. |'
    )
    assert merged(families, promised(KEPT), "kept") == families


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (SHOWN.replace("a_total", "c_total"), "c_total runs and does not stand in kept"),
        (SHOWN.replace("How many.", "How much."), "'How much.' is not what stands in kept"),
        (SHOWN.replace("a_total counter", "a_total gauge"), "a_total: gauge"),
        (SHOWN.replace("end=", "way="), r"labels \['way'\] do not stand in kept"),
    ],
    ids=["name", "help", "kind", "label"],
)
def test_what_runs_and_is_not_promised_is_named(changed: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        merged(parsed(changed), promised(KEPT), "kept")
