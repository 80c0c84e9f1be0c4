"""What CONTRIBUTING.md says about packages and folders is true, and packages depend in one direction."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
# A crate uses only crates before it.
ORDER = "kv steps transfer otlp cuda net ring store client paged node router preload py cli".split()


@pytest.fixture(scope="module")
def packages() -> dict[str, dict[str, Any]]:
    """Our packages by their folder, each with the folders that it uses: `uses`, and `tests` for its tests."""
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked", "--offline"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    found = json.loads(said)["packages"]
    folder = {each["name"]: str(Path(each["manifest_path"]).parent.relative_to(ROOT)) for each in found}

    def used(package: dict[str, Any], is_dev: bool) -> set[str]:
        kinds = {d["name"] for d in package["dependencies"] if (d["kind"] == "dev") == is_dev}
        return {folder[name] for name in kinds & folder.keys()}

    return {
        folder[each["name"]]: {"name": each["name"], "uses": used(each, False), "tests": used(each, True)}
        for each in found
    }


def short(folder: str) -> str:
    return folder.split("/")[-1]


def test_the_table_of_packages_is_what_cargo_says(packages: dict[str, dict[str, Any]]) -> None:
    rows = re.findall(
        r"^\| `((?:crates|tools|testing)/[\w-]+)` \| `([\w-]+)` \| [^|]+ \| ([^|]*) \|$", PAGE, re.M
    )
    told = {folder: (name, uses) for folder, name, uses in rows}
    is_so = {
        folder: (package["name"], ", ".join(sorted(map(short, package["uses"]))) or "-")
        for folder, package in packages.items()
    }
    assert told == is_so
    crates = [short(folder) for folder in told if folder.startswith("crates/")]
    assert crates == ORDER, "the table's order is the design's"


def test_a_crate_uses_crates_above_it_only(packages: dict[str, dict[str, Any]]) -> None:
    for folder, package in packages.items():
        kind, name = folder.split("/")
        below = {f"crates/{crate}" for crate in ORDER[ORDER.index(name) :]} if kind == "crates" else set()
        below |= {other for other in packages if other.startswith("tools/")} if name != "cli" else set()
        if kind == "tools":
            below = {"crates/cli"}
        if kind == "testing":
            below = {other for other in packages if other.startswith("tools/")}
        wrong = package["uses"] & below
        assert not wrong, f"{folder} uses {wrong}"


def test_what_is_for_tests_is_used_by_tests_only(packages: dict[str, dict[str, Any]]) -> None:
    for folder, package in packages.items():
        wrong = {used for used in package["uses"] if used.startswith("testing/")}
        assert folder.startswith("testing/") or not wrong, f"{folder} uses {wrong}"


def test_every_place_that_the_page_names_is_there() -> None:
    named = re.findall(r"`((?:\.ci|bench|crates|deploy|docs|python|testing|tests|tools)/[\w./-]*)`", PAGE)
    missing = [place for place in named if not (ROOT / place).exists()]
    assert named and not missing
