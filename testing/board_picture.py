#!/usr/bin/env python3
"""Draws a board: `board_picture.py BOARD FILE.png` runs a small system for a minute and asks Prometheus.

The page that it draws is ours, board_page.html, and not Grafana. Halfway an engine dies.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "deploy")]

import dashboards  # noqa: E402
from boards import BOARDS, Board  # noqa: E402
from prometheus import Prometheus  # noqa: E402
from small_system import SmallSystem  # noqa: E402

WELL_S, BROKEN_S = 30, 30
NOTE = "Drawn from query_range by our own page; rendering in Grafana was not run. Red line: an engine dies."


def series(prometheus: Prometheus, panel: dict[str, Any], start: float, end: float) -> list[dict[str, Any]]:
    """The lines of a panel, each with its legend; those that are always zero are left out."""
    found = []
    for target in panel["targets"]:
        expression = re.sub(r"\$(?!__)\w+", ".*", target["expr"].replace("$__rate_interval", "5s"))
        for one in prometheus.range(expression, start, end):
            legend = target["legendFormat"]
            for name, value in one.labels.items():
                legend = legend.replace(f"{{{{{name}}}}}", value)
            values = [pair for pair in one.values if math.isfinite(pair[1])]
            if any(value for _, value in values):
                found.append({"legend": legend, "values": values})
    return found


def page(board: Board, prometheus: Prometheus, start: float, broken: float) -> str:
    """The board as a page of HTML."""
    end = time.time()
    rows: dict[str, list[dict[str, Any]]] = {}
    for made in dashboards.panels_json(board):
        if made["type"] == "row":
            panels = rows[made["title"]] = []
            continue
        defaults = made["fieldConfig"]["defaults"]
        is_stacked = defaults["custom"]["stacking"]["mode"] == "normal"
        drawn = {"title": made["title"], "unit": defaults["unit"], "is_stacked": is_stacked}
        panels.append(drawn | {"series": series(prometheus, made, start, end)})
    title = f"Forebay / {board.name.capitalize()}"
    data = {"title": title, "note": NOTE, "start": start, "end": end, "broken": broken, "rows": rows}
    return (HERE / "board_page.html").read_text().replace("DATA;", json.dumps(data) + ";", 1)


def lived(board: Board, folder: Path) -> str:
    """The page of a system that lived for a minute."""
    system, prometheus = SmallSystem(folder), Prometheus(folder)
    try:
        system.start()
        system.start_agents()
        prometheus.start(system)
        start = time.time()
        time.sleep(WELL_S)
        broken = time.time()
        system.kill("e2")
        time.sleep(BROKEN_S)
        return page(board, prometheus, start, broken)
    finally:
        system.stop()
        prometheus.stop()


def main() -> None:
    """Runs the system and takes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("board", choices=[board.name for board in BOARDS])
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("FOREBAY_LOG", "error")
    (board,) = [board for board in BOARDS if board.name == args.board]
    chromium = shutil.which("chromium") or "chromium"
    with tempfile.TemporaryDirectory(prefix="forebay-board-") as folder:
        html = Path(folder) / "board.html"
        html.write_text(lived(board, Path(folder)))
        height = 70 + sum(34 + 164 * math.ceil(len(panels) / 3) for panels in board.rows.values())
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/chromium", f"--window-size=1020,{height}"]
        command += [f"--screenshot={args.picture.resolve()}", html.as_uri()]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
    print(f"{args.picture}: {args.picture.stat().st_size} bytes")


if __name__ == "__main__":
    main()
