"""The sections of a summary as labels and texts, for the terminal, Markdown and HTML. The texts are not escaped."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rankscope_view.data.detail import LARGEST_EXPONENT
from rankscope_view.data.summary import TREND_ROWS, Evaluation, Summary, Trend
from rankscope_view.pages.format import NOTHING, count, duration, number, percent, short, utc

MOST_METRICS: Final = 20
_TIME = "%Y-%m-%d %H:%M:%S UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One block of a summary. A row is a label and a text."""

    title: str
    rows: tuple[tuple[str, str], ...]


def sections(found: Summary) -> tuple[Section, ...]:
    """Return the sections of a summary: progress, loss, parameters, time, speed, hints, and the facts of the store.

    Unknown values of the first four sections are a dash; the other rows and sections are omitted if they are unknown.
    """
    parts = {
        "progress": _progress(found),
        "loss": _loss(found),
        "parameters": _parameters(found),
        "time": _time(found),
        "speed": _speed(found),
        "metrics": _metrics(found),
        "hints": _hints(found),
        "run": _stored(found),
    }
    listed = (Section(title=title, rows=tuple(rows)) for title, rows in parts.items())
    return tuple(section for section in listed if section.rows)


def title(found: Summary) -> str:
    """Return the name and the state of a run, and the reason of the state."""
    reason = f" ({found.stored.reason})" if found.stored.reason else ""
    return f"{found.run}, {found.progress.state or 'state unknown'}{reason}"


def _six(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.6f}" if abs(value) < 1e9 else number(value)


def _decimals(value: float) -> str:
    return f"{value:,.4f}" if abs(value) < 1e9 else number(value)


def _at(step: int | None) -> str:
    return "" if step is None or step < 0 else f" at step {count(step)}"


def _share(share: float | None) -> str:
    return "" if share is None else f", {percent(share)}"


def _rows(number_of_rows: int) -> str:
    return f"{count(number_of_rows)} row{'' if number_of_rows == 1 else 's'}"


def _progress(found: Summary) -> Iterator[tuple[str, str]]:
    progress = found.progress
    step = count(progress.step)
    if progress.step is not None and progress.planned_steps is not None:
        step += f" / {progress.planned_steps:,}"
    if found.detail.row.end_sentence:
        yield "end", found.detail.row.end_sentence
    yield "step", step + _share(progress.step_share)
    planned = "" if progress.planned_epochs is None else f" / {progress.planned_epochs:g}"
    epoch = NOTHING if progress.epoch is None else f"{progress.epoch:.2f}{planned}"
    yield "epoch", epoch + _share(progress.epoch_share)
    left = progress.eta_seconds
    yield "time left", NOTHING if left is None else duration(left) if left else "0 s"


def _loss(found: Summary) -> Iterator[tuple[str, str]]:
    losses = found.losses
    note = f" ({found.detail.row.loss_note})" if found.detail.row.loss_note else ""
    current = _six(losses.current) + _at(losses.current_step) + note
    if losses.current is not None and not math.isfinite(losses.current) and losses.last_finite is not None:
        current += f"; last finite {_six(losses.last_finite)}{_at(losses.last_finite_step)}"
    yield "current", current
    yield "lowest", _six(losses.lowest) + _at(losses.lowest_step)
    yield "highest", _six(losses.highest) + _at(losses.highest_step)
    finite = losses.rows - losses.nonfinite
    yield f"mean of the {count(finite)} finite" if losses.nonfinite else "mean", _six(losses.mean)
    compared = losses.trend in {Trend.FALLING, Trend.RISING, Trend.STEADY}
    before = _rows(min(TREND_ROWS, losses.rows - TREND_ROWS))
    basis = f" (mean of the last {TREND_ROWS} rows against the {before} before)" if compared else ""
    yield "trend", losses.trend + basis
    if losses.perplexity is not None:
        limit = f" (the loss exceeds {LARGEST_EXPONENT:.2f})" if math.isinf(losses.perplexity) else ""
        yield "perplexity", _decimals(losses.perplexity) + limit
    if losses.nonfinite:
        yield "not finite", f"{count(losses.nonfinite)} of {_rows(losses.rows)} NaN or infinite"
    for one in found.evaluations:
        yield one.name, _evaluation(one)
    if found.best is not None:
        where = [] if found.best.checkpoint is None else [found.best.checkpoint]
        where += [] if found.best.step is None else [f"step {count(found.best.step)}"]
        yield "best metric", ", ".join((_six(found.best.metric), *where))
    for advice in found.detail.advice:
        yield "advice", advice.text


def _evaluation(one: Evaluation) -> str:
    best = "" if one.best is None else f"; best {_six(one.best)}{_at(one.best_step)}"
    return f"{_six(one.last)}{_at(one.last_step)}{best}"


def _parameters(found: Summary) -> Iterator[tuple[str, str]]:
    known = found.parameters
    yield "learning rate", NOTHING if known.learning_rate is None else f"{known.learning_rate:.2e}"
    norm = NOTHING if known.grad_norm is None else _decimals(known.grad_norm)
    bad = f", {_rows(known.nonfinite_grad_norms)} NaN or infinite" if known.nonfinite_grad_norms else ""
    yield "gradient norm", norm + bad
    again = found.detail.steps_again
    yield "logged losses", count(found.losses.rows) + (f", and {count(again)} of repeated steps" if again else "")
    for name, value in (
        ("loss scale", known.loss_scale),
        ("skipped iterations", known.skipped_iterations),
        ("NaN iterations", known.nan_iterations),
        ("global batch", found.speed.global_batch),
    ):
        if value is not None:
            yield name, count(value)


def _time(found: Summary) -> Iterator[tuple[str, str]]:
    times = found.times
    if times.checkpoint_at is not None:
        yield "checkpoint time", f"{utc(times.checkpoint_at, _TIME)} (modification time of the file)"
    else:
        yield "started", utc(times.started_at, _TIME)
        yield "newest row", utc(times.newest_row_at, _TIME)
    if times.ended_at is not None:
        yield "ended", utc(times.ended_at, _TIME)
    if times.train_seconds is not None:
        yield "training time", f"{duration(times.train_seconds)} (train_runtime of the log)"
    if times.goodput is not None and times.wall_seconds is not None:
        share = f"{percent(times.goodput)} of {duration(times.wall_seconds)}"
        bad = "; steps with a loss of NaN or Inf count as good" if found.losses.nonfinite else ""
        yield "goodput", f"{share}; the rest was repeated, lost or waiting{bad}"


def _speed(found: Summary) -> Iterator[tuple[str, str]]:
    speed, throughput = found.speed, found.speed.throughput
    if throughput is not None and throughput.median is not None and throughput.low is not None:
        ranks = throughput.ranks
        each = f"{throughput.unit}{' per rank' if ranks > 1 else ''}"
        source = "" if throughput.source == throughput.name else f", from {throughput.source}"
        yield "throughput", f"{short(throughput.median)} {each} (median of all steps{source})"
        if ranks > 1 and throughput.name != "steps_per_second":
            yield "of all ranks", f"{short(throughput.median * ranks)} {throughput.unit} (median × {ranks} ranks)"
        yield "P10", f"{short(throughput.low)} {each}, {_rows(throughput.rows_below)} below"
    if found.stored.tokens_per_second is not None and (throughput is None or throughput.name != "tokens_per_second"):
        yield "tokens", f"{found.stored.tokens_per_second:,.0f} tokens/s"
    if speed.step_seconds is not None and speed.first_step_seconds is not None:
        yield (
            "step time",
            f"{speed.step_seconds:.4g} s (median of all steps; first step {speed.first_step_seconds:.4g} s)",
        )
    if speed.time_spent:
        yield "time of a step", speed.time_spent
    for name, share in (("data wait", speed.data_wait), ("collective wait", speed.collective)):
        if share is not None:
            yield name, f"{percent(share.value)} of the step time ({share.source})"
    if found.utilization is not None:
        yield "GPU utilisation", f"{percent(found.utilization.value)} ({found.utilization.words})"
    check = speed.batch_check
    if check is not None:
        verdict = "do not match" if check.is_off else "match"
        samples = f"throughput × step time is {check.samples:,.4g} samples, global batch {check.global_batch:,.0f}"
        yield "batch check", f"{samples}: they {verdict} ({100 * check.difference:+.1f} %)"


def _metrics(found: Summary) -> Iterator[tuple[str, str]]:
    for one in found.metrics[:MOST_METRICS]:
        varies = one.lowest is not None and one.lowest != one.highest
        low, high = f"{_six(one.lowest)}{_at(one.lowest_step)}", f"{_six(one.highest)}{_at(one.highest_step)}"
        yield one.name, f"{_six(one.last)}{_at(one.last_step)}{f'; lowest {low}, highest {high}' if varies else ''}"
    if len(found.metrics) > MOST_METRICS:
        more = count(len(found.metrics) - MOST_METRICS)
        yield "more", f"{more} metrics, in the summary as JSON and on the page of the run"


def _hints(found: Summary) -> Iterator[tuple[str, str]]:
    for hint in found.hints:
        yield hint.side, f"{hint.observation}: {'; '.join(hint.actions)}"


def _stored(found: Summary) -> Iterator[tuple[str, str]]:
    stored = found.stored
    ranks = f"on {stored.ranks} rank{'' if stored.ranks == 1 else 's'}" if stored.ranks else "ranks unknown"
    yield "launches", f"{stored.attempts}, {ranks}"
    code = [f"commit {stored.git_commit[:12]}"] if stored.git_commit else []
    code += [stored.command] if stored.command else []
    if code:
        yield "code", ", ".join(code)
    see = f", see {shlex.join(['rankscope', 'incidents', found.run])}" if found.incidents else ""
    number = len(found.detail.row.incidents)
    split = f"{number} open, {found.incidents - number} resolved or closed"
    yield "incidents", f"{split}{see}" if found.incidents else "0"
    yield "lost", f"{stored.lost_records} record{'' if stored.lost_records == 1 else 's'}"
    # A run or an attempt has a row for each version of its state.
    rows = ", ".join(f"{rows:,} {name}" for name, rows in stored.rows.items() if name not in {"runs", "attempts"})
    yield "stored", f"{rows or 'nothing'}; {_size(stored.bytes_on_disk)}"


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
