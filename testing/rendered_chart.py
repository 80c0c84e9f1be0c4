#!/usr/bin/env python3
"""Renders the chart: `rendered_chart.py [--helm PROGRAM]` writes deploy/rendered, a file for each of ci/.

CI has no helm: it validates what is committed, and knows by a digest in its first line whether the chart was
changed since.
"""

import argparse
import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/chart"
RENDERED = ROOT / "deploy/rendered"


def cases() -> list[str]:
    """The names of the values that are rendered."""
    return sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))


def head(case: str) -> str:
    """The first line of a rendered file: what it was rendered from."""
    files = sorted(path for path in CHART.rglob("*") if path.is_file() and path.parent.name != "ci")
    digest = hashlib.sha256()
    for path in [*files, CHART / f"ci/{case}.yaml"]:
        text = path.read_bytes()
        digest.update(f"{path.relative_to(CHART)} {len(text)}\n".encode() + text)
    return f"# Written by `make chart` from ci/{case}.yaml and the chart with digest {digest.hexdigest()}.\n"


def rendered(helm: str, case: str) -> str:
    """What helm makes of a case, in the namespace `serving`."""
    values = str(CHART / f"ci/{case}.yaml")
    command = [helm, "template", "forebay", str(CHART), "--namespace", "serving", "--values", values]
    return head(case) + subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Lints the chart, and writes all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--helm", default="helm")
    helm = parser.parse_args().helm
    RENDERED.mkdir(exist_ok=True)
    for case in cases():
        values = str(CHART / f"ci/{case}.yaml")
        subprocess.run([helm, "lint", "--strict", str(CHART), "--values", values], check=True)
        (RENDERED / f"{case}.yaml").write_text(rendered(helm, case))


if __name__ == "__main__":
    main()
