#!/usr/bin/env python3
"""Measures the house: `house.py [--root DIR] [--json FILE]` counts lines and circles of a checkout.

A circle is a pair of files of one crate that refer to each other, by `use` or by a path in the code. A
path is followed through re-exports to the file that defines the item. These are no reference:
* a parent's `mod` declaration, and its `use` of a child's item that its own code does not name;
* anything in tests: `#[cfg(test)] mod` at the end of a file, `tests.rs`, `tests/`;
* a method call on a value, whose type's file the text does not name.
So a child that uses an item of its parent's file is in a circle only if that file's code uses the child.
Such pairs, of a module and one inside it, are counted by themselves: they are a matter of layers within
one concept, while the others tie two concepts together.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from results import row, write

Module = tuple[str, ...]

# Comments, strings and characters go first, so that words in them refer to nothing.
NOISE = re.compile(
    r"//[^\n]*|/\*.*?\*/|r(#+)\".*?\"\1|r?\"(?:\\.|[^\"\\])*\"|'(?:\\.[^']*|[^'\\])'", re.DOTALL
)
TESTS = re.compile(
    r"^#\[cfg\((?:all\()?test\b[^\n]*\n(?:#\[[^\n]*\n)*mod \w+ \{.*?^\}", re.DOTALL | re.MULTILINE
)
USE = re.compile(r"^[ ]*(?:pub(?:\([^)]*\))? )?use ([^;]+);", re.MULTILINE)
ITEM = re.compile(
    r"^(?:pub(?:\([^)]*\))? )?(?:unsafe |async |const |extern )*"
    r"(?:struct|enum|union|trait|fn|const|static|type|macro_rules!) (?:mut )?(\w+)",
    re.MULTILINE,
)
PATH = re.compile(r"(?<![\w:.])(?:r#)?([a-z_]\w*(?:::\w+)+)")


@dataclass
class File:
    """One file of a crate: what it defines, what it imports under which name, and what its code names."""

    path: str
    module: Module
    items: set[str] = field(default_factory=set)
    imports: dict[str, Module] = field(default_factory=dict)
    globs: list[Module] = field(default_factory=list)
    paths: list[Module] = field(default_factory=list)
    words: set[str] = field(default_factory=set)


@dataclass
class Circle:
    """Two files that refer to each other."""

    one: str
    other: str
    is_nested: bool  # the second is a module inside the first


def leaves(tree: str, above: Module = ()) -> Iterator[tuple[Module, str]]:
    """The paths of a `use` tree, each with the name that it gets here; `*` for all of a module."""
    head, brace, rest = tree.partition("{")
    if brace:
        above = above + tuple(head.replace("::", " ").split())
        depth, start, inner = 0, 0, rest.rsplit("}", 1)[0]
        for at, char in enumerate(inner + ","):
            depth += (char == "{") - (char == "}")
            if char == "," and depth == 0:
                yield from leaves(inner[start:at], above)
                start = at + 1
    elif tree.strip():
        path, _, alias = tree.strip().partition(" as ")
        full = above + tuple(path.split("::"))
        full = full[:-1] if full[-1] == "self" and len(full) > 1 else full
        yield full, alias.strip() or full[-1]


def read(path: Path, name: str, module: Module) -> File:
    """What stands in one file."""
    text = TESTS.sub("", NOISE.sub(" ", path.read_text()))
    file = File(name, module, set(ITEM.findall(text)))
    for use in USE.findall(text):
        for full, alias in leaves(use):
            if alias == "*":
                file.globs.append(full[:-1])
            else:
                file.imports[alias] = full
    code = USE.sub("", text)
    file.paths = [tuple(path.split("::")) for path in PATH.findall(code)]
    file.words = set(re.findall(r"\w+", code))
    return file


class Crate:
    """The files of one `src/`, by module."""

    def __init__(self, root: Path, src: str, names: list[str]) -> None:
        self.files: dict[Module, File] = {}
        for name in names:
            parts = name.removeprefix(src).removesuffix(".rs").split("/")
            if not {"tests", "bin"} & set(parts):
                module = tuple(parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts)
                self.files.setdefault(module, read(root / name, name, module))

    def absolute(self, file: File, path: Module) -> Module | None:
        """The path from the crate's root, if it leads into the crate."""
        here, first = file.module, path[0]
        while path and path[0] in ("crate", "self", "super"):
            here = {"crate": (), "self": here, "super": here[:-1]}[path[0]]
            path = path[1:]
        is_ours = first in ("crate", "self", "super") or (*here, first) in self.files
        return here + path if is_ours else None

    def definer(self, path: Module, seen: frozenset[Module] = frozenset()) -> Module | None:
        """The module whose file defines what the path names, through re-exports."""
        depth = next((n for n in range(len(path), -1, -1) if path[:n] in self.files), 0)
        file = self.files.get(path[:depth])
        if file is None or path in seen:
            return None
        rest = path[depth:]
        if rest and rest[0] not in file.items:
            sources = [file.imports[rest[0]] + rest[1:]] if rest[0] in file.imports else []
            for source in sources + [glob + rest for glob in file.globs if not sources]:
                absolute = self.absolute(file, source)
                found = self.definer(absolute, seen | {path}) if absolute else None
                if found is not None and (sources or rest[0] in self.files[found].items):
                    return found
                if sources and absolute is None:
                    return None
        return path[:depth]

    def references(self, file: File) -> set[Module]:
        """The modules whose files this one refers to."""
        used = [path for alias, path in file.imports.items() if alias in file.words]
        for glob in file.globs:
            absolute = self.absolute(file, glob)
            other = self.files.get(absolute) if absolute is not None else None
            if other:
                names = (other.items | other.imports.keys()) & file.words - file.items
                used += [glob + (name,) for name in names]
        found = {
            self.definer(path) for path in map(lambda p: self.absolute(file, p), used + file.paths) if path
        }
        return {module for module in found if module is not None and module != file.module}

    def circles(self) -> list[Circle]:
        """The pairs of files that refer to each other."""
        to = {module: self.references(file) for module, file in self.files.items()}
        pairs = sorted((a, b) for a in to for b in to[a] if a < b and a in to[b])
        return [Circle(self.files[a].path, self.files[b].path, b[: len(a)] == a) for a, b in pairs]


def listed(root: Path, pattern: str) -> list[str]:
    """The files that git has under this pattern."""
    command = ["git", "-C", str(root), "ls-files", pattern]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def lines(root: Path, names: list[str]) -> int:
    """How many lines these files have together."""
    return sum((root / name).read_bytes().count(b"\n") for name in names)


def main() -> int:
    """Prints the counts and the circles, and writes the results object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    root: Path = args.root

    rust = [name for name in listed(root, "*.rs") if "/src/" in name]
    found: list[Circle] = []
    for crate in sorted({name.split("/src/")[0] for name in rust}):
        src = f"{crate}/src/"
        circles = Crate(root, src, [name for name in rust if name.startswith(src)]).circles()
        nested = sum(circle.is_nested for circle in circles)
        print(f"{crate}: {len(circles) - nested} circles, {nested} with a parent")
        for circle in circles:
            mark = " (parent)" if circle.is_nested else ""
            print(f"  {circle.one.removeprefix(src)} <-> {circle.other.removeprefix(src)}{mark}")
        found += circles
    nested = sum(circle.is_nested for circle in found)
    rows = [
        row("house.rust_lines", "lines", lines(root, rust)),
        row("house.python_lines", "lines", lines(root, listed(root, "python"))),
        row("house.circles", "pairs", len(found) - nested),
        row("house.circles.parents", "pairs", nested),
    ]
    for each in rows:
        print(f"{each['name']}: {each['value']} {each['unit']}")
    if args.json:
        write(args.json, "house", rows, root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
