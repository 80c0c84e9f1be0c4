#!/usr/bin/env python3
"""Checks that every crate we build on has a licence that Apache-2.0 software may ship with.

Reads `cargo metadata` and evaluates each SPDX expression against the list below. It knows licences only.
"""

import json
import re
import subprocess
import sys

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-1-Clause",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}


def is_allowed(expression: str) -> bool:
    """Evaluates an SPDX expression: AND needs both sides, OR one of them. `/` is an old way to write OR."""
    tokens = re.findall(r"\(|\)|[^\s()/]+|/", expression)
    words = " ".join(tokens).replace(" WITH ", "\0WITH\0").split()
    python = []
    for word in words:
        if word in "()":
            python.append(word)
        elif word in ("AND", "OR", "/"):
            python.append("and" if word == "AND" else "or")
        else:
            python.append(str(word.replace("\0", " ") in ALLOWED))
    return bool(eval(" ".join(python), {"__builtins__": {}}))  # noqa: S307 - only True, False, and, or and brackets


def main() -> int:
    """Prints the crates whose licence is missing or not allowed; the exit code is their presence."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    packages = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["packages"]
    bad = [p for p in packages if not p["license"] or not is_allowed(p["license"])]
    for package in bad:
        print(f"{package['name']} {package['version']}: licence {package['license']!r} is not on the list")
    print(f"licences: {len(packages)} crates checked, {len(bad)} refused")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
