"""Debian's Prometheus, which scrapes a small system each second and evaluates the rules.

Knows how it is started and asked; what it is asked is for those who do.
"""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import free_port, kill, until
from small_system import SmallSystem

ROOT = Path(__file__).parents[1]
CONFIG = """global:
  scrape_interval: 1s
  scrape_timeout: 1s
  evaluation_interval: 1s
rule_files: ["{rules}"]
scrape_configs:
{jobs}"""
JOB = "  - job_name: {kind}\n    static_configs:\n"
TARGET = '      - targets: ["127.0.0.1:{port}"]\n        labels: {{instance: {name}, namespace: small}}\n'


def program(name: str) -> str:
    """A program of the package."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"SKIPPED: no {name}: `make setup` installs Prometheus")
    return found


@dataclass
class Series:
    """A series of an answer: its labels, and its values with their times."""

    labels: dict[str, str]
    values: list[tuple[float, float]]


@dataclass
class Prometheus:
    """The process and its port."""

    folder: Path
    port: int = 0
    process: subprocess.Popen[Any] | None = None

    def start(self, system: SmallSystem) -> None:
        """Returns when it answers."""
        jobs = "".join(
            JOB.format(kind=kind)
            + "".join(TARGET.format(name=name, port=port) for name, port in ports.items())
            for kind, ports in system.ports.items()
        )
        config = self.folder / "prometheus.yml"
        config.write_text(CONFIG.format(rules=ROOT / "deploy/chart/rules.yaml", jobs=jobs))
        self.port = free_port()
        command = [program("prometheus"), f"--config.file={config}", "--log.level=error"]
        command += [
            f"--storage.tsdb.path={self.folder / 'series'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        self.process = subprocess.Popen(command)
        until(self.is_ready, 60)

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def range(self, expression: str, start: float, end: float) -> list[Series]:
        """The series of an expression, with a value for each second."""
        asked = {"query": expression, "start": start, "end": end, "step": 1}
        url = f"http://127.0.0.1:{self.port}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                found = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {json.load(error)['error']}") from error
        return [
            Series(one["metric"], [(time, float(value)) for time, value in one["values"]]) for one in found
        ]

    def stop(self) -> None:
        """Ends it."""
        kill(self.process)
