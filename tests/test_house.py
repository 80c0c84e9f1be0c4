"""What the house promises whoever reads it: the circles that `testing/house.py` counts are those of a
small crate that has each case once, and comments end at 100 columns.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "testing/house.py"
FOLDERS = ("bench", "crates", "deploy", "python", "testing", "tests", "tools")
COMMENTS = {".rs": re.compile(r"\s*//[/!]?(.*)"), ".py": re.compile(r"\s*#(.*)")}
CRATE = {
    # A re-export is no reference, nor is a word in a comment, a text or a test.
    "lib.rs": 'mod a;\nmod b;\nmod p;\npub use a::A;\nfn f() { g("p::P") } // p::P\n',
    # These two refer to each other, one of them through the re-export.
    "a.rs": "use crate::b::{B, self as other};\npub struct A(B, other::C);\n",
    "b.rs": "pub struct B;\npub struct C;\nfn f(_: &crate::A) {}\n",
    # A parent that uses its child, which uses its parent.
    "p/mod.rs": "mod c;\nmod d;\nmod e;\nuse c::Child;\npub use d::D;\npub struct P(Child);\n",
    "p/c.rs": "use super::*;\npub struct Child;\nfn f(_: P) {\n    super::e::e();\n}\n",
    # This child is re-exported only.
    "p/d.rs": "use super::P;\npub struct D(P);\n",
    # This one is used by `c`, which it uses in its tests only.
    "p/e.rs": "pub fn e() {}\n#[cfg(test)]\nmod t {\n    fn f(_: crate::p::c::Child) {}\n}\n",
}


def test_a_circle_is_counted_where_code_refers_to_both_files_and_nowhere_else(tmp_path: Path) -> None:
    for name, text in CRATE.items():
        file = tmp_path / "crates/one/src" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git = ["git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    out = tmp_path / "out.json"
    command = [sys.executable, TOOL, "--root", tmp_path, "--json", out]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert said[:3] == [
        "crates/one: 1 circles, 1 with a parent",
        "  a.rs <-> b.rs",
        "  p/mod.rs <-> p/c.rs (parent)",
    ]
    rows = {row["name"]: row["value"] for row in json.loads(out.read_text())["rows"]}
    lines = sum(text.count("\n") for text in CRATE.values())
    assert rows["house.rust_lines"] == lines
    assert (rows["house.circles"], rows["house.circles.parents"]) == (1, 1)


def test_comments_end_at_100_columns_but_for_tables_and_code() -> None:
    files = [
        file for folder in FOLDERS for suffix in COMMENTS for file in (ROOT / folder).rglob(f"*{suffix}")
    ]
    long = [
        f"{file.relative_to(ROOT)}:{at}"
        for file in files
        for at, line in prose(COMMENTS[file.suffix], file.read_text())
        if len(line) > 100
    ]
    assert len(files) > 1000 and not long


def prose(comment: re.Pattern[str], text: str) -> list[tuple[int, str]]:
    """The lines of comments, with their numbers, that are neither rows of a table nor within ```."""
    found, within_code = [], False
    for at, line in enumerate(text.splitlines(), 1):
        matched = comment.match(line)
        said = matched[1].strip() if matched else ""
        within_code = matched is not None and within_code != said.startswith("```")
        if matched and not within_code and not said.startswith("|"):
            found.append((at, line))
    return found
