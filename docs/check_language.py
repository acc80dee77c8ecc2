"""Check that text in the repository is plain technical English: `python docs/check_language.py`, part of `make lint`.

Counts expressions of the project's earlier private dialect in docstrings, comments, user-visible strings, test names
and Markdown. `docs/language_baseline.json` has the number that each file may still contain. A file with more fails the
check, and so does a new file with any. `--update` lowers the numbers; it never raises one.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
BASELINE: Final = ROOT / "docs" / "language_baseline.json"

EXPRESSIONS: Final = {
    "a noun instead of 'what'": r"\b(?:of|by|to|from|with|for|than|as|is|in|on|and|or) what\b|, what\b|^What\b"
    r"|\bwhat (?:is|was|it|they|has|had|comes|came|goes|stands)\b",
    "'report', 'send' or 'state' instead of 'tell' or 'say'": r"\b(?:tells?|told|says?|said|saying)\b",
    "'is' or 'remains' instead of 'stands', 'lies' or 'stays'": r"\b(?:stands?|stood|lies|lay|stays?|stayed)\b",
    "the name of the actor instead of 'somebody'": r"\b(?:somebody|nobody|anybody|everybody|whoever)\b",
    "'which' or 'that' for a thing instead of 'who'": r"\b(?:who|whom)\b",
    "'again', 'immediately' or 'continues'": r"\b(?:anew|at once|thereof|goes? on|went on|going on)\b",
}
PATTERNS: Final = {advice: re.compile(pattern, re.MULTILINE) for advice, pattern in EXPRESSIONS.items()}

_MOST_SHOWN: Final = 20
"""Findings of one file that are printed."""

_CODE_IN_MARKDOWN: Final = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, comment, test name and string of at least three words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2:
            yield node.lineno, node.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:")):
            yield token.start[0], token.string.lstrip("# ")


def findings_in(path: Path) -> list[tuple[int, str, str]]:
    """Return line, expression and advice for each expression in the file."""
    source = path.read_text(encoding="utf-8")
    texts = texts_of_python(source) if path.suffix == ".py" else [(1, _CODE_IN_MARKDOWN.sub(_same_lines, source))]
    return [
        (line + text[: match.start()].count("\n"), match.group().strip(), advice)
        for line, text in texts
        for advice, pattern in PATTERNS.items()
        for match in pattern.finditer(text)
    ]


def main(arguments: list[str]) -> int:
    """Compare every file with the baseline, print what exceeds it, and return the exit status."""
    baseline: dict[str, int] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    found = {path: findings_in(ROOT / path) for path in _tracked_files()}
    if "--update" in arguments:
        counts = {path: len(findings) for path, findings in found.items() if findings}
        lowered = {path: min(count, baseline.get(path, 0 if baseline else count)) for path, count in counts.items()}
        BASELINE.write_text(json.dumps({path: n for path, n in sorted(lowered.items()) if n}, indent=0) + "\n")
        return 0
    exceeding = {path: findings for path, findings in found.items() if len(findings) > baseline.get(path, 0)}
    for path, findings in exceeding.items():
        print(f"{path}: {len(findings)} expressions to rewrite, {baseline.get(path, 0)} allowed")
        for line, expression, advice in findings[:_MOST_SHOWN]:
            print(f"  {path}:{line}: {expression!r}: use {advice}")
    return 1 if exceeding else 0


def _same_lines(code: re.Match[str]) -> str:
    return "\n" * code.group().count("\n")


def _tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py", "*.md"],  # noqa: S607 - git of the developer's PATH
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    this = Path(__file__).relative_to(ROOT).as_posix()
    return [path for path in listed.stdout.splitlines() if path != this and (ROOT / path).exists()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
