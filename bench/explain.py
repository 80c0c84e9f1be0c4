#!/usr/bin/env python3
"""Of how many constructed causes `forebay explain` tells the right one.

    FOREBAY=target/release/forebay bench/explain.py --json bench/results/explain.json

Each cause is made on nodes of its own; tests/explain_causes.py says how. It needs the Python extension.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]

from explain_causes import CAUSES, place  # noqa: E402
from vllm_engine import results, row  # noqa: E402


def is_right(cause: str) -> tuple[bool, float]:
    """Whether it is told, and how long it took to make it and to ask."""
    begun = time.monotonic()
    with place() as at:
        said = CAUSES[cause](at)
    print(f"{cause}: {said['text']}")
    return said["cause"] == cause, time.monotonic() - begun


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    args = parser.parse_args()
    told = {cause: is_right(cause) for cause in CAUSES}
    right = sum(right for right, _ in told.values())
    print(f"explain.right: {right} of {len(CAUSES)}")
    figure = row("explain.right", "causes", [right], ceiling=len(CAUSES), ratio=right / len(CAUSES))
    if args.json:
        args.json.write_text(json.dumps(results("explain", [], None, [figure]), indent=2) + "\n")


if __name__ == "__main__":
    main()
