"""Preview of a Grafana board: the data that the boards describe, drawn with the charts of the pages.

A headless Chromium takes the picture of a complete HTML page.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankscope.base.errors import USAGE, CommandError
from rankscope.base.http_client import UnreachableError, get
from rankscope.base.options import STANDARD_OUTPUT, output_file
from rankscope.base.service_settings import environment_tls
from rankscope_dashboards.preview.board import BoardContent, Mark, read_board, read_content, run_window
from rankscope_dashboards.preview.panels import Curves, Panel, States
from rankscope_dashboards.preview.prometheus import PreviewError, Prometheus, Window
from rankscope_dashboards.preview.tables import Table
from rankscope_view.pages.board import board_panel, cell_table, chart, empty, latest_values, state_rows
from rankscope_view.preview import HEIGHT_SCRIPT, Preview, chart_name, preview, time_curve

if TYPE_CHECKING:
    from rankscope_view.data.curves import Curve

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


QUERY_SECONDS: Final = 30.0
"""Longest time in seconds for one query. Prometheus has a limit of two minutes by default."""

_PREFIX: Final = "Rankscope · "
_LAST_HOUR: Final = 3600.0
_GROUPS: Final = {"Incidents": "incident", "Checkpoints": "checkpoint", "Restarts": "restart"}
"""Markers of a chart by the annotation of a board. Other annotations are not drawn."""

_RELATIVE: Final = re.compile(r"now(?:-(\d{1,9})([smhdw]))?")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

_Drawn = list[tuple["Curve", list[tuple[str, float, bool]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewChoice:
    """The board and the data that a preview shows. Without `start` and `end`, the range is that of the run."""

    tree: Path
    board: str
    prometheus_url: str
    variables: Mapping[str, Sequence[str]]
    start: float | None = None  # UTC seconds
    end: float | None = None


def write_preview(choice: PreviewChoice, path: Path, now: float) -> None:
    """Write a preview to `path`, as HTML or as PNG by its suffix; to standard output as HTML if `path` is `-`.

    `now` is in UTC seconds. Raises CommandError.
    """
    suffix = ".html" if path == STANDARD_OUTPUT else path.suffix.lower()
    if suffix not in {".html", ".png"}:
        raise CommandError(f"--output {path}: name a file with the suffix html or png", code=USAGE)
    program = chromium() if suffix == ".png" else ""
    html = preview_html(choice, now, scripts=[HEIGHT_SCRIPT] if program else [])
    with output_file(path) as file:
        file.parent.mkdir(parents=True, exist_ok=True)
        if program:
            write_picture(program, html, file)
        else:
            file.write_text(html, encoding="utf-8", errors="replace")


def preview_html(choice: PreviewChoice, now: float, *, scripts: Sequence[str] = ()) -> str:
    """Return a preview as HTML, with additional `scripts`. Raises CommandError if it cannot be made."""
    try:
        board = read_board(choice.tree, choice.board)
        prometheus = Prometheus(_fetch(choice.prometheus_url.rstrip("/")))
        content = read_content(board, prometheus, _window(choice, prometheus, now), choice.variables)
    except PreviewError as error:
        raise CommandError(str(error)) from error
    return preview(_drawn(content, choice), made_at=now, scripts=scripts).html


def _fetch(base: str) -> Any:
    """Return a function that requests a path from Prometheus at the address `base`."""

    def fetch(path: str) -> Any:
        try:
            response = get(base + path, timeout_seconds=QUERY_SECONDS, client_tls=environment_tls())
        except UnreachableError as error:
            reason = str(error).removeprefix(f"{base}{path}: ")
            remedy = "start it with rankscope up, or name its address with --prometheus-url"
            raise PreviewError(f"Prometheus at {base} does not answer ({reason}): {remedy}") from error
        document = response.json()
        if not isinstance(document, dict) or "status" not in document:
            raise PreviewError(f"the answer of {base} is not from Prometheus (status {response.status})")
        return document

    return fetch


def _window(choice: PreviewChoice, prometheus: Prometheus, now: float) -> Window:
    runs = choice.variables.get("run", ())
    known = None
    if len(runs) == 1 and choice.start is None and choice.end is None:
        known = run_window(prometheus, runs[0], now)
    end = choice.end if choice.end is not None else now
    window = known or Window(start=choice.start if choice.start is not None else end - _LAST_HOUR, end=end)
    if window.seconds <= 0:
        raise CommandError("--from is not before --to: the time range is empty", code=USAGE)
    return window


def _drawn(content: BoardContent, choice: PreviewChoice) -> Preview:
    curves: _Drawn = []
    rows = [
        (row.title, "folded in Grafana" if row.is_folded else "", [_panel(one, content, curves) for one in row.panels])
        for row in content.rows
    ]
    facts = [(name, _shown(value)) for name, value in content.variables.items()]
    return Preview(
        title=content.title.removeprefix(_PREFIX),
        start=content.window.start,
        end=content.window.end,
        facts=[*facts, ("Prometheus", choice.prometheus_url)],
        notices=[f"Warning of Prometheus: {one}" for one in content.warnings],
        rows=rows,
        curves=curves,
    )


def _shown(value: str) -> str:
    return {".+": "All", ".*": "All", "": "none"}.get(value, value)


def _panel(panel: Panel, content: BoardContent, curves: _Drawn) -> str:
    """Return a panel as HTML, and add its curve to `curves`."""
    body, unit = empty(panel.empty), ""
    if isinstance(found := panel.body, Curves):
        curve = _curve(panel, found, content)
        curves.append((curve, [_marker(one) for one in content.marks if one.kind in _GROUPS]))
        body = chart(curve, is_logarithmic=found.is_logarithmic, has_zero=found.has_zero, width=panel.width)
        unit = found.unit
    elif isinstance(found, States):
        body = state_rows(found.rows, found.key, content.window.start, content.window.end)
    elif isinstance(found, Table):
        body = cell_table(found.headings, found.rows)
    elif found is not None:
        body = latest_values((one.name, one.cell, one.share) for one in found)
    return board_panel(
        panel.title, body, unit=unit, description=panel.description, width=panel.width, notes=panel.notes
    )


def _curve(panel: Panel, body: Curves, content: BoardContent) -> Curve:
    return time_curve(
        chart_name(panel.title),
        [(name, series.times, series.values) for name, series in body.lines],
        window=(content.window.start, content.window.end),
        step=body.step,
        restarts=[one.time for one in content.marks if one.kind == "Restarts"],
    )


def _marker(mark: Mark) -> tuple[str, float, bool]:
    return _GROUPS[mark.kind], mark.time, mark.kind == "Incidents"


def chosen_variables(run: Sequence[str], others: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of variables by name, from `--run` and from `--var NAME=VALUE`. Raises CommandError."""
    found: dict[str, list[str]] = {"run": list(run)} if run else {}
    for one in others:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise CommandError(f"--var {one}: write it as NAME=VALUE, such as rank=0", code=USAGE)
        found.setdefault(name, []).append(value)
    return found


def parse_time(option: str, word: str, now: float) -> float:
    """Return the UTC seconds of a time in ISO 8601, or of `now` and `now-6h`. Raises CommandError with the option.

    A time without an offset is in UTC.
    """
    if found := _RELATIVE.fullmatch(word):
        return now - (int(found[1]) * _UNITS[found[2]] if found[1] else 0)
    try:
        given = dt.datetime.fromisoformat(word)
    except ValueError as error:
        text = f"{option} {word}: write 2026-03-01T12:00 in UTC, now, or now-6h with one of s, m, h, d and w"
        raise CommandError(text, code=USAGE) from error
    return (given if given.tzinfo else given.replace(tzinfo=dt.UTC)).timestamp()
