"""The results object, in the form that benchmarks write, for figures that are counted and not measured."""

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

Row = dict[str, object]


def row(name: str, unit: str, value: int) -> Row:
    """A figure that was counted, not measured several times."""
    return {"name": name, "unit": unit, "value": value, "min": value, "max": value, "runs": 1}


def write(path: Path, bench: str, rows: list[Row], root: Path) -> None:
    """Writes the object of the checkout at `root`."""
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = {"cpus": os.cpu_count(), "memory_gib": round(memory, 1), "kernel": os.uname().release}
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    result: dict[str, object] = {"bench": bench, "commit": commit, "date": date}
    result |= {"machine": machine | {"gpus": [], "disk": None}, "rows": rows}
    path.write_text(json.dumps(result, indent=2) + "\n")
