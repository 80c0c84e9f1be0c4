"""Figures in the docs say when they were measured, and of which commit, as the results themselves do."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
NAMED = re.compile(r"`(?:bench/results/)?([a-z0-9-]+)\.json`")
DOCS = [path for path in sorted(ROOT.glob("docs/*.md")) if NAMED.search(path.read_text())]


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_a_results_file_is_first_named_with_its_day_and_commit(doc: Path) -> None:
    text, seen = " ".join(doc.read_text().split()), set()
    for found in NAMED.finditer(text):
        file = RESULTS / f"{found[1]}.json"
        if file.name in seen or not file.exists():
            continue
        seen.add(file.name)
        results = json.loads(file.read_text())
        wanted = f", {results['date'][:10]} at `{results['commit'][:7]}"
        assert text[found.end() :].startswith(wanted), f"{doc.name}: {file.name} wants{wanted}`"
    assert seen or doc.name not in ("figures.md", "vllm-figures.md")


def test_readme_names_no_figure_that_figures_md_lacks() -> None:
    readme, figures = ((ROOT / name).read_text() for name in ("README.md", "docs/figures.md"))
    table = readme.split("## Six figures")[1].split("\n\nOne thing")[0]
    days = re.findall(r"\| (\d{4}-\d\d-\d\d) \|$", table, re.MULTILINE)
    assert len(days) == table.count("\n| ") - 1, "each row has its day"
    for day in days:
        assert day in figures
