"""What `make dist` gives to others: a tarball that runs, what it is made of, and sums that are right."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    not list(ROOT.glob("target/wheels/forebay-*.whl")), reason="SKIPPED: no wheel: `make wheel`"
)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gathered(tmp_path_factory.mktemp("dist") / "one")


def gathered(out: Path) -> Path:
    subprocess.run([sys.executable, ROOT / "deploy/dist.py", "--out", out], check=True)
    return out


def test_the_sums_are_those_of_all_files_and_the_same_files_come_again(dist: Path, tmp_path: Path) -> None:
    sums = (dist / "SHA256SUMS").read_text()
    assert len(sums.splitlines()) == len(list(dist.iterdir())) - 1 == 3
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=dist, check=True)
    assert (gathered(tmp_path / "again") / "SHA256SUMS").read_text() == sums


def test_the_tarball_has_a_program_that_finds_its_libraries(dist: Path, tmp_path: Path) -> None:
    (tarball,) = dist.glob("*.tar.xz")
    subprocess.run(["tar", "-xJf", tarball, "-C", tmp_path], check=True)
    (root,) = tmp_path.iterdir()
    command = [root / "bin/forebay", "run", "--", "sh", "-c", "echo $LD_PRELOAD"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.strip() == str((root / "lib/libforebay_preload.so").resolve())
    assert {file.name for file in root.rglob("*") if file.is_file()} >= {"LICENSE", "forebay-node.service"}


def test_each_crate_is_listed_with_its_licence_and_none_that_is_for_tests(
    dist: Path,
) -> None:
    (document,) = dist.glob("*.cdx.json")
    bom = json.loads(document.read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    components = {(each["name"], each["version"]) for each in bom["components"]}
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    assert components <= {(each["name"], each["version"]) for each in locked}
    names = {name for name, _ in components}
    assert {"forebay-cli", "forebay-py", "forebay-preload", "hyper", "io-uring", "pyo3", "ring"} <= names
    assert not names & {"fake-cuda", "loom", "proptest", "testkit"}
    assert all(each["licenses"] and re.match("pkg:cargo/", each["purl"]) for each in bom["components"])
    refs = {each["bom-ref"] for each in bom["components"]} | {bom["metadata"]["component"]["bom-ref"]}
    uses = {each["ref"]: set(each.get("dependsOn", [])) for each in bom["dependencies"]}
    assert uses.keys() == refs and all(used <= refs for used in uses.values())
