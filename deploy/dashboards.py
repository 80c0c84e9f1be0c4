#!/usr/bin/env python3
"""Writes the boards for Grafana and Prometheus's rules: `dashboards/*.json` and `rules.yaml` of the chart.

`deploy/dashboards.py` writes all of them anew. It knows Grafana's JSON model and the form of rules. What they
say is in `boards.py` and `rules.py`; `tests/test_dashboards.py` asks a running system for all of it.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from boards import BOARDS, Board, Panel
from rules import ALERTS, RECORDED, Alert

HERE = Path(__file__).parent
RUNBOOK = "https://github.com/forebay/forebay/blob/main/docs/runbook.md"
HEADER = "# Written by deploy/dashboards.py. docs/runbook.md has a section for each alert.\n"
# Of Grafana 10.2 and later.
SCHEMA_VERSION = 39
COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTOR = re.compile(r"\{([^{}]*)\}")


def expanded(expression: str, board: Board) -> str:
    """The expression with its abbreviations written out."""

    def selector(found: re.Match[str]) -> str:
        names = ["namespace"] if board.is_of_all else ["namespace", "instance"]
        given = [label.strip() for label in found[1].split(",") if label.strip()]
        labels = [f'{name}=~"${name}"' for name in names]
        return "{" + ", ".join(labels + [one if "=" in one else f'{one}=~"${one}"' for one in given]) + "}"

    return SELECTOR.sub(selector, expression).replace("[]", "[$__rate_interval]")


def panel_json(panel: Panel, board: Board, number: int, x: int, y: int) -> dict[str, Any]:
    """A panel of kind "timeseries"."""
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": DATASOURCE,
            "expr": expanded(expression, board),
            "legendFormat": legend,
        }
        for place, (legend, expression) in enumerate(panel.queries.items())
    ]
    stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
    custom = {"lineWidth": 1, "fillOpacity": 20 if panel.is_stacked else 0, "stacking": stacking}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom | {"showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def row_json(title: str, number: int, y: int) -> dict[str, Any]:
    """The line above the panels of a row."""
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def panels_json(board: Board) -> list[dict[str, Any]]:
    """Rows and panels, three beside each other."""
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in board.rows.items():
        made.append(row_json(title, len(made) + 1, y))
        y += 1
        for place, panel in enumerate(panels):
            down, right = divmod(place, COLUMNS // PANEL_WIDTH)
            x, below = right * PANEL_WIDTH, y + down * PANEL_HEIGHT
            made.append(panel_json(panel, board, len(made) + 1, x, below))
        y += -(-len(panels) // (COLUMNS // PANEL_WIDTH)) * PANEL_HEIGHT
    return made


def variables_json(board: Board) -> list[dict[str, Any]]:
    """The data source, and what the board can be narrowed to. A label that is absent is matched by `.*`."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    metrics = {"namespace": board.process} | ({} if board.is_of_all else {"instance": board.process})
    labels = [
        {
            "name": label,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": f"label_values({metric}, {label})", "refId": label},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }
        for label, metric in (metrics | board.labels).items()
    ]
    return [source, *labels]


def board_json(board: Board) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    return {
        "uid": f"forebay-{board.name}",
        "title": f"Forebay / {board.name.capitalize()}",
        "tags": ["forebay"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables_json(board)},
        "links": [
            {
                "type": "dashboards",
                "tags": ["forebay"],
                "title": "Forebay",
                "asDropdown": True,
                "keepTime": True,
            }
        ],
        "annotations": {"list": []},
        "panels": panels_json(board),
    }


def alert_json(alert: Alert) -> dict[str, Any]:
    """An alert as Prometheus reads it."""
    return {
        "alert": f"Forebay{alert.name}",
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "not_for": alert.not_for,
            "runbook_url": f"{RUNBOOK}#forebay{alert.name.lower()}",
        },
    }


def rules_yaml() -> str:
    """The file of rules."""
    recorded = [{"record": name, "expr": expression} for name, expression in RECORDED.items()]
    groups = [{"name": "forebay-recorded", "rules": recorded}]
    groups += [
        {"name": f"forebay-{group}", "rules": [alert_json(alert) for alert in alerts]}
        for group, alerts in ALERTS.items()
    ]
    return HEADER + yaml.safe_dump({"groups": groups}, sort_keys=False, width=100)


def files() -> dict[Path, str]:
    """What is written, by path."""
    boards = {
        HERE / f"chart/dashboards/{board.name}.json": json.dumps(board_json(board), indent=1) + "\n"
        for board in BOARDS
    }
    return boards | {HERE / "chart/rules.yaml": rules_yaml()}


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"{path.relative_to(HERE.parent)}: {len(text)} bytes")
