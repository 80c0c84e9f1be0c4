"""`python -m forebay.run [--stats] [--relays SOCKET] -- PROGRAM`: runs a program with the preload.

It is `forebay run` for those who have only the wheel, and becomes the program. docs/preload.md says
what the library does.
"""

import os
import re
import shutil
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PT_INTERP = 3
_SHT_DYNSYM = 11
# The C library, which lies beside its dynamic linker.
_LIBC = "libc.so.6"
LIBRARY = Path(__file__).parent / "lib" / "libforebay_preload.so"
USAGE = "usage: python -m forebay.run [--stats] [--relays SOCKET] [--] PROGRAM [ARGUMENT ...]"


def environment(library: Path, before: Mapping[str, str]) -> dict[str, str]:
    """The program's environment. Our library is first, so that none hooks `dlsym` before it."""
    others = before.get("LD_PRELOAD", "")
    return {**before, "LD_PRELOAD": f"{library}:{others}" if others else str(library)}


def options(program: list[str]) -> dict[str, str]:
    """Takes our options off the arguments. Returns what they add to the environment."""
    added: dict[str, str] = {}
    while program[:1] == ["--stats"] or (program[:1] == ["--relays"] and len(program) > 1):
        if program.pop(0) == "--stats":
            added["FOREBAY_PRELOAD"] = "stats"
        else:
            added["FOREBAY_RELAYS"] = program.pop(0)
    return added


def unfit(program: str, path: str | None, library: Path = LIBRARY) -> str | None:
    """Why a program cannot use the library. A file that cannot be read is left to `exec`."""
    file = shutil.which(program, path=path)
    for _ in range(5):
        if file is None:
            return None
        try:
            contents = Path(file).read_bytes()
        except OSError:
            return None
        if not contents.startswith(b"#!"):
            return _unfit_elf(file, contents, library)
        words = [word for word in os.fsdecode(contents[2:].split(b"\n")[0]).split() if word]
        run = [word for word in words[1:] if not word.startswith("-")]
        by_env = bool(words and run and Path(words[0]).name == "env")
        file = (shutil.which(run[0], path=path) if by_env else words[0]) if words else None
    return None


def _unfit_elf(file: str, contents: bytes, library: Path) -> str | None:
    if len(contents) < 64 or contents[:4] != b"\x7fELF" or contents[5] != 1:
        return None
    if contents[4] != 2:
        return f"{file} is a program of 32 bits, and the preload library has 64"
    start = struct.unpack_from("<Q", contents, 32)[0]
    size, count = struct.unpack_from("<HH", contents, 54)
    for at in range(start, start + size * count, size or 1):
        if at + 56 > len(contents):
            return None
        if struct.unpack_from("<I", contents, at)[0] == _PT_INTERP:
            offset, length = (struct.unpack_from("<Q", contents, at + field)[0] for field in (8, 32))
            linker = os.fsdecode(contents[offset : offset + length].rstrip(b"\0"))
            return _unfit_linker(file, linker, library)
    return f"{file} is linked statically, so that LD_PRELOAD does nothing in it"


def _unfit_linker(file: str, linker: str, library: Path) -> str | None:
    if "musl" in linker:
        return f"{file} is linked with musl ({linker}), and the preload library needs glibc"
    try:
        libc = Path(linker).resolve().with_name(_LIBC)
        has, needs = newest_version(libc.read_bytes()), newest_version(library.read_bytes())
    except (OSError, RuntimeError):
        return None
    if not has or not needs or has >= needs:
        return None
    last, least = (".".join(map(str, version)) for version in (has, needs))
    needed = f"the preload library needs glibc {least} or later"
    return f"{file} is started with {libc}, whose symbols end at glibc {last}; {needed}"


def newest_version(contents: bytes) -> tuple[int, ...] | None:
    """The newest version of glibc's symbols in a library's dynamic strings."""
    try:
        if contents[:6] != b"\x7fELF\x02\x01":
            return None
        (start,) = struct.unpack_from("<Q", contents, 40)
        size, count = struct.unpack_from("<HH", contents, 58)
        sections = [struct.unpack_from("<IIQQQQI", contents, start + nth * size) for nth in range(count)]
        link = next((section[6] for section in sections if section[1] == _SHT_DYNSYM), None)
        if link is None:
            return None
        offset, length = sections[link][4:6]
    except (struct.error, IndexError):
        return None
    names = contents[offset : offset + length].split(b"\0")
    numbers = (re.fullmatch(rb"GLIBC_(\d+(?:\.\d+)*)", name) for name in names)
    versions = (tuple(map(int, number[1].split(b"."))) for number in numbers if number)
    return max(versions, default=None)


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
    why = unfit(program[0], os.environ.get("PATH"), LIBRARY)
    if why is not None:
        return f"{why}: start it without `python -m forebay.run`"
    try:
        os.execvpe(program[0], program, environment(LIBRARY, os.environ) | added)
    except OSError as error:
        return f"{program[0]}: {error.strerror}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
