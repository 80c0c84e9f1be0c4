#!/usr/bin/env python3
"""What `make test-kube` found last: `results.py FOLDER FILE` makes JSON of what pytest wrote."""

import json
import subprocess
import sys
import xml.etree.ElementTree as Xml
from pathlib import Path


def main(folder: Path, file: Path) -> None:
    """Writes the tests by name, with how each ended and the seconds that it took."""
    (suite,) = Xml.parse(folder / "results.xml").getroot().iter("testsuite")
    ends = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    tests = [
        {
            "test": case.attrib["name"],
            "end": next((ends[child.tag] for child in case if child.tag in ends), "passed"),
            "seconds": round(float(case.attrib["time"]), 1),
        }
        for case in suite.iter("testcase")
    ]
    commit = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], text=True).strip()
    kubernetes = (folder / "version").read_text().strip()
    found = {"bench": "kube", "commit": commit, "date": suite.attrib["timestamp"], "kubernetes": kubernetes}
    file.write_text(json.dumps(found | {"tests": tests}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
