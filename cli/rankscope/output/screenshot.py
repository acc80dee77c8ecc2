"""Picture of a complete HTML page, taken by headless Chromium."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from rankscope.base.errors import CommandError

WIDTH: Final = 1480
_LEAST_HEIGHT: Final = 400
_MOST_HEIGHT: Final = 16_000
"""Chromium draws at most 16,384 pixels in one direction."""

_SECONDS: Final = 60.0
_OPTIONS: Final = (
    "--headless=new",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--virtual-time-budget=4000",
)
_HEIGHT: Final = re.compile(r"<title>height (\d+)</title>")


def chromium() -> str:
    """Return the path of Chromium. Raises CommandError if it is not on PATH."""
    path = shutil.which("chromium")
    if path is None:
        raise CommandError("a PNG needs the program chromium, which is not on PATH: install it, or write a .html file")
    return path


def write_picture(program: str, html: str, path: Path) -> None:
    """Write a PNG of the whole page `html`, which writes its height into its title. Raises CommandError."""
    with tempfile.TemporaryDirectory(prefix="rankscope-preview-") as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        page.write_text(html, encoding="utf-8")
        measured = _HEIGHT.search(_run(program, folder, page, _LEAST_HEIGHT, "--dump-dom"))
        height = min(int(measured[1]) if measured else _MOST_HEIGHT, _MOST_HEIGHT)
        _run(program, folder, page, height, f"--screenshot={picture}")
        if not picture.exists():
            raise CommandError(f"{program} has made no picture: write a .html file")
        path.write_bytes(picture.read_bytes())


def _run(program: str, folder: str, page: Path, height: int, option: str) -> str:
    """Run Chromium on `page` and return its standard output."""
    # Chromium refuses its sandbox for root. The page is our own file, and its policy permits no request.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    size = f"--window-size={WIDTH},{height}"
    command = [program, *_OPTIONS, *sandbox, f"--user-data-dir={folder}/profile", size, option, page.as_uri()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"{program} failed: {error}: write a .html file") from error
    if done.returncode != 0:
        raise CommandError(f"{program} failed with status {done.returncode}: write a .html file")
    return done.stdout
