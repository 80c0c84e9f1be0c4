#!/usr/bin/env python3
"""Writes docs/reference/metrics.md: `metrics_reference.py` starts a small system and asks it for its metrics.

Names, kinds, help, labels and their values come from running processes. What such a system has no part for,
GPUs that relay and a collector, comes from the files to which tests of the crates hold the processes' pages.
A metric that runs and stands in none of them is an error. The connector's metrics come from their page.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/metrics.md"
# What a process is called here, its title, and the file of what its page promises.
PROCESSES = {
    "router": ("Router", "crates/router/tests/metrics.txt"),
    "node": ("Node", "crates/node/tests/metrics/metrics.txt"),
    "engine": ("Emulated engine", "tools/emulator/tests/metrics.txt"),
}
# Labels whose values are names and numbers of a system, or depend on what has happened to it.
OPEN_LABELS = {"backend", "block_size", "client", "code", "engine", "link", "model_name", "num_gpu_blocks"}
OPEN_LABELS |= {"path", "peer", "policy", "store", "tenant", "volume"}
OPEN_LABELS_OF_PEERS = {"carries", "fabric", "kind", "reason"}
SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{(.*)\})? \S+$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class Family:
    """A metric: its kind, its help, and the values of each of its labels that were seen."""

    kind: str
    help: str
    labels: dict[str, set[str]] = field(default_factory=dict)

    def row(self, name: str) -> str:
        """A row of the table."""
        are_open = OPEN_LABELS | (OPEN_LABELS_OF_PEERS if "peer" in self.labels else set())
        labels = [
            f"{label}: {', '.join(sorted(values))}" if values and label not in are_open else label
            for label, values in sorted(self.labels.items())
        ]
        return f"| `{name}` | {self.kind} | {'; '.join(labels)} | {self.help} |"


def parsed(page: str) -> dict[str, Family]:
    """The families of one page or of several, one after the other."""
    families: dict[str, Family] = {}
    for line in page.splitlines():
        if line.startswith("# HELP "):
            _, _, name, about = line.split(" ", 3)
            families.setdefault(name, Family("", about))
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            families[name].kind = kind
        elif found := SAMPLE.match(line):
            name = found[1] if found[1] in families else re.sub(r"_(bucket|sum|count)$", "", found[1])
            for label, value in LABEL.findall(found[2] or ""):
                if label != "le":
                    families[name].labels.setdefault(label, set()).add(value)
    return families


def promised(text: str) -> dict[str, Family]:
    """The families of a file of promises: a name and a kind, the help, and the labels of each sample."""
    families: dict[str, Family] = {}
    for name, kind, about, samples in re.findall(
        r"^(\S+) (\w+)\n    (.*)\n((?:    \w*\{.*\}\n)*)", text, re.M
    ):
        labels = set(re.findall(r"\w+(?=[,}])", samples)) - {"le"}
        families[name] = Family(kind, about, {label: set() for label in labels})
    return families


def merged(running: dict[str, Family], kept: dict[str, Family], where: str) -> dict[str, Family]:
    """What runs, and what is promised beside it."""
    for name, family in running.items():
        if name not in kept:
            raise ValueError(f"{name} runs and does not stand in {where}")
        if (family.kind, family.help) != (kept[name].kind, kept[name].help):
            raise ValueError(f"{name}: {family.kind}, {family.help!r} is not what stands in {where}")
        unknown = family.labels.keys() - kept[name].labels.keys()
        if unknown:
            raise ValueError(f"{name}: labels {sorted(unknown)} do not stand in {where}")
    return {
        name: Family(family.kind, family.help, family.labels | running.get(name, family).labels)
        for name, family in kept.items()
    }


def of_connector() -> Iterator[str]:
    """Rows for the vLLM connector, from docs/reference/vllm-metrics.md."""
    page = (ROOT / "docs/reference/vllm-metrics.md").read_text().split("## The connector's own")[1]
    for names, about in re.findall(r"^\| (`.*?`) \| (.*) \|$", page, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            yield f"| `vllm:forebay_{name}_total` | counter | {about} |"
    for name in re.findall(r"^`vllm:(forebay_\w+)` is a histogram", page, re.MULTILINE):
        yield f"| `vllm:{name}` | histogram | how long a step waited for each load that runs layer by layer |"


def written(pages: dict[str, str]) -> str:
    """The page, by what the processes show."""
    parts = [INTRODUCTION]
    for kind, (title, file) in PROCESSES.items():
        families = merged(parsed(pages[kind]), promised((ROOT / file).read_text()), file)
        rows = [family.row(name) for name, family in sorted(families.items())]
        parts.append("\n".join([f"## {title}", "", *TABLE, *rows]) + "\n")
    connector = ["## vLLM connector", "", CONNECTOR, "", "| metric | kind | meaning |", "|---|---|---|"]
    parts.append("\n".join([*connector, *of_connector()]) + "\n")
    return "\n".join(parts)


INTRODUCTION = """# Metrics

All metrics of Forebay's processes, for Prometheus. `testing/metrics_reference.py` writes this page
from what running processes show. [dashboards.md](../dashboards.md) has boards and alerts for them.

| process | where |
|---|---|
| `forebay route` | `/metrics` at the address of `--listen` |
| `forebay epp` | the same metrics, `/metrics` at the address of `--metrics-listen` |
| `forebay node` | `/metrics` at the address of [`metrics.listen`](configuration.md) |
| `forebay engine` | `/metrics` at the engine's port |
| vLLM with the connector | `/metrics` of vLLM |
| `forebay preflight net --metrics FILE` | [a file](../preflight-net.md), whose metrics are not here |

A label has the values that are listed behind it. Where none are listed they are names and numbers
of your system, or depend on what has happened.
"""
TABLE = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
CONNECTOR = """They have vLLM's labels `engine` and `model_name`. [vllm-metrics.md](vllm-metrics.md) explains
them, and has what vLLM counts for every connector."""


def main() -> None:
    """Starts the system, asks it, and writes the page."""
    sys.path.insert(0, str(ROOT / "tests"))
    from small_system import SmallSystem

    os.environ.setdefault("FOREBAY_LOG", "error")

    with tempfile.TemporaryDirectory(prefix="forebay-metrics-") as folder:
        system = SmallSystem(Path(folder))
        try:
            system.start()
            pages = {kind: system.pages(kind) for kind in PROCESSES}
        finally:
            system.stop()
    PAGE.write_text(written(pages))
    print(f"{PAGE.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
