"""A file or folder that appears under its name only when it is whole."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from rankscope_storage.errors import ExportError


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Give a folder to write into; at the end its files move below `target`, over files of the same names.

    Raises ExportError for whatever the file system refuses, inside too; then nothing of it is left.
    """
    with _explained(target):
        staged = _beside(target)
        try:
            staged.mkdir(parents=True)
            yield staged
            for file in files_below(staged):
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                (staged / file).replace(target / file)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


@contextlib.contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Give the name of a file to write; at the end it takes the place of `target`. Errors as in `staged_folder`."""
    if target.is_dir():
        raise ExportError(f"{target} is a folder: name a file")
    with _explained(target):
        staged = _beside(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            yield staged
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)


def files_below(folder: Path) -> list[Path]:
    """Return the paths of all files below `folder`, relative to it, sorted."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def _beside(target: Path) -> Path:
    return target.absolute().parent / f".{target.name}.{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"cannot write to {target}: {error.strerror or error}") from error
