"""Skipped tests are counted and named, and CI fails on those that it did not expect."""

import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "testing/skips.py"


def skips(*args: Path) -> tuple[int, str]:
    ran = subprocess.run([sys.executable, TOOL, *args], capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


def test_a_skip_that_nobody_expected_fails_and_is_named(tmp_path: Path) -> None:
    skipped, expected = tmp_path / "skips", tmp_path / "expected"
    skipped.write_text("kv::reads\tno disk\ntests/a.py::b[1]\tno GPU\nkv::reads\tno disk\n")
    expected.write_text("# on machines without a GPU\ntests/a.py::b[1]  # no GPU\n")
    code, said = skips(skipped, expected)
    assert code == 1
    assert said.startswith("tests skipped: 2\n  kv::reads: no disk\n  tests/a.py::b[1]: no GPU\n")
    assert said.endswith(f"skipped, but not expected in {expected}: kv::reads\n")
    expected.write_text("tests/a.py::b[1]\nkv::reads\ntests/a.py::never\n")
    assert skips(skipped, expected)[0] == 0
    assert skips(tmp_path / "none", expected) == (0, "tests skipped: 0\n")


def test_tests_and_files_that_pytest_skips_stand_in_the_list(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.mark.skip(reason='SKIPPED: no GPU')\ndef test_a(): pass\ndef test_b(): pass\n"
    )
    (tmp_path / "test_all.py").write_text("import pytest\npytest.importorskip('nosuch', reason='no such')\n")
    skipped = tmp_path / "skips"
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    tests = str(Path(__file__).parent)  # What `conftest.py` imports lies there.
    environment = os.environ | {"FOREBAY_SKIPS": str(skipped), "PYTHONPATH": tests}
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, tmp_path]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
    assert skipped.read_text() == "test_all.py\tno such\ntest_one.py::test_a\tno GPU\n"


def test_every_skip_that_is_expected_names_a_test_that_is_there() -> None:
    root = TOOL.parents[1]
    lines = (line.split("#")[0].strip() for line in (root / ".ci/skips").read_text().splitlines())
    gone = []
    for name in filter(None, lines):
        place, _, test = name.partition("::")
        function = test.split("::")[-1].split("[")[0]
        if place.endswith(".py"):
            files, wanted = [root / place], f"def {function}("
        else:
            manifests = [*root.glob("crates/*/Cargo.toml"), *root.glob("t*/*/Cargo.toml")]
            package = next((m for m in manifests if f'[package]\nname = "{place}"\n' in m.read_text()), None)
            files, wanted = sorted(package.parent.rglob("*.rs")) if package else [], f"fn {function}()"
        is_there = any(file.exists() and (not test or wanted in file.read_text()) for file in files)
        gone += [] if is_there else [name]
    assert not gone
