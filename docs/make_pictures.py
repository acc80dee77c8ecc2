"""Make all pictures of the documentation: `make pictures`. Needs Chromium.

The demo runs first, so that the pictures of its run are those of the present release. The other pages show the
synthetic store of the tests of pages. `draw_figures.py` draws the figures.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import draw_figures
import numpy as np
from PIL import Image
from tests.view.browser import Browser, browser
from tests.view.served import served
from tests.view.training import MAIN, START, Size, write_store

from rankscope_storage.connection import connect
from rankscope_view.report import report
from rankscope_view.site import Site

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "docs" / "pictures"
LARGEST_BYTES: Final = 300_000
EXACT_COLOURS: Final = 64
NOW: Final = START / 1e6 + 6865
SIZE: Final = Size(ranks=16, layers=16, steps=850)
WIDE: Final = 1440
NARROW: Final = 420
_RUN: Final = f"/runs/{MAIN}"
_WITHOUT_PATHS: Final = r"""
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const { data } = walker.currentNode;
  walker.currentNode.data = data.replace(/\/\S*?\/store\b/g, "history").replace(/\/\S*\/examples\//g, "examples/");
}
"""
"""Script that replaces the folders of this machine by those of a reader."""

_TENSOR: Final = "layers.8.mlp.down_proj.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture: its name, the address of the page, and the size of the window. The themes are its endings."""

    name: str
    address: str
    height: int
    width: int = WIDE
    themes: Sequence[str] = ("light", "dark")
    is_of_demo: bool = False

    def files(self) -> dict[str, str]:
        """Return the theme of each file. A picture in one theme has no ending."""
        if len(self.themes) == 1:
            return {f"{self.name}.png": self.themes[0]}
        return {f"{self.name}-{theme}.png": theme for theme in self.themes}


PICTURES: Final = (
    Picture(name="demo", address="/runs/demo", height=1210, is_of_demo=True),
    Picture(name="runs", address="/", height=760),
    Picture(name="run", address=f"{_RUN}?axis=arrival", height=1040),
    Picture(name="tensors", address=f"{_RUN}/tensors?tensor={_TENSOR}", height=1000),
    Picture(name="ranks", address=f"{_RUN}/ranks", height=1120),
    Picture(name="incident", address=f"{_RUN}/incidents/a1", height=1100),
    Picture(name="compare", address=f"/compare?a={MAIN}&b=llama-8b-dpo-b0.1", height=1000),
    Picture(name="report", address="report.html", height=1500, width=1100),
    Picture(name="runs-narrow", address="/", height=1150, width=NARROW, themes=("light",)),
    Picture(name="run-narrow", address=f"{_RUN}?axis=arrival", height=1500, width=NARROW, themes=("dark",)),
)


def take(shown: Browser, picture: Picture, base: str) -> Iterator[Path]:
    """Write the files of `picture`, whose page is below the address `base`. Yield their paths."""
    for name, theme in picture.files().items():
        shown.look(picture.width, picture.height, theme)
        shown.open(base + picture.address)
        shown.drain(2.0)  # charts are drawn after the data have arrived
        shown.run(_WITHOUT_PATHS)
        path = FOLDER / name
        path.write_bytes(small(shown.picture()))
        yield path
    assert not shown.problems, shown.problems


def small(picture: bytes) -> bytes:
    """Return a PNG with 256 colours, which a page of text and lines does not need more of.

    The most frequent colours, such as those of backgrounds, remain exact.
    """
    with Image.open(io.BytesIO(picture)) as opened:
        image = opened.convert("RGB")
    frequent = sorted(image.getcolors(image.width * image.height) or (), reverse=True)[:EXACT_COLOURS]
    # This method keeps rare colours, such as those of marks; a median cut would make them brown.
    covered = image.quantize(256 - EXACT_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    palette = np.array([value for _, colour in frequent for value in colour] + (covered.getpalette() or []), np.int32)
    palette = palette[: 3 * 256].reshape(-1, 3)
    colours, numbers = np.unique(np.asarray(image, np.int32).reshape(-1, 3), axis=0, return_inverse=True)
    nearest = np.array([((palette - colour) ** 2).sum(axis=1).argmin() for colour in colours], np.uint8)
    reduced = Image.fromarray(nearest[numbers.reshape(image.height, image.width)], "P")
    reduced.putpalette(palette.astype(np.uint8).tobytes())
    file = io.BytesIO()
    reduced.save(file, "PNG", optimize=True)
    assert file.tell() < LARGEST_BYTES, f"{file.tell():,} bytes"
    return file.getvalue()


def run_demo(folder: Path) -> Path:
    """Run the demo in `folder`, and return its store."""
    subprocess.run([sys.executable, "-m", "rankscope", "demo", "--folder", str(folder)], check=True)  # noqa: S603
    return folder / "history"


def main() -> None:
    """Make all pictures, or those whose names are arguments."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("make pictures needs Chromium: apt-get install chromium")
    chosen = [one for one in PICTURES if not sys.argv[1:] or one.name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_store(folder / "store", SIZE)
        with connect(folder / "store") as connection:
            found = report(connection, MAIN, made_at=NOW, source="history")
        assert found is not None
        (folder / "report.html").write_text(found, encoding="utf-8")
        stores = {False: Site(folder / "store", clock=lambda: NOW)}
        if any(one.is_of_demo for one in chosen):
            stores[True] = Site(run_demo(folder / "demo"))
        for is_of_demo, site in stores.items():
            own = [one for one in chosen if one.is_of_demo is is_of_demo]
            with served(site) as address, browser(program, folder / f"profile{is_of_demo:d}") as shown:
                for picture in own:
                    base = f"{folder.as_uri()}/" if picture.name == "report" else address
                    for path in take(shown, picture, base):
                        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    if not sys.argv[1:]:
        draw_figures.draw(FOLDER)


if __name__ == "__main__":
    main()
