"""Draw a sample of the project's texts for grading by a reader: `python docs/language_sample.py COMMIT > FILE`.

The sample has 100 docstrings, 60 log messages, errors and help texts, and 30 paragraphs of documentation. The hash of
the graded commit is the seed, so the same sample can be drawn again. The reader sees only the texts, not the code.
`docs/language_grades.md` has the last sample with its grades.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("exporter", "ingest", "storage", "dashboards", "cli")
SIZES: Final = {"docstring": 100, "message": 60, "paragraph": 30}
_LEAST_WORDS: Final = 4  # without values
_LOG_METHODS: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical", "line"})
_TEXT_KEYWORDS: Final = frozenset({"help", "message", "description", "summary"})
_PARAGRAPH_WORDS: Final = 12
_PARAGRAPH_END: Final = re.compile(r"(?<!:)\n\s*\n|\n\s*\n(?!\s*(?:[-*]|\d+\.)\s)")  # not between a colon and a list


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions, and those of constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.value.value


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield texts of raised errors, of log calls, and of keyword arguments such as `help`; a value in a text is `…`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from map(_literal, node.exc.args[:1])
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _LOG_METHODS:
                yield from map(_literal, node.args[:1])
            yield from (_literal(keyword.value) for keyword in node.keywords if keyword.arg in _TEXT_KEYWORDS)


def _literal(node: ast.expr) -> str:
    """Return the text of a string or f-string with `…` for each value, or an empty text for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


def paragraphs(page: str) -> Iterator[str]:
    """Yield the paragraphs and lists of a Markdown page, without code, tables and headings.

    A paragraph that ends with a colon and the list that follows are one text, because a reader sees them together.
    """
    for block in _PARAGRAPH_END.split(re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
        text = " ".join(block.split())
        is_prose = not text.startswith(("|", "#", "<")) and not block.startswith("    ")
        if is_prose and len(text.split()) >= _PARAGRAPH_WORDS:
            yield text


def draw(seed: str) -> dict[str, list[str]]:
    """Return the texts of each group, drawn without replacement with the seed."""
    trees = [ast.parse(path.read_text()) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    named = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    pages = [path.read_text() for path in named if path.stem != "language_grades"]
    groups = {
        "docstring": [text for tree in trees for text in docstrings(tree)],
        "message": [text for tree in trees for text in messages(tree)],
        "paragraph": [text for page in pages for text in paragraphs(page)],
    }
    chance = random.Random(seed)  # noqa: S311 - a sample, no secret
    sample = {}
    for name, texts in groups.items():
        known = sorted({" ".join(text.split()) for text in texts if len(re.findall(r"[^\W_]+", text)) >= _LEAST_WORDS})
        sample[name] = chance.sample(known, SIZES[name])
    return sample


def main(seed: str) -> None:
    """Print the sample as numbered Markdown lists."""
    print(f"Sample of commit {seed}.")
    for name, texts in draw(seed).items():
        print(f"\n## {name}s\n")
        for number, text in enumerate(texts, 1):
            print(f"{number}. {text}")


if __name__ == "__main__":
    main(sys.argv[1])
