"""What tests of models have shown, as rows that machines can read: in the file FOREBAY_MODELS_JSON names.

A row says whether a kind of model was accepted, or how many of its tokens were wrong. Rows of other tests
that are in the file already stay.
"""

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Results:
    """Kinds of models, and of each how many tokens were said and how many of them were wrong."""

    def __init__(self) -> None:
        self.kinds: dict[str, list[int]] = {}

    def said(self, kind: str, tokens: list[int], right: list[int]) -> None:
        """One answer."""
        counts = self.kinds.setdefault(kind, [0, 0])
        counts[0] += len(right)
        counts[1] += sum(one != other for one, other in zip(tokens, right, strict=False))

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for kind, (said, wrong) in self.kinds.items():
            name = f"models.tokens.{kind.replace('.', '-')}"
            found.append({"name": f"{name}.accepted", "unit": "models", "value": 1, "runs": 1})
            found.append({"name": f"{name}.wrong_tokens", "unit": "tokens", "value": wrong, "runs": said})
        return found

    def write(self) -> None:
        path = os.environ.get("FOREBAY_MODELS_JSON")
        if path:
            write_rows(Path(path), self.rows())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Adds rows to a file of results, or makes it."""
    describe = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = {"cpus": os.cpu_count(), "memory_gib": round(memory, 1), "kernel": platform.release()}
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    names = {row["name"] for row in rows}
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in before if row["name"] not in names]
    made = {"bench": "models", "commit": commit, "date": date}
    made |= {"machine": machine | {"gpus": [], "disk": None}, "rows": kept + rows}
    path.write_text(json.dumps(made, indent=2) + "\n")
