"""The person's hour: everything that pages, commands and messages show is compared with the trainings' own files."""

import json
import math
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import _free_port
from tests.hour.hour import Hour, Look
from tests.hour.truth import Training

from rankscope_storage.connection import connect

LAG_SECONDS = 8.0  # Longest time between the end of a step and its place on a page that is open or loaded

COMMIT_SECONDS = 10.0  # Longest time between two commits of the service; lists read the store

RESULTS = Path(__file__).parents[2] / "hour-results"

UNTRUE = (  # Expressions that no page or summary may contain
    *(r"undefined", r"\[object", r"(=|: |rank |step )None\b", r"Infinity(?! )", r"NaN %", r"nan %"),
    *(r"\b1 times the median", r"rank unknown", r"at step (\d+) at step", r"Traceback", r"1e\+0\d %", r"\{\""),
    r"trend: (falling|rising) .* NaN",
)


@pytest.fixture(scope="module")
def hour(require_server) -> Iterator[Hour]:
    seed = int(os.environ.get("RANKSCOPE_HOUR_SEED") or random.randrange(10**6))
    print(f"seed {seed}: repeat this hour with make test-hour SEED={seed}; results in {RESULTS.name}")
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir()
    made = Hour(RESULTS, seed, _free_port(), require_server("chromium"))
    with made.stack:
        made.offline()
        made.start_service()
        made.live()
        made.afterwards()
        yield made


def lines(found: list[object]) -> str:
    return "\n".join(map(str, found))


def numbers(text: str) -> list[float]:
    return [
        float(found.replace(",", "")) for found in re.findall(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", text.replace("−", "-"))
    ]


def shows(text: str, value: float) -> bool:
    """Return whether `text` has `value` with at least three significant digits, or its word if it is not finite."""
    if math.isnan(value):
        return "nan" in text.lower()
    return any(math.isclose(found, value, rel_tol=6e-4, abs_tol=6e-7) for found in numbers(text))


def row_of(text: str, run: str, runs: list[str]) -> str:
    """Return the lines of a list about one run: each part from its name to the next name."""
    parts = re.split(f"({'|'.join(map(re.escape, runs))})", text)
    return "\n".join(after for name, after in zip(parts[1::2], parts[2::2], strict=True) if name == run)


def progress(text: str) -> tuple[int, int] | None:
    found = re.search(r"(\d[\d,]*) ?(?:/|of) ?(\d[\d,]*)", text)
    return (int(found[1].replace(",", "")), int(found[2].replace(",", ""))) if found else None


def span(look: Look, training: Training) -> tuple[int, int]:
    """Return the first and the last step that a look may show as the newest one."""
    lag = LAG_SECONDS + training.plan["seconds"] + (0.0 if look.run else COMMIT_SECONDS)
    return training.step_at(look.before - lag), training.step_at(look.after) + 1


def untrue_progress(look: Look, training: Training, text: str) -> str | None:
    """Return the error in the progress in `text`, the part of a look that is about `training`."""
    low, high = span(look, training)
    found = progress(text)
    if found is None:
        return None if low == 0 else f"no progress in {text[:80]!r}"
    step, total = found
    if total != training.plan["steps"] or not (low <= step <= high or training.plan.get("crash")):
        return f"{step} of {total} steps, was at {low} to {high} of {training.plan['steps']}"
    return None


def untrue_loss(look: Look, training: Training, text: str) -> str | None:
    losses = training.losses()
    low, high = span(look, training)
    if low == 0 or training.plan.get("crash"):
        return None
    near = [losses[step] for step in range(max(low - 1, 1), high + 1) if step in losses]
    if "1 of 2 ranks" in text:
        near = [row["loss"] for row in training.rows() if low - 1 <= row["step"] <= high]
    return None if any(shows(text, value) for value in near) else f"loss {text[:120]!r} is none of {near}"


def about(hour: Hour, *kinds: str) -> Iterator[tuple[Look, Training]]:
    """Yield the looks of some kinds, each with a training that they are about."""
    for look in hour.looks:
        if look.of.split(" ")[0].rstrip(",") in kinds:
            for name in hour.jobs:
                training = hour.trainings[name]
                if look.run in {None, training.run} and training.started < look.before:
                    yield look, training


def last(hour: Hour, of: str, run: str | None = None) -> Look:
    return [look for look in hour.looks if look.of == of and look.run == run][-1]


def test_no_page_or_command_has_an_error(hour):
    found = [(look.of, look.run, look.problems) for look in hour.looks if look.problems]

    assert "" == lines(found)


def test_no_look_contains_an_untrue_expression(hour):
    found = [
        (look.of, look.run, expression, look.text[max(0, at.start() - 60) : at.end() + 40])
        for look in hour.looks
        for expression in UNTRUE
        for at in re.finditer(expression, look.text)
        if not (expression == "Traceback" and look.run == hour.trainings["crash"].run)
    ]

    assert "" == lines(found)


def test_open_list_shows_each_run_5_s_after_its_first_step(hour):
    late = {}
    for name in hour.jobs:
        first = min(row["time"] for row in hour.trainings[name].rows())
        late[name] = hour.appeared.get(name, math.inf) - first

    assert {} == {name: seconds for name, seconds in late.items() if seconds > 5}


def test_lists_show_progress_and_loss_of_each_run(hour):
    runs = [training.run for training in hour.trainings.values()]
    found = []
    for look, training in about(hour, "list", "runs"):
        row = row_of(look.text, training.run, runs)
        checks = [untrue_progress(look, training, row)]
        has_loss = not look.of.startswith("runs") and training.run in look.text
        checks += [untrue_loss(look, training, row)] if has_loss else []
        found += [(look.of, training.run, wrong) for wrong in checks if wrong]

    assert "" == lines(found)


def test_page_of_each_run_shows_progress_and_loss(hour):
    found = []
    for look, training in about(hour, "run"):
        head = look.text.partition("steps")[0][-40:] + " steps"
        checks = [untrue_progress(look, training, head)]
        checks += [untrue_loss(look, training, look.text.partition("Loss\n")[2][:40])]
        found += [(look.of, training.run, wrong) for wrong in checks if wrong]

    assert "" == lines(found)


def test_page_left_open_never_goes_back(hour):
    steps = [progress(look.text.partition(" steps")[0][-40:]) for look in hour.looks if look.of.startswith("run, open")]
    seen = [found[0] for found in steps if found]

    text = last(hour, "run, open, at the end", hour.trainings["slow"].run).text

    assert sorted(seen) == seen
    assert hour.trainings["slow"].plan["steps"] == seen[-1]
    assert f"{hour.trainings['slow'].plan['steps']} rows stored" in text
    assert "Completed" in text


def test_open_page_draws_the_loss_of_every_step(hour):
    training = hour.trainings["slow"]
    losses = training.losses()
    found = []
    for look in hour.looks:
        if look.of.startswith("run, open"):
            low = training.step_at(look.before - LAG_SECONDS - training.plan["seconds"])
            drawn = [dict(line) for line in look.charts.get("chart-loss", {}).values()] or [{}]
            missing = [
                [step for step in range(1, low + 1) if not _near(losses[step], line.get(step))] for line in drawn
            ]
            found += [(look.before, min(missing, key=len))] if all(missing) else []

    assert "" == lines(found)


def test_loaded_page_draws_the_loss_of_every_step(hour):
    for name in ("slow", "fast", "spike", "nan", "loader"):
        training = hour.trainings[name]
        lines = last(hour, "run", training.run).charts["chart-loss"].values()
        expected = {step: loss for step, loss in training.losses().items() if math.isfinite(loss)}

        assert any(
            expected.keys() == dict(line).keys() and all(_near(expected[step], loss) for step, loss in line)
            for line in lines
        ), name


def _near(expected, found):
    return found is not None and math.isclose(expected, found, rel_tol=1e-5)


def test_own_metrics_are_on_the_page_in_summary_and_figures(hour):
    training = hour.trainings["fast"]
    page, summary = (
        last(hour, "run", training.run),
        last(hour, f"summary {training.run} --store {hour.store}", training.run),
    )
    newest = training.rows()[-1]["own"] | {"val/loss": 1.25 * training.losses()[training.plan["steps"]]}

    for name in ("my/accuracy", "reward", "val/loss"):
        assert name.rpartition("/")[2] in page.text.lower(), name
    for name, value in newest.items():
        name = {"val/loss": "eval_loss"}.get(name, name)  # noqa: PLW2901 - the name of an evaluation loss in the store
        assert name in summary.text
        assert shows(summary.text.partition(name)[2][:200], value), name
    for name in ("reward", "my/accuracy"):
        assert (hour.folder / f"{name.rpartition('/')[2]}.png").stat().st_size > 5000


def test_summary_has_the_numbers_of_the_training(hour):
    for name in ("fast", "slow", "spike"):
        training = hour.trainings[name]
        losses = training.losses()
        text = last(hour, f"summary {training.run} --store {hour.store}", training.run).text

        assert f"step: {len(losses):,} / {training.plan['steps']:,}" in text
        for value in (
            *(losses[max(losses)], min(losses.values()), max(losses.values()), sum(losses.values()) / len(losses)),
        ):
            assert shows(text, value), (name, value)
        assert "lost: 0 records" in text


def test_every_logged_loss_is_stored_exactly(hour):
    with connect(hour.store) as connection:
        for name in hour.jobs:
            training = hour.trainings[name]
            query = "SELECT attempt, step, rank, value FROM scalars WHERE run = $run AND name = 'loss' ORDER BY 1, 2, 3"
            stored = connection.query(query, {"run": training.run}).to_pylist()
            expected = [(row["attempt"], row["step"], row["rank"], row["loss"]) for row in training.rows()]
            found = [(row["attempt"], row["step"], row["rank"], row["value"]) for row in stored]

            if name == "crash":  # the step that raised has no logged loss
                found = [row for row in found if row[:3] in {other[:3] for other in expected}]
            assert len(expected) == len(found), name
            assert all(
                a[:3] == b[:3] and (a[3] == pytest.approx(b[3], rel=1e-6, nan_ok=True))
                for a, b in zip(expected, found, strict=True)
            )


def test_norm_of_every_gradient_is_stored(hour):
    query = "SELECT attempt, step, rank, tensor, norm FROM tensor_stats WHERE run = $run AND kind = 'grad_reduced'"
    with connect(hour.store) as connection:
        for name in ("fast", "slow", "loader"):
            training = hour.trainings[name]
            rows = connection.query(query, {"run": training.run}).to_pylist()
            found = {(row["attempt"], row["step"], row["rank"], row["tensor"]): row["norm"] for row in rows}
            expected = {
                (row["attempt"], row["step"], row["rank"], tensor): norm
                for row in training.rows()
                for tensor, norm in row["norms"].items()
            }

            assert expected.keys() == found.keys(), name
            assert expected == pytest.approx(found, rel=1e-5), name


def test_tensors_page_shows_the_newest_norm_of_its_tensor(hour):
    found = []
    for look, training in about(hour, "/tensors"):
        if at := re.search(r"newest norm, step ([\d,]+)\s+(\S+)", look.text):
            step = int(at[1].replace(",", ""))
            norms = [norm for row in training.rows() if row["step"] == step for norm in row["norms"].values()]
            if not any(shows(at[2], norm) for norm in norms):
                found.append((look.run, at[0], norms))

    assert "" == lines(found)


def test_ruined_run_is_shown_everywhere_until_a_person_closes_it(hour):
    training = hour.trainings["nan"]
    step, rank, tensor = training.plan["nan"]
    runs = [one.run for one in hour.trainings.values()]
    rows = {
        "list": row_of(last(hour, "list").text, training.run, runs),
        "runs": row_of(last(hour, f"runs --store {hour.store}").text, training.run, runs),
        "run": last(hour, "run", training.run).text,
        "summary": last(hour, f"summary {training.run} --store {hour.store}", training.run).text,
        "incidents": last(hour, f"incidents {training.run} --store {hour.store}", training.run).text,
        "report": (hour.folder / "report-nan.html").read_text(),
    }
    missing = [where for where, text in rows.items() if f"step {step}" not in text or "NaN" not in text]

    assert "" == lines(missing)
    assert "open" in rows["incidents"]
    assert "Open incidents\n\nNone" not in rows["run"]
    assert tensor in rows["run"].replace("\n", "")
    assert f"rank {rank}" in rows["run"].lower()
    assert re.search(r"incident|NaN|⚠", last(hour, "run", training.run).title)
    closed = last(hour, f"incidents {training.run} --store {hour.store}, after it was closed", training.run).text
    assert "closed" in closed


def test_crash_is_shown_with_its_exception_and_step_and_closes(hour):
    training = hour.trainings["crash"]
    step, rank = training.plan["crash"]
    runs = [one.run for one in hour.trainings.values()]
    messages = [alert for alert in hour.receiver.alerts if training.run in alert.title]

    assert 1 == len(messages)
    assert "disk quota exceeded on /data" in messages[0].title + messages[0].text
    assert f"step {step}" in messages[0].title
    assert f"rank {rank}" in messages[0].title
    assert "Completed" in row_of(last(hour, "list").text, training.run, runs)
    assert "resolved" in last(hour, f"incidents {training.run} --store {hour.store}", training.run).text
    failed = [look for look, one in about(hour, "run") if one is training and "Failed" in look.text]
    assert all("disk quota exceeded" in look.text for look in failed)


def test_loss_spike_is_an_incident_with_its_step(hour):
    training = hour.trainings["spike"]
    step = training.plan["spike"][0]
    messages = [alert for alert in hour.receiver.alerts if training.run in alert.title]

    assert 1 == len(messages)
    assert f"step {step}" in messages[0].title + messages[0].text
    losses = [row["loss"] for row in training.rows() if row["step"] == step]
    assert any(f"loss {loss:.3g}, " in messages[0].title for loss in losses)


def test_slow_loader_is_named_with_its_rank_and_share(hour):
    training = hour.trainings["loader"]
    rank = training.plan["loader"][0]
    text = last(hour, "/ranks", training.run).text
    share = 100 * training.waited(rank)

    assert "No rank" not in text
    assert re.search(rf"[Rr]ank {rank}\b", text.partition("Order")[0])
    assert "data" in text.partition("Order")[0].lower()
    assert "resolved" in last(hour, f"incidents {training.run} --store {hour.store}", training.run).text
    assert "cannot be polled" not in last(hour, "list, open, at the end").text
    document = json.loads(last(hour, f"summary {training.run} --store {hour.store} --format json", training.run).text)
    shares = [value for name, value in _leaves(document) if "data_wait" in name]
    mean = 100 * (training.waited(0) + training.waited(1)) / 2
    assert any(100 * value == pytest.approx(other, abs=5) for value in shares for other in (share, mean)), (
        shares,
        share,
    )


def _leaves(document, name=""):
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _leaves(value, f"{name}.{key}")
    elif isinstance(document, int | float):
        yield name, document


def test_healthy_runs_send_no_message_and_have_no_incident(hour):
    for name in ("slow", "fast"):
        run = hour.trainings[name].run

        assert [] == [alert.title for alert in hour.receiver.alerts if run in alert.title]
        assert "NaN" not in last(hour, "run", run).text


def test_messages_name_the_page_and_the_command(hour):
    assert hour.receiver.alerts
    for alert in hour.receiver.alerts:
        assert f"{hour.url}/runs/" in alert.text, alert.text
        assert f"--store {hour.store}" in alert.text, alert.text


def test_offline_run_is_read_by_commands_without_options(hour):
    training = hour.trainings["offline"]
    losses = training.losses()

    assert f"{training.plan['steps']}/{training.plan['steps']}" in last(hour, "runs", training.run).text
    assert shows(last(hour, "summary", training.run).text, losses[max(losses)])
    log = (training.folder / "training.log").read_text()
    assert "rankscope" in log.splitlines()[-1]


def test_hour_takes_at_most_20_minutes(hour):
    assert time.time() - hour.began < 1200
