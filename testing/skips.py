#!/usr/bin/env python3
"""Names the tests that were skipped: `skips.py LIST [EXPECTED]`.

LIST has a line `TEST<tab>REASON` for each skip, from pytest (`tests/conftest.py`) and from the Rust tests
(`testing/testkit`). EXPECTED has the names of tests that may be skipped on this kind of machine, a line
each, with comments behind `#`. With it, another skip is an error. It knows the two files' forms only.
"""

import sys
from pathlib import Path


def read_skips(path: Path) -> dict[str, set[str]]:
    """The reasons of each skipped test. Without a file no test was skipped."""
    skips: dict[str, set[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        test, _, why = line.partition("\t")
        skips.setdefault(test, set()).add(why)
    return skips


def read_expected(path: Path) -> set[str]:
    """The names in the file. A name holds no ` #`."""
    lines = (line.split(" #")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def main(args: list[str]) -> int:
    """Prints the skips; fails where one was not expected."""
    if len(args) not in (1, 2):
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    skips = read_skips(Path(args[0]))
    print(f"tests skipped: {len(skips)}")
    for test, reasons in sorted(skips.items()):
        print(f"  {test}: {'; '.join(sorted(reasons))}")
    if len(args) == 1:
        return 0
    unexpected = sorted(skips.keys() - read_expected(Path(args[1])))
    for test in unexpected:
        print(f"skipped, but not expected in {args[1]}: {test}", file=sys.stderr)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
