"""Which commit the training script is at, read from git's own files: no program is run, nothing is waited for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_SHA: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_LONGEST_CHAIN: Final = 5
"""References that name references; git itself follows as many."""


def git_commit(place: Path) -> str | None:
    """Return the commit checked out around `place`, a file or folder; None outside a repository, or if unclear."""
    try:
        start = place.resolve()
        for folder in (start, *start.parents):
            if (folder / ".git").exists():
                return _head(_git_folder(folder / ".git"))
    except (OSError, ValueError, RuntimeError):  # unreadable, gone meanwhile, not text, links in a circle
        return None
    return None


def script_commit(script: str) -> str | None:
    """Return the commit around `script`, else, as of a launcher installed elsewhere, around the working directory."""
    return git_commit(Path(script)) or git_commit(Path())


def _git_folder(dot_git: Path) -> Path:
    """Return the folder behind `.git`, which is a file in worktrees and submodules."""
    if dot_git.is_dir():
        return dot_git
    return (dot_git.parent / dot_git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).resolve()


def _head(git: Path) -> str | None:
    common = git / "commondir"
    shared = (git / common.read_text(encoding="utf-8").strip()).resolve() if common.exists() else git
    text = _line(git / "HEAD")
    for _ in range(_LONGEST_CHAIN):
        if text is None or _SHA.fullmatch(text):
            return text
        name = text.removeprefix("ref:").strip()
        text = _line(git / name) or _line(shared / name) or _packed(shared, name)
    return None


def _line(path: Path) -> str | None:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _packed(shared: Path, name: str) -> str | None:
    for line in (_line(shared / "packed-refs") or "").splitlines():
        sha, _, reference = line.partition(" ")
        if reference == name:
            return sha
    return None
