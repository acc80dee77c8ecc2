"""Measure the structure of the packages: code lines, cycles of folders, large classes, constructors and functions.

python tools/structure.py [PROJECT]
"""

from __future__ import annotations

import ast
import io
import json
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("exporter", "ingest", "storage", "view", "dashboards", "cli")
MOST_METHODS: Final = 20
MOST_PARAMETERS: Final = 12
MOST_LINES: Final = 60
_NO_CODE: Final = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
_COMMENT_IN_C: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_COMMENT_OF_TEMPLATE: Final = re.compile(r"\{#.*?#\}", re.DOTALL)


def code_of(project: Path = ROOT) -> dict[str, int]:
    """Return the number of code lines of each package: Python and C, without blank lines, comments and docstrings."""
    return {
        package.name: sum(map(code_lines, _files(package, "*.py")))
        + sum(_lines_without(_COMMENT_IN_C, path) for path in _files(package, "*.c"))
        for folder in FOLDERS
        for package in sorted((project / folder).glob("rankscope*"))
    }


def assets_of(project: Path = ROOT) -> dict[str, int]:
    """Return the number of lines of the pages that are no Python, without blank lines and comments."""
    folder = project / "view" / "rankscope_view"
    return {
        "templates": sum(_lines_without(_COMMENT_OF_TEMPLATE, path) for path in _files(folder, "*.html")),
        "scripts": sum(_lines_without(_COMMENT_IN_C, path) for path in _files(folder, "*.js")),
        "style sheets": sum(_lines_without(_COMMENT_IN_C, path) for path in _files(folder, "*.css")),
    }


def _lines_without(comment: re.Pattern[str], path: Path) -> int:
    return sum(bool(line.strip()) for line in comment.sub("", path.read_text()).splitlines())


def code_lines(path: Path) -> int:
    """Return the number of lines of a Python file that are neither blank nor comment nor docstring."""
    source = path.read_text()
    kept: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        for statement in _statements(node):
            if _is_text(statement):  # docstrings of modules, classes, functions and constants
                kept.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return len(kept)


def _files(folder: Path, pattern: str) -> list[Path]:
    return [path for path in sorted(folder.rglob(pattern)) if "__pycache__" not in path.parts]


def _statements(node: ast.AST) -> list[Any]:
    body = getattr(node, "body", None)
    return body if isinstance(body, list) else []


def _is_text(statement: Any) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)


def long_docstrings(trees: list[ast.Module]) -> float:
    """Return the share of the functions with a docstring of at least as many lines as the rest of their body."""
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    long = 0
    for function in functions:
        first, *rest = function.body
        if _is_text(first):
            lines = (rest[-1].end_lineno or 0) - rest[0].lineno + 1 if rest else 0
            long += (first.end_lineno or 0) - first.lineno + 1 >= lines
    return round(long / max(1, len(functions)), 3)


_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def _too_large(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(item, _FUNCTIONS) for item in node.body)
            if methods > MOST_METHODS:
                yield "classes", f"{name}:{node.name} {methods}"
        elif isinstance(node, _FUNCTIONS):
            parameters = len(node.args.args) + len(node.args.kwonlyargs) - 1
            lines = (node.end_lineno or 0) - node.lineno + 1
            if node.name == "__init__" and parameters > MOST_PARAMETERS:
                yield "constructors", f"{name}:{node.lineno} {parameters}"
            if lines > MOST_LINES:
                yield "functions", f"{name}:{node.name} {lines}"


def _cycle(trees: dict[str, ast.Module], packages: set[str]) -> list[str]:
    """Return the folders of one cycle of imports between folders; nothing if there is none."""
    edges = defaultdict(set)
    for name, tree in trees.items():
        here = _folder(name, packages)
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                joined = [f"{node.module}.{one}" for one in names]
                names = [one if one in trees else node.module for one in joined]
            edges[here] |= {_folder(one, packages) for one in names if one in trees} - {here}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _folder(name: str, packages: set[str]) -> str:
    return name if name in packages else name.rpartition(".")[0]


def measured(project: Path = ROOT) -> dict[str, Any]:
    """Return the numbers and names of the module by their description."""
    trees: dict[str, ast.Module] = {}
    packages: set[str] = set()
    sizes = []
    for path in (path for package in FOLDERS for path in _files(project / package, "*.py")):
        name = ".".join(path.relative_to(project).with_suffix("").parts[1:])
        if path.name == "__init__.py":
            name = name.removesuffix(".__init__")
            packages.add(name)
        trees[name] = ast.parse(path.read_text())
        sizes.append(len(path.read_text().splitlines()))
    large = defaultdict(list)
    classes: Counter[str] = Counter()
    for name, tree in trees.items():
        for kind, found in _too_large(name, tree):
            large[kind].append(found)
        if name.startswith("rankscope_exporter"):
            classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    exporter = [tree for name, tree in trees.items() if name.startswith(("rankscope_exporter", "rankscope_contract"))]
    return {
        "code_of": code_of(project),
        "assets_of": assets_of(project),
        "modules": len(sizes),
        "median_module": statistics.median(sizes),
        "largest_module": max(sizes),
        "cycle_of_folders": _cycle(trees, packages),
        f"classes_over_{MOST_METHODS}_methods": large["classes"],
        f"constructors_over_{MOST_PARAMETERS}_parameters": large["constructors"],
        f"functions_over_{MOST_LINES}_lines": large["functions"],
        "class_names_twice_in_the_exporter": sorted(name for name, count in classes.items() if count > 1),
        "share_of_long_docstrings_in_the_exporter": long_docstrings(exporter),
    }


if __name__ == "__main__":
    print(json.dumps(measured(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT), indent=1))
