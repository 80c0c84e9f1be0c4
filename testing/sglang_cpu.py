#!/usr/bin/env python3
"""Makes a virtual environment with the real SGLang for the CPU: `sglang_cpu.py VENV REQUIREMENTS`.

It knows how SGLang is installed where there is no GPU: its package of PyPI, unchanged, beside the two
modules in `sglang_on_cpu`, which stand in for its CUDA kernels. What is tested with it is `tests/sglang`'s.
It must be run by an environment that has `uv`.

An environment that is there already, from the same files, is left as it is. Where there is no CPython 3.12
or no room, it says so in a line that begins with SKIPPED, leaves nothing, and ends well: the tests skip.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from vllm_cpu import STAMP, UV, Skipped, check_room, find_python

STAND_INS = Path(__file__).with_name("sglang_on_cpu")
ENTRY_POINT = "[sglang.srt.plugins]\non_cpu = sglang_on_cpu:register\n"
"""What SGLang looks for in each of its processes."""


def modules() -> list[Path]:
    """The files of the stand-ins."""
    return sorted(STAND_INS.rglob("*.py"))


def add_stand_ins(venv: Path) -> None:
    """Puts the stand-ins beside SGLang, as a distribution that has the entry point."""
    (site,) = venv.glob("lib/python*/site-packages")
    for module in modules():
        target = site / module.relative_to(STAND_INS)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(module, target)
    info = site / "sglang_on_cpu-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-on-cpu\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (info / "INSTALLER").write_text("forebay\n")
    (info / "RECORD").write_text("")


def ensure(venv: Path, requirements: Path) -> None:
    """Installs, unless it is there already. Every version is stated, so nothing is resolved."""
    files = [requirements, Path(__file__), *modules()]
    made_from = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    stamp = venv / STAMP
    if stamp.exists() and stamp.read_text() == made_from:
        return
    shutil.rmtree(venv, ignore_errors=True)
    check_room(venv.absolute().parent)
    subprocess.run([UV, "venv", "--quiet", "--clear", "--python", find_python(), venv], check=True)
    into = ["--python", venv / "bin/python", "-r", requirements]
    subprocess.run([UV, "pip", "install", "--quiet", "--no-deps", *into], check=True)
    add_stand_ins(venv)
    stamp.write_text(made_from)


def main() -> int:
    """The command line."""
    if len(sys.argv) != 3:
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    venv = Path(sys.argv[1])
    try:
        ensure(venv, Path(sys.argv[2]))
    except Skipped as why:
        print(f"SKIPPED: no SGLang in {venv}: {why}", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"sglang_cpu.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
