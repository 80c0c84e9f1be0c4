"""The program `forebay` of this package: the script `forebay`, or `python -m forebay`, becomes it.

It is told which Python this is, so that `forebay vllm serve` and `forebay doctor` use the same one.
"""

import os
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "bin" / "forebay"


def main() -> None:
    """Becomes the program, or ends with the reason why not."""
    environment = {"FOREBAY_PYTHON": sys.executable, **os.environ}
    try:
        os.execve(PROGRAM, ["forebay", *sys.argv[1:]], environment)
    except OSError as error:
        sys.exit(f"forebay: {PROGRAM}: {error.strerror}")


if __name__ == "__main__":
    main()
