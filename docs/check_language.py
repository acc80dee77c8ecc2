"""Check that text in the repository is plain technical English: `python docs/check_language.py`, part of `make lint`.

The check reads docstrings, comments, test names, Markdown pages, and outside of `tests/` also strings of at least three
words (errors, log messages, help, alert texts). It reports expressions of the project's earlier private dialect,
sentences of more than 40 words, and test names of more than 72 characters. `docs/language_exceptions.json` lists the
findings that are correct English, each with its reason. An exception that matches nothing is an error too.

    python docs/check_language.py [PATH ...]     check these files and folders only, without the exceptions' own check
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
EXCEPTIONS: Final = ROOT / "docs" / "language_exceptions.json"
MOST_EXCEPTIONS: Final = 40
MOST_WORDS: Final = 40
MOST_NAME_CHARACTERS: Final = 72

EXPRESSIONS: Final = {
    "a noun instead of 'what'": r"\b(?:of|by|to|from|with|for|than|as|is|in|on|and|or) what\b|, what\b|^What\b"
    r"|\bwhat (?:is|was|it|they|has|had|comes|came|goes|stands)\b",
    "'report', 'send' or 'state' instead of 'tell' or 'say'": r"\b(?:tells?|told|says?|said|saying)\b",
    "'is' or 'remains' instead of 'stands', 'lies' or 'stays'": r"\b(?:stands?|stood|lies|lay|stays?|stayed)\b",
    "the name of the actor instead of 'somebody'": r"\b(?:somebody|nobody|anybody|everybody|whoever)\b",
    "'which' or 'that' for a thing instead of 'who'": r"\b(?:who|whom)\b",
    "'again', 'immediately' or 'next to'": r"\b(?:anew|at once|thereof|goes? on|went on|going on|besides?)\b"
    r"|\bby (?:itself|themselves)\b",
    "a complete sentence": r"\A(?:Of|So|Who|Whether|How|Where|And|Then|Nor|Else|They|It is|That)\b",
}
PATTERNS: Final = {advice: re.compile(pattern, re.MULTILINE) for advice, pattern in EXPRESSIONS.items()}

_CODE: Final = re.compile(r"```.*?```|``[^`]*``|`[^`]*`|<a id=[^>]*>|(?<=\])\([^)\s]*\)", re.DOTALL)
"""Code, anchors and the targets of links: no text to check."""

_SENTENCE_END: Final = re.compile(r"(?<=[.!?:;])[\"')\]]*\s+|\n\s*\n|\n\s*(?:[-*|>#]|\d+\.)\s|\s*\|\s*|\n {4,}|<br>")
_DIRECTIVE: Final = ("# noqa", "# type:", "# pragma", "#!")


@dataclass(frozen=True)
class Text:
    """One text of a file: its line, its words, and whether the rules for sentences apply to it."""

    line: int
    text: str
    is_prose: bool


@dataclass(frozen=True)
class Finding:
    """One place to rewrite: path, line, the matched text and the advice."""

    path: str
    line: int
    match: str
    advice: str

    def __str__(self) -> str:
        """Return the finding as `path:line: text: advice`."""
        return f"{self.path}:{self.line}: {self.match!r}: {self.advice}"


def texts_of_python(source: str, *, has_user_text: bool) -> Iterator[Text]:
    """Yield docstrings, comments and test names, and with `has_user_text` also strings of at least three words."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2:
            is_docstring = id(node) in statements
            if is_docstring or has_user_text:
                yield Text(node.lineno, node.value, is_prose=is_docstring)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield Text(node.lineno, node.name.replace("_", " "), is_prose=False)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(_DIRECTIVE):
            yield Text(token.start[0], token.string.lstrip("# "), is_prose=True)


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the texts of a Python file or a Markdown page; code in Markdown is left out."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from texts_of_python(source, has_user_text="tests" not in path.parts)
    else:
        yield Text(1, _CODE.sub(lambda code: "x" + "\n" * code.group().count("\n"), source), is_prose=True)


def findings_in(path: Path) -> Iterator[Finding]:
    """Yield each expression, long sentence and long test name of the file."""
    name = path.resolve().relative_to(ROOT).as_posix() if path.resolve().is_relative_to(ROOT) else str(path)
    for text in texts_of(path):
        for advice, pattern in PATTERNS.items():
            for match in pattern.finditer(_CODE.sub(lambda code: "x" * len(code.group()), text.text)):
                line = text.line + text.text[: match.start()].count("\n")
                yield Finding(name, line, match.group().strip(), f"use {advice}")
        if text.is_prose:
            for sentence in _SENTENCE_END.split(_CODE.sub("x", text.text)):
                words = sentence.split()
                if len(words) > MOST_WORDS:
                    yield Finding(name, text.line, " ".join(words[:6]), f"split this sentence of {len(words)} words")
    if path.suffix == ".py":
        for match in re.finditer(r"def (test_\w+)", path.read_text(encoding="utf-8")):
            if len(match[1]) > MOST_NAME_CHARACTERS:
                yield Finding(name, 1, match[1], f"shorten the name to {MOST_NAME_CHARACTERS} characters")


def main(arguments: Sequence[str]) -> int:
    """Check the given paths, or all tracked files; print the findings and return the exit status."""
    paths = [file for name in arguments for file in _files_of(Path(name))] if arguments else _tracked_files()
    exceptions = json.loads(EXCEPTIONS.read_text()) if EXCEPTIONS.exists() else []
    used = set()
    count = 0
    for path in paths:
        for finding in findings_in(path):
            index = next((i for i, one in enumerate(exceptions) if _is_excepted(finding, one)), None)
            if index is None:
                count += 1
                print(finding)
            used.add(index)
    if not arguments:
        unused = [one for index, one in enumerate(exceptions) if index not in used]
        for one in unused:
            print(f"{EXCEPTIONS.name}: matches nothing, remove it: {one}")
        if len(exceptions) > MOST_EXCEPTIONS:
            print(f"{EXCEPTIONS.name}: {len(exceptions)} exceptions, at most {MOST_EXCEPTIONS} are allowed")
        count += len(unused) + max(0, len(exceptions) - MOST_EXCEPTIONS)
    return 1 if count else 0


def _is_excepted(finding: Finding, exception: dict[str, str]) -> bool:
    return finding.path == exception["path"] and finding.match == exception["match"]


def _files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*.py")) + sorted(path.rglob("*.md"))


def _tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py", "*.md"],  # noqa: S607 - git of the developer's PATH
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    this = Path(__file__).resolve()
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name) != this and (ROOT / name).exists()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
