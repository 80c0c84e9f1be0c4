"""`docs/reference/logs.md` has each line that Rust code logs, and no line that it does not log."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/logs.md").read_text()
CALL = re.compile(r"\b(?:tracing::)?(?:info|warn|error)!\(")
TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
# Python's lines have places for values in them: the page shows these in its own way.
RUST = PAGE.split("## vLLM connector")[0]


def arguments(source: str, start: int) -> str:
    """What stands between the parentheses of a macro call."""
    depth, in_text = 1, False
    for at in range(start, len(source)):
        letter = source[at]
        if letter == '"' and source[at - 1] != "\\":
            in_text = not in_text
        elif not in_text:
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if depth == 0:
                return source[start:at]
    raise AssertionError("a macro call does not end")


def logged() -> dict[str, str]:
    """Each message, and a file that logs it."""
    found: dict[str, str] = {}
    for path in sorted(ROOT.glob("crates/*/src/**/*.rs")):
        source = re.split(r"#\[cfg\(test\)\]\s*(?:#\[.*\]\s*)*mod \w+ \{", path.read_text())[0]
        for call in CALL.finditer(source):
            texts = TEXT.findall(arguments(source, call.end()))
            if texts:
                found[re.sub(r"\\\n\s*", "", texts[-1])] = str(path.relative_to(ROOT))
    return found


def test_each_line_of_the_log_stands_on_the_page() -> None:
    lines = logged()
    assert len(lines) > 50
    missing = {line: path for line, path in lines.items() if f"`{line}`" not in PAGE}
    assert not missing


def test_the_page_has_no_line_that_is_not_logged() -> None:
    told = re.findall(r"^\| `([^`]+)` \| (?:info|warn|error)", RUST, re.MULTILINE)
    assert told and set(told) <= set(logged())
