#!/usr/bin/env python3
"""How long `forebay preflight net` takes: `bench/preflight_net.py --json FILE [--hosts N] [--runs N]`.

Hosts are network namespaces at one switch, as the tests have them. Needs root and iproute2.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import vllm_engine

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from test_preflight_net import Net, site


def main() -> None:
    """Runs it, and writes its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True, help="where the results go")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--forebay", help="the program")
    given = parser.parse_args()
    os.environ["FOREBAY"] = vllm_engine.program(given.forebay)
    checks, unanswered, measuring, moved = [], [], [], []
    with tempfile.TemporaryDirectory() as folder, Net(Path(folder)) as net:
        host, toml = site(net, given.hosts)[0]
        for _ in range(given.runs):
            report = net.preflight(host, "--config", toml, "--measure").json
            checks.append(report["seconds"])
            measuring.append(report["measured"]["seconds"])
            moved.append(report["measured"]["bytes"] / 1e9)
            # Nobody has the address, and nobody knows the name.
            nobody = ("--peer", "10.77.0.250:7600", "--peer", "nobody.invalid:7600")
            unanswered.append(net.preflight(host, "--config", toml, *nobody).json["seconds"])
    rows = [
        vllm_engine.row("preflight.net.seconds", "s", checks),
        vllm_engine.row("preflight.net.seconds.unanswered", "s", unanswered),
        vllm_engine.row("preflight.net.measure_seconds", "s", measuring),
        vllm_engine.row("preflight.net.moved_gb", "GB", moved),
    ]
    results = vllm_engine.results("preflight-net", [], None, rows)
    results["machine"]["hosts"] = given.hosts
    Path(given.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
