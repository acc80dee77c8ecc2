"""Comments in JSON, `//` to the end of the line and `/* … */`, are blanked before it is read. Pure.

What is left has the length and the lines of the original, so that a parser's complaint points to the right place.
"""

from __future__ import annotations

import re
from typing import Final

# A string first: what looks like a comment inside of one is none.
_STRING_OR_COMMENT: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_VISIBLE: Final = re.compile(r"[^\r\n]")


def without_comments(text: str) -> str:
    """Return `text` with blanks in the place of comments; one that has no end stays, for the parser to refuse."""
    return _STRING_OR_COMMENT.sub(_kept, text)


def _kept(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else _VISIBLE.sub(" ", found[0])
