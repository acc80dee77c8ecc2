"""Show the page of the demo's run at its end: in a browser of the desktop, or as an address."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console


def has_desktop(environment: Mapping[str, str], platform: str) -> bool:
    """Return whether a browser with a window can be opened for the user of this terminal."""
    if environment.get("SSH_CONNECTION") or environment.get("CI"):
        return False
    return platform == "darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def show_page(
    console: Console,
    page: Path,
    store: Path,
    *,
    environment: Mapping[str, str] = os.environ,
    platform: str = sys.platform,
    open_browser: Callable[[str], bool] = webbrowser.open,
) -> None:
    """Print the address of `page` and the command that shows all pages, and open the page on a desktop."""
    address = page.absolute().as_uri()
    console.print(f"Page of the run:  {address}", markup=False, soft_wrap=True)
    console.print(f"All pages:        rankscope view {store}", markup=False, soft_wrap=True)
    if console.is_terminal and has_desktop(environment, platform):
        open_browser(address)
