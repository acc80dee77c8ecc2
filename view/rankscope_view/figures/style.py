"""Colours, fonts and shared parts of all figures, and the function that saves a figure."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.patheffects import withStroke
from matplotlib.transforms import ScaledTranslation

INK, SOFT, FAINT, GRID, LINE = "#14181d", "#454d57", "#626b76", "#eceef1", "#c9ced5"
BLUE, ORANGE, GREEN, PURPLE, OLIVE, GREY = "#0068a8", "#c24e00", "#00795a", "#a8487f", "#5a4a00", "#57606b"
RAW, RED, NAN, INF, ABSENT = "#5a97c6", "#bb241d", "#e5308a", "#ff8ac4", "#f1f3f5"
SERIES: Final = (BLUE, ORANGE, GREEN, PURPLE, OLIVE, GREY)
"""Colours of series, after Okabe and Ito: they differ for people with each kind of colour blindness."""

DASHES: Final = ("-", (0, (7, 2)), (0, (2, 1.5)), (0, (8, 2, 2, 2)))
"""Line styles of series, so that colour is never the only difference."""

HALO: Final = withStroke(linewidth=3, foreground="white")
"""White contour of texts, so that they can be read on a curve."""

FORMATS: Final = ("png", "svg", "pdf")
DPI: Final = 300

_FONTS: Final = ("Inter", "Segoe UI", "Roboto", "Noto Sans", "Helvetica Neue", "Arial", "DejaVu Sans")
_FURTHER_FONTS: Final = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei"),
    *("Microsoft YaHei", "SimHei", "PingFang SC", "Arial Unicode MS"),
)
"""Fonts with Chinese characters; matplotlib uses the first installed one for characters that the font lacks."""


def _fonts() -> list[str]:
    """Return the installed fonts in the order of preference, because matplotlib warns about each missing one."""
    installed = {font.name for font in fontManager.ttflist}
    return [name for name in (*_FONTS, *_FURTHER_FONTS) if name in installed] or ["sans-serif"]


@contextmanager
def style(size: float = 9.0) -> Iterator[None]:
    """Apply the style of all figures, with text of `size` points."""
    settings: Any = {  # matplotlib's types list every key since release 3.11
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.w_pad": 0.1,
        "figure.constrained_layout.h_pad": 0.08,
        "font.family": _fonts(),
        "font.size": size,
        "text.color": INK,
        "axes.titlesize": size * 1.12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 8,
        "axes.labelsize": size,
        "axes.labelcolor": SOFT,
        "axes.edgecolor": LINE,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
        "lines.linewidth": 1.4,
        "lines.solid_capstyle": "round",
        "legend.frameon": True,
        "legend.framealpha": 0.92,
        "legend.edgecolor": "none",
        "legend.fontsize": size * 0.94,
        "legend.handlelength": 1.6,
        "svg.fonttype": "none",
        "svg.hashsalt": "rankscope",
        "pdf.fonttype": 42,
        "agg.path.chunksize": 20_000,
    }
    with mpl.rc_context(settings), warnings.catch_warnings(), np.errstate(over="ignore"):
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` × `height` inches with a canvas that needs no display."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path, *, dpi: float = DPI) -> None:
    """Write `figure` to `path` in the format of its suffix: png, svg or pdf. A bitmap has `dpi` pixels per inch."""
    with style():
        figure.savefig(path, dpi=dpi, bbox_inches="tight", pad_inches=0.15)


def head(figure: Figure, name: str, note: str = "") -> None:
    """Write the name of the run at the upper left, and a note at the upper right."""
    figure.suptitle(shown(name), x=0.012, ha="left", fontsize="x-large", fontweight="bold")
    if note:
        figure.text(0.988, 0.985, shown(note), ha="right", va="top", fontsize="small", color=FAINT)


def shown(text: str) -> str:
    """Return `text` for matplotlib: control characters as escape sequences, and without mathematical notation."""
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return escaped.replace("$", r"\$")


def note(axes: Axes, text: str) -> None:
    """Write unit and remarks of a panel at the right of its title."""
    axes.set_title(shown(text), loc="right", fontsize="small", color=FAINT, fontweight="normal")


def beside(
    axes: Axes, text: str, x: float, height: float, *, color: str, has_halo: bool = True, is_left: bool = False
) -> None:
    """Write `text` right or left of the place `x` of the axis, at a `height` from 0 to 1 of the panel."""
    axes.annotate(
        shown(text), (x, height), xycoords=("data", "axes fraction"), xytext=(-4 if is_left else 4, 0),
        textcoords="offset points", ha="right" if is_left else "left", color=color, fontsize="small", va="center",
        annotation_clip=False, path_effects=[HALO] if has_halo else None,
    )  # fmt: skip


def legend_below(axes: Axes, entries: Mapping[str, Artist] | None = None) -> None:
    """Place the legend below the panel, where it covers no mark. `entries` are those of two axes, by label."""
    handles, labels = axes.get_legend_handles_labels()
    named = entries or dict(zip(labels, handles, strict=True))
    points = 34 if axes.xaxis.get_tick_params()["labelbottom"] else 6  # below the labels of the axis
    offset = ScaledTranslation(0, -points / 72, axes.figure.dpi_scale_trans)
    axes.legend(
        list(named.values()), list(named), loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=0, ncols=3,
        bbox_transform=axes.transAxes + offset, frameon=False,
    )  # fmt: skip


def foot(figure: Figure, text: str) -> None:
    """Write a remark below all panels, such as the reduction of the curves."""
    figure.supxlabel("\n".join(map(shown, text.splitlines())), x=0.012, ha="left", fontsize="small", color=FAINT)


def notices(figure: Figure) -> list[str]:
    """Return the texts of the panels of `figure` if no panel has data; otherwise an empty list."""
    texts = [str(axes.get_label()) for axes in figure.axes]
    return list(dict.fromkeys(texts)) if all(texts) else []


def show_nothing(axes: Axes, text: str) -> None:
    """Show a panel without data: the reason in its middle, and as the label of `axes` for `notices`."""
    axes.set_label(text)
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, shown(text), transform=axes.transAxes, ha="center", va="center", color=FAINT)


def scientific(value: float, _: float | None = None) -> str:
    """Return a tick label such as `1.75e-4`: a rounded label would be wrong."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
