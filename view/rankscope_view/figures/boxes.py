"""Utilisation of each GPU as a box plot, hosts side by side. A GPU without data has no box but a note."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankscope_view.data.speed import Gpu, Utilization
from rankscope_view.figures import style
from rankscope_view.pages.format import count

MOST_GPUS: Final = 64
"""Largest number of boxes in a figure. Of more GPUs, those with the lowest and highest medians are shown."""

_HEIGHT: Final = 4.4
_OUTLIER: Final = 0.1
"""Distance from the median of all medians above which a box is coloured."""

_TOP: Final = 112.0
"""Upper limit of the axis in per cent; the names of the hosts are above 100."""

_WIDTH: Final = 0.58
_BOX, _OUTLYING_BOX = "#bcd9ee", "#f3c19c"


def gpu_boxes(run: str, found: Utilization | None) -> Figure:
    """Return the box plots of the GPUs of a run. An estimated utilisation has no samples, so it has no boxes."""
    gpus = () if found is None else found.gpus
    chosen = _chosen(gpus)
    with style.style():
        figure = style.new_figure(min(24.0, max(7.0, 0.42 * len(chosen) + 2.5)), _HEIGHT)
        axes: Axes = figure.subplots()
        style.head(figure, run)
        axes.set_title("GPU utilisation by rank" if any(gpu.rank is not None for gpu in gpus) else "GPU utilisation")
        if not chosen:
            estimate = "" if found is None else f": {100 * found.value:.0f} %, {found.words}"
            style.show_nothing(axes, f"no samples of the utilisation of the GPUs{estimate}")
            return figure
        _draw(axes, chosen)
        samples = [gpu.samples for gpu in chosen if gpu.samples]
        number = count(samples[0]) if len(set(samples)) == 1 else f"{count(min(samples))} to {count(max(samples))}"
        style.note(axes, f"{number} samples each · box 25–75 %, whiskers 5–95 %, dots: extremes")
        left_out = len(gpus) - len(chosen)
        more = f"; {count(left_out)} GPUs with medians in between are left out" if left_out else ""
        style.foot(figure, f"{'' if found is None else found.words}{more}")
    return figure


def _chosen(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs to show in their order: all, or those without data and with the most extreme medians."""
    if len(gpus) <= MOST_GPUS:
        return list(gpus)
    by_median = sorted(gpus, key=lambda gpu: (bool(gpu.samples), gpu.quantiles[2] if gpu.samples else 0.0))
    kept = {id(gpu) for gpu in (*by_median[: MOST_GPUS // 2], *by_median[-MOST_GPUS // 2 :])}
    return [gpu for gpu in gpus if id(gpu) in kept]


def _draw(axes: Axes, gpus: Sequence[Gpu]) -> None:
    medians = [gpu.quantiles[2] for gpu in gpus if gpu.samples]
    middle = float(np.median(medians)) if medians else 0.0
    drawn = [(at, gpu) for at, gpu in enumerate(gpus) if gpu.samples]
    width = min(_WIDTH, 0.07 * max(len(gpus), 2))
    boxes = axes.bxp(
        [_box(gpu) for _, gpu in drawn], positions=[at for at, _ in drawn], widths=width, patch_artist=True,
        flierprops={"marker": ".", "markersize": 4, "markeredgecolor": style.FAINT, "markerfacecolor": style.FAINT},
        medianprops={"color": style.INK, "linewidth": 1.3}, whiskerprops={"color": style.GREY},
        capprops={"color": style.GREY}, boxprops={"linewidth": 0.8, "edgecolor": style.GREY},
    )  # fmt: skip
    for patch, (at, gpu) in zip(boxes["boxes"], drawn, strict=True):
        is_outlying = len(medians) > 2 and abs(gpu.quantiles[2] - middle) > _OUTLIER
        patch.set_facecolor(_OUTLYING_BOX if is_outlying else _BOX)
        if is_outlying:
            patch.set_edgecolor(style.ORANGE)
            median = 100 * gpu.quantiles[2]
            style.beside(axes, f"{median:.0f} %", at + width / 2, median / _TOP, color=style.ORANGE)
    for at, gpu in enumerate(gpus):
        if not gpu.samples:
            axes.axvspan(at - 0.5, at + 0.5, facecolor="none", edgecolor=style.LINE, hatch="////", linewidth=0)
            background = {"facecolor": "white", "edgecolor": "none", "pad": 2}
            axes.text(at, 50, "no data", ha="center", va="center", rotation=90, color=style.FAINT, bbox=background)
    _label_hosts(axes, gpus)
    axes.set_xlim(-0.7, len(gpus) - 0.3)
    axes.set_ylim(0, _TOP)
    axes.set_yticks(range(0, 101, 20))
    axes.set_xticks(range(len(gpus)), [gpu.label for gpu in gpus])
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("rank" if gpus[0].rank is not None else "GPU")
    axes.set_ylabel("GPU busy, %")


def _box(gpu: Gpu) -> dict[str, Any]:
    low, lower, median, upper, high = (100 * value for value in gpu.quantiles)
    extremes = [100 * value for value in (gpu.lowest, gpu.highest) if value is not None]
    fliers = [value for value in extremes if not low <= value <= high]
    return {"med": median, "q1": lower, "q3": upper, "whislo": low, "whishi": high, "fliers": fliers}


def _label_hosts(axes: Axes, gpus: Sequence[Gpu]) -> None:
    """Name the hosts above their GPUs, with a line between hosts."""
    start = 0
    for host, members in itertools.groupby(gpus, key=lambda gpu: gpu.host):
        number = len(list(members))
        if start:
            axes.axvline(start - 0.5, color=style.LINE, linewidth=0.8)
        if host:
            axes.text(start + (number - 1) / 2, 106, host, ha="center", fontsize="small", color=style.FAINT)
        start += number
