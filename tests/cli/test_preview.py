"""`rankscope dashboards preview` on a real Prometheus with the series of one run."""

import json
import re
import subprocess
from collections.abc import Callable
from functools import partial

import pytest
from tests.end_to_end.lives import until
from tests.view.test_site import Reader

from rankscope.base.errors import CommandError
from rankscope.output.board_preview import parse_time

START = 1_772_366_400  # 2026-03-01 12:00 UTC
STEPS, SECONDS = 40, 15
END = START + SECONDS * (STEPS - 1)
OF_RANKS: dict[str, Callable[[int], object]] = {
    "rankscope_step": lambda step: step,
    'rankscope_loss{loss="lm"}': lambda step: "NaN" if step == 20 else 5 - step / 10,
    'rankscope_learning_rate{group="0"}': lambda _: 6e-5,
}
OF_THE_SERVICE = {
    'rankscope_run_state{state="completed"}': 1,
    "rankscope_run_start_timestamp_seconds": START,
    "rankscope_run_last_step_timestamp_seconds": END,
}


def sample(series, labels, value, at):
    name, _, own = series.partition("{")
    return f"{name}{{{labels}{',' if own else '}'}{own} {value} {at}"


def open_metrics():
    lines = []
    for series, value in OF_RANKS.items():
        lines.append(f"# TYPE {series.partition('{')[0]} gauge")
        for rank in (0, 1):
            labels = f'job="rankscope",run="my-run",rank="{rank}"'
            lines += [sample(series, labels, value(step), START + SECONDS * step) for step in range(STEPS)]
    for series, value in OF_THE_SERVICE.items():
        lines.append(f"# TYPE {series.partition('{')[0]} gauge")
        lines.append(sample(series, 'job="rankscope-service",run="my-run"', value, END))
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def prometheus(require_server, tmp_path_factory):
    """Yield the address of a Prometheus that has the series of the run, and scrapes nothing."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "series.txt").write_text(open_metrics(), encoding="utf-8")
    (folder / "prometheus.yml").write_text("{}", encoding="utf-8")
    promtool, program = require_server("promtool", "prometheus"), require_server("prometheus")
    create = [promtool, "tsdb", "create-blocks-from", "openmetrics", "series.txt", "data"]
    subprocess.run(create, cwd=folder, check=True, capture_output=True)
    options = ["--storage.tsdb.path=data", "--storage.tsdb.retention.time=100y", "--web.listen-address=127.0.0.1:0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *options], cwd=folder, stdout=log, stderr=log)
    text = partial((folder / "log").read_text, errors="replace")
    try:
        until(lambda: "Server is ready to receive web requests" in text(), 30, text)
        yield "http://" + re.search(r'msg="Listening on" address=(\S+)', text())[1]
    finally:
        process.kill()
        process.wait(20)


@pytest.fixture
def preview(in_process, prometheus, tmp_path):
    """Return a function that runs the command on a board, and returns the process and the path of the file."""

    def run(board, *arguments, suffix="html"):
        path = tmp_path / "new" / f"{board}.{suffix}"
        return in_process("dashboards", "preview", board, "--prometheus-url", prometheus, "-o", path, *arguments), path

    return run


def test_board_is_drawn_for_the_range_of_the_run(preview):
    done, path = preview("run_overview", "--run", "my-run")
    html = path.read_text(encoding="utf-8")
    found = Reader(html)

    assert (0, "") == (done.returncode, done.stderr)
    assert f"preview of run_overview: {path.as_uri()}" == done.stdout.strip()
    for text in ("Preview, not Grafana", "completed", "1.10", "No data, see (i)", "folded in Grafana"):
        assert text in found.text, text
    assert "2026-03-01 12:00:00 to 2026-03-01 12:09:45 UTC" in found.text
    curves = json.loads(re.search(r'id="curves">(.*?)</script>', html, re.DOTALL)[1], parse_constant=pytest.fail)
    highest, *_ = curves["time"]["loss"]["lines"]
    assert ("lm highest", START, 5) == (highest["label"], highest["x"][0], highest["value"][0])
    assert [[START + SECONDS * 20, START + SECONDS * 20 + 10, "NaN"]] == curves["time"]["loss"]["nonfinite"][:1]


def test_file_refers_to_nothing_outside_of_itself(preview):
    _, path = preview("runs", "--run", "my-run")

    for _, attributes in Reader(path.read_text(encoding="utf-8")).elements:
        assert not any(name == "style" or name.startswith("on") for name in attributes)
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))


@pytest.mark.thorough
def test_picture_shows_the_whole_board(preview, require_server):
    require_server("chromium")
    done, path = preview("runs", "--run", "my-run", suffix="png")
    picture = path.read_bytes()

    assert 0 == done.returncode, done.stderr
    assert b"\x89PNG" == picture[:4]
    width, height = (int.from_bytes(picture[at : at + 4]) for at in (16, 20))
    assert width == 1480
    assert 700 < height < 2000


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing"], 1, "there is no board 'nothing': the boards are incidents, pipeline, ranks, run_overview, runs"),
        (["ranks", "--run", "gone"], 1, "unknown run 'gone' in the time range: Prometheus has none"),
        (["ranks", "--run", "my-run", "--var", "rank"], 2, "write it as NAME=VALUE"),
        (["ranks", "--from", "yesterday"], 2, "--from yesterday: write 2026-03-01T12:00 in UTC, now, or now-6h"),
        (["ranks", "--from", "now", "--to", "now-1h"], 2, "--from is not before --to"),
        (
            ["ranks", "--run", "gone", "--from", "2026-03-01T12:00", "--to", "2026-03-01T14:00+01:00"],
            1,
            "unknown run 'gone' in the time range: choose one of my-run",
        ),
        (
            ["ranks", "--prometheus-url", "http://127.0.0.1:9"],
            1,
            "Prometheus at http://127.0.0.1:9 does not answer (Connection refused): start it",
        ),
    ],
)
def test_preview_that_cannot_be_made_is_one_line(preview, arguments, code, message):
    done, path = preview(*arguments)

    assert code == done.returncode
    assert message in done.stderr
    assert 1 == len(done.stderr.splitlines())
    assert not path.exists()


def test_picture_without_chromium_recommends_html(preview, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done, path = preview("ranks", "--run", "my-run", suffix="png")

    assert "a PNG needs the program chromium, which is not on PATH: install it, or write a .html file" in done.stderr
    assert not path.exists()


@pytest.mark.parametrize(
    ("word", "seconds"),
    [("now", 1000.0), ("now-5m", 700.0), ("1970-01-01T00:10", 600.0), ("1970-01-01T01:10+01:00", 600.0)],
)
def test_times_are_relative_or_in_utc(word, seconds):
    assert seconds == parse_time("--from", word, 1000.0)


def test_time_in_another_form_is_rejected():
    with pytest.raises(CommandError, match="one of s, m, h, d and w"):
        parse_time("--to", "now+1h", 1000.0)
