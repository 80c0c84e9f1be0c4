"""`python -m forebay.run [--stats] [--relays SOCKET] -- PROGRAM`: a program whose copies take every path.

What `forebay run` does, for those who have the wheel alone. Knows where the wheel keeps the preload library
and how the dynamic linker is told of it; docs/preload.md has what that does. It leaves no Python behind.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

LIBRARY = Path(__file__).parent / "lib" / "libforebay_preload.so"
USAGE = "usage: python -m forebay.run [--stats] [--relays SOCKET] [--] PROGRAM [ARGUMENT ...]"


def environment(library: Path, before: Mapping[str, str]) -> dict[str, str]:
    """The program's environment. Ours comes first: one before it that hooks `dlsym` would go round it."""
    others = before.get("LD_PRELOAD", "")
    return {**before, "LD_PRELOAD": f"{library}:{others}" if others else str(library)}


def options(program: list[str]) -> dict[str, str]:
    """Takes our options off the front of what follows the module's name, and says what they add."""
    added: dict[str, str] = {}
    while program[:1] == ["--stats"] or (program[:1] == ["--relays"] and len(program) > 1):
        if program.pop(0) == "--stats":
            added["FOREBAY_PRELOAD"] = "stats"
        else:
            added["FOREBAY_RELAYS"] = program.pop(0)
    return added


def main(arguments: Sequence[str]) -> str:
    """Becomes the program, or returns why not."""
    program = list(arguments)
    added = options(program)
    if program[:1] == ["--"]:
        program = program[1:]
    elif program == ["--relays"]:
        return f"--relays needs a socket\n{USAGE}"
    elif program[:1] and program[0].startswith("-"):
        return f"{program[0]} is not known\n{USAGE}"
    if not program:
        return USAGE
    if not LIBRARY.exists():
        return f"{LIBRARY} is missing: this forebay was installed without it"
    if any(character in " \t\n:" for character in str(LIBRARY)):
        return f"the dynamic linker takes no path with spaces or colons: {LIBRARY}"
    try:
        os.execvpe(program[0], program, environment(LIBRARY, os.environ) | added)
    except OSError as error:
        return f"{program[0]}: {error.strerror}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
