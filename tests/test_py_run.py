"""`python -m forebay.run`: the program is run with the preload before all others."""

import ctypes
import importlib.util
import os
import re
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


ROOT = Path(__file__).parent.parent

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


def version(number: str) -> tuple[int, ...]:
    return tuple(map(int, number.split(".")))


@needs_library
@pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None,
    reason="SKIPPED: without zig the libraries need the glibc of this machine; tests/requirements-zig.txt",
)
@pytest.mark.parametrize("name", ["preload", "cuda"])
def test_the_libraries_need_no_later_glibc_than_is_documented(name: str) -> None:
    documented = re.search(r"glibc (\S+) or later", (ROOT / "docs/preload.md").read_text())
    library = forebay.run.LIBRARY.with_name(f"libforebay_{name}.so")
    said = subprocess.run(["objdump", "-p", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"GLIBC_(\S+)$", said, re.MULTILINE)
    assert documented is not None and needed
    assert [number for number in needed if version(number) > version(documented[1])] == []
    # What `python -m forebay.run` reads of it, to refuse a program.
    assert forebay.run.newest_version(library.read_bytes()) == max(map(version, needed))


@needs_library
@pytest.mark.parametrize("size", ["8", "8388608"])
def test_a_thread_that_is_cancelled_within_a_copy_ends(tmp_path: Path, size: str) -> None:
    source = ROOT / "crates/preload/tests/c/cancelled.c"
    compiler = ["cc", "-fexceptions", "-fPIC", source, "-pthread", "-o"]
    driver, program = tmp_path / "libcuda.so.1", tmp_path / "cancelled"
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run([*compiler, driver, "-DDRIVER", "-shared", soname], check=True)
    subprocess.run([*compiler, program, driver, f"-Wl,-rpath,{tmp_path}"], check=True)
    assert run(str(program), size) == (0, "cleaned up\ncancelled\n", "")


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


def naming(versions: str) -> bytes:
    """An ELF file of 64 bits that names versions of glibc's symbols, and others where it has constants."""
    file = bytearray(64 + 3 * 64)
    file[:6] = b"\x7fELF\x02\x01"
    file[40] = file[58] = 64
    file[60] = 3
    symbols, strings = 64 + 64, 64 + 2 * 64
    file[symbols + 4], file[symbols + 40] = 11, 2
    struct.pack_into("<QQ", file, strings + 24, len(file), len(versions))
    return bytes(file) + versions.encode() + b"\0GLIBC_9.99\0"


def test_programs_that_would_not_start_or_not_be_caught_are_told_apart(tmp_path: Path) -> None:
    for folder, versions in [
        ("libc-old", "\0GLIBC_2.2.5\0GLIBC_2.9\0GLIBC_2.16\0GLIBC_PRIVATE\0"),
        ("libc-new", "\0GLIBC_2.2.5\0GLIBC_2.17\0GLIBC_2.36\0GLIBC_ABI_DT_RELR\0"),
    ]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ld.so").write_bytes(b"")
        (tmp_path / folder / "libc.so.6").write_bytes(naming(versions))
    library = tmp_path / "preload.so"
    library.write_bytes(naming("\0dlsym\0GLIBC_2.17\0GLIBC_2.2.5\0"))
    for name, contents in [
        ("new", elf(3, f"{tmp_path}/libc-new/ld.so".encode() + b"\0")),
        ("old", elf(3, f"{tmp_path}/libc-old/ld.so".encode() + b"\0")),
        ("musl", elf(3, b"/lib/ld-musl-x86_64.so.1\0")),
        ("static", elf(1, b"")),
        ("script", b"#!/usr/bin/env -S musl\n"),
        ("text", b"echo\n"),
    ]:
        (tmp_path / name).write_bytes(contents)
        (tmp_path / name).chmod(0o755)
    path = str(tmp_path)
    for name, says in [
        ("old", "symbols end at glibc 2.16; the preload library needs glibc 2.17 or later"),
        ("musl", "musl"),
        ("static", "statically"),
        ("script", "musl"),
    ]:
        why = forebay.run.unfit(name, path, library)
        assert why is not None and says in why and str(tmp_path) in why
    for name in ["new", "text", "nowhere", f"{tmp_path}/new"]:
        assert forebay.run.unfit(name, path, library) is None
    assert forebay.run.unfit(sys.executable, "", library) is None


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
