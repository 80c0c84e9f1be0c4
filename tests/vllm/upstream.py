"""Other projects' sources, from PyPI: vLLM's own tests, and SGLang's package.

Knows how a file of a project on PyPI is found and checked, and how vLLM's tests are run with our classes in
place of those that they were written for. Which tests that is, and why not others, is `test_upstream.py`'s.
"""

import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT_S, RUN_S = 300, 1800


def cache() -> Path:
    """Where downloads stay: beside the packages of the Python that runs the tests."""
    return Path(os.environ.get("FOREBAY_UPSTREAM", Path(sys.prefix) / "upstream"))


def find_uv() -> str:
    """`uv`, which knows the package index that this machine uses."""
    beside = Path(sys.executable).with_name("uv")
    found = os.environ.get("UV") or shutil.which("uv") or (str(beside) if beside.exists() else None)
    if found is None:
        pytest.skip("SKIPPED: no uv to ask for sources: `make test-vllm`, or set UV")
    return found


def fetch(name: str, version: str, kind: str) -> Path:
    """A file of a release, its `sdist` or the first of its `wheels`. Compared with its digest."""
    ask = [find_uv(), "pip", "compile", "--quiet", "--no-deps", "--python", sys.executable]
    ask += ["--format", "pylock.toml", "-"]
    said = subprocess.run(ask, input=f"{name}=={version}\n", capture_output=True, text=True, timeout=LIMIT_S)
    if said.returncode != 0:
        pytest.skip(f"SKIPPED: the package index does not answer: {said.stderr.strip()[-200:]}")
    (package,) = tomllib.loads(said.stdout)["packages"]
    file = package[kind] if kind == "sdist" else package[kind][0]
    path = cache() / file["url"].rsplit("/", 1)[1]
    right = file["hashes"]["sha256"]
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != right:
        try:
            with urllib.request.urlopen(file["url"], timeout=LIMIT_S) as answer:
                data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            pytest.skip(f"SKIPPED: {file['url']} does not come: {error}")
        assert hashlib.sha256(data).hexdigest() == right, f"{path.name} is another file"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(data)
        part.rename(path)
    return path


def unpack(archive: Path, under: str) -> Path:
    """The folder `under` of an archive, unpacked beside it."""
    target = archive.with_name(archive.name + ".d")
    if not target.exists():
        fresh = archive.with_name(archive.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(fresh, [name for name in wheel.namelist() if name.startswith(under)])
        else:
            with tarfile.open(archive) as source:
                inside = [one for one in source if one.name.split("/", 1)[-1].startswith(under)]
                source.extractall(fresh, inside, filter="data")
        fresh.rename(target)
    return target


def vllm_tests() -> Path:
    """The folder that holds `tests` of the vLLM that is installed."""
    from importlib.metadata import version

    archive = fetch("vllm", version("vllm").split("+")[0], "sdist")
    (top,) = unpack(archive, "tests/").iterdir()
    return top


@dataclass(frozen=True)
class Outcome:
    """What became of tests of a project, by their names."""

    passed: frozenset[str]
    failed: frozenset[str]
    text: str


def run(folder: Path, files: list[str], stand_ins: str, settings: dict[str, str]) -> Outcome:
    """Runs tests of `folder` in one process, with the plug-in `stand_ins` of this folder."""
    command = [sys.executable, "-m", "pytest", "-p", stand_ins, "-p", "no:cacheprovider", "--noconftest"]
    command += ["-rA", "--no-header", "--tb=short", "-q", "-W", "ignore", "-o", "addopts=", *files]
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "0"} | settings
    pipe = subprocess.PIPE
    said = subprocess.run(
        command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=RUN_S
    )
    return Outcome(named(said.stdout, "PASSED "), named(said.stdout, "FAILED ", "ERROR "), said.stdout)


def named(text: str, *words: str) -> frozenset[str]:
    """The tests in pytest's summary that are said to have ended so, without their folders."""
    lines = [line for line in text.splitlines() if line.startswith(words)]
    return frozenset(line.split(" ", 1)[1].split(" - ", 1)[0].strip().rsplit("/", 1)[-1] for line in lines)
