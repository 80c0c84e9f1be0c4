"""`python -m forebay.run`: the program is run with the preload before all others."""

import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import forebay.run


def run(*arguments: str, preload: str = "") -> tuple[int, str, str]:
    environment = {**os.environ, "LD_PRELOAD": preload}
    environment.pop("FOREBAY_PRELOAD", None)
    command = [sys.executable, "-m", "forebay.run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


needs_library = pytest.mark.skipif(
    not forebay.run.LIBRARY.exists(),
    reason="SKIPPED: this package has no libraries; `make wheel`",
)


@needs_library
def test_the_program_is_run_with_the_library_before_all_others() -> None:
    script = "echo $LD_PRELOAD $FOREBAY_PRELOAD $0 $1; exit 7"
    ours = str(forebay.run.LIBRARY)
    assert run("--", "sh", "-c", script, "--stats") == (7, f"{ours} --stats\n", "")
    assert run("--stats", "sh", "-c", script)[1] == f"{ours} stats sh\n"
    assert run("sh", "-c", script, preload="libm.so.6")[1] == f"{ours}:libm.so.6 sh\n"


@needs_library
def test_the_copying_library_lies_beside_it() -> None:
    library = forebay.run.LIBRARY.with_name("libforebay_cuda.so")
    assert ctypes.CDLL(str(library)).forebay_copy_open(None, None, -1) == 0


@needs_library
def test_a_program_that_is_not_there_is_said() -> None:
    code, _, error = run("no-such-program")
    assert (code, error) == (1, "no-such-program: No such file or directory\n")


def elf(kind: int, says: bytes) -> bytes:
    """An ELF file of 64 bits whose only program header is of a kind, and what that says."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 1)
    entry = bytearray(56)
    struct.pack_into("<I", entry, 0, kind)
    struct.pack_into("<Q", entry, 8, 120)
    struct.pack_into("<Q", entry, 32, len(says))
    return bytes(header + entry) + says


def test_programs_that_would_not_start_or_not_be_caught_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "ld-old.so").write_bytes(b"GLIBC_2.31\0")
    (tmp_path / "ld-new.so").write_bytes(b"GLIBC_2.34\0")
    for name, contents in [
        ("new", elf(3, f"{tmp_path}/ld-new.so".encode() + b"\0")),
        ("old", elf(3, f"{tmp_path}/ld-old.so".encode() + b"\0")),
        ("musl", elf(3, b"/lib/ld-musl-x86_64.so.1\0")),
        ("static", elf(1, b"")),
        ("script", b"#!/usr/bin/env -S musl\n"),
        ("text", b"echo\n"),
    ]:
        (tmp_path / name).write_bytes(contents)
        (tmp_path / name).chmod(0o755)
    path = str(tmp_path)
    for name, says in [
        ("old", "needs glibc 2.34"),
        ("musl", "musl"),
        ("static", "statically"),
        ("script", "musl"),
    ]:
        why = forebay.run.unfit(name, path)
        assert why is not None and says in why and str(tmp_path) in why
    for name in ["new", "text", "nowhere", f"{tmp_path}/new"]:
        assert forebay.run.unfit(name, path) is None
    assert forebay.run.unfit(sys.executable, "") is None


def test_options_end_where_the_program_begins() -> None:
    program = ["--relays", "/r.sock", "--stats", "sh", "--relays", "x"]
    assert forebay.run.options(program) == {"FOREBAY_RELAYS": "/r.sock", "FOREBAY_PRELOAD": "stats"}
    assert program == ["sh", "--relays", "x"]
    assert forebay.run.options(["--relays"]) == {}


def test_what_cannot_be_run_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert forebay.run.main([]) == forebay.run.USAGE
    assert forebay.run.main(["--stat", "sh"]) == f"--stat is not known\n{forebay.run.USAGE}"
    assert forebay.run.main(["--stats", "--relays"]) == f"--relays needs a socket\n{forebay.run.USAGE}"
    monkeypatch.setattr(forebay.run, "LIBRARY", tmp_path / "none.so")
    assert "installed without it" in forebay.run.main(["sh"])
    spaced = tmp_path / "with space"
    spaced.write_bytes(b"")
    monkeypatch.setattr(forebay.run, "LIBRARY", spaced)
    assert "no path with spaces or colons" in forebay.run.main(["sh"])
