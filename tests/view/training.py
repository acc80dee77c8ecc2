"""Write synthetic runs with the API of the store: small ones for tests of pages, a large one for pictures."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope_storage.api.store import Batch, Store, Writer
from rankscope_storage.base.schema import conform, dataset_schema

START = 1_760_000_000_000_000  # Time of the first step in UTC µs

HOSTILE = '<script>alert("x")</script>\u202e/../a=b&c'
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Extent of the main run."""

    ranks: int = 2
    layers: int = 2
    steps: int = 120
    seconds: float = 6.0

    @property
    def tensors(self) -> list[str]:
        layers = [f"layers.{layer}.{part}.weight" for layer in range(self.layers) for part in PARTS]
        return ["embed_tokens.weight", *layers, "lm_head.weight"]


def rows(dataset: str, **columns: Any) -> pa.Table:
    """Return a table of `dataset`; a single value of a column is that of every row."""
    listed = np.ndarray | list | pa.Array
    length = max((len(values) for values in columns.values() if isinstance(values, listed)), default=1)
    schema = dataset_schema(dataset)
    arrays = {
        name: pa.array(values).cast(type_)
        if isinstance(values, listed)
        else pa.repeat(pa.scalar(values, type_), length)
        for name, values in columns.items()
        for type_ in [schema.field(name).type]
    }
    return conform(pa.table(arrays), dataset)


def scalars(run: str, name: str, step: Any, value: Any, **columns: Any) -> pa.Table:
    known = {"attempt": 0, "rank": 0, "incarnation": f"{run}-0", "seq": step, "ordinal": step, "ts_origin": "rank"}
    return rows("scalars", **(known | {"run": run, "name": name, "step": step, "value": value} | columns))


def run_row(run: str, state: str, **columns: Any) -> pa.Table:
    known = {"attempt": 0, "ordinal": 1, "ts": START, "ts_origin": "ingest", "source_kind": "live", "started_at": START}
    return rows("runs", **(known | {"run": run, "state": state} | columns))


def event(run: str, type_: str, step: int | None, ts: int, **columns: Any) -> dict[str, Any]:
    details = columns.pop("details", None)
    known = {"run": run, "type": type_, "step": step, "ts": ts, "attempt": 0, "severity": "info", "ts_origin": "rank"}
    return known | columns | ({"details": json.dumps(details)} if details is not None else {})


def events(listed: list[dict[str, Any]]) -> pa.Table:
    schema = dataset_schema("events")
    return pa.table(
        [pa.array([row.get(name) for row in listed], schema.field(name).type) for name in schema.names], schema.names
    )


def append(writer: Writer, **tables: pa.Table) -> None:
    newest: dict[str, int] = {}
    for table in tables.values():
        last = table.select(["incarnation", "seq"]).drop_null().group_by("incarnation").aggregate([("seq", "max")])
        for row in last.to_pylist():
            newest[row["incarnation"]] = max(newest.get(row["incarnation"], 0), row["seq_max"])
    writer.append(Batch(tables=tables, watermarks=newest))


def write(path: Path, *batches: dict[str, pa.Table]) -> Path:
    """Append each batch of tables to the store at `path`, which is created if it does not exist. Return `path`."""
    with Store.open(path, create=True).claim(owner="a test") as writer:
        for tables in batches:
            append(writer, **tables)
    return path


@dataclass(slots=True)
class Trajectory:
    """Order of the rows of the main run: attempts, steps, times, and the means of loss and gradient norm."""

    attempt: Any
    step: Any
    ts: Any
    loss: Any
    grad_norm: Any
    nan_from: int  # step of the first NaN, in attempt 0
    slow_from: int  # step from which the last rank but two is slow


def trajectory(size: Size) -> Trajectory:
    """Return a run of three attempts; the second goes back after NaN, the third after a restart."""
    unit = size.steps / 12
    ends = [round(5 * unit), round(8 * unit), size.steps]
    begins = [0, round(3.6 * unit), round(7.6 * unit)]
    attempt = np.concatenate([np.full(end - begin, n) for n, (begin, end) in enumerate(zip(begins, ends, strict=True))])
    step = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
    random = np.random.default_rng(7)
    x = step / size.steps
    loss = 2.7 + 5.5 * np.exp(-14 * x) + 1.1 * np.exp(-3 * x) + random.normal(0, 0.035, len(step))
    grad = 0.55 + 2.5 * np.exp(-12 * x) + np.abs(random.normal(0, 0.06, len(step)))
    nan_from = round(4.6 * unit)
    rising = (attempt == 0) & (step >= round(4.1 * unit))
    growth = np.clip((step - 4.1 * unit) / (0.5 * unit), 0, 1)
    loss = np.where(rising, loss + 2.4 * growth**2, loss)
    grad = np.where(rising, grad * np.exp(6.0 * growth), grad)
    loss[(attempt == 0) & (step > nan_from)] = np.nan
    grad[(attempt == 0) & (step >= nan_from)] = np.nan
    spike = (attempt == 0) & (step == round(2.5 * unit))
    loss[spike] += 1.6
    grad[spike] *= 9
    pause = np.where(attempt == 0, 0, np.where(attempt == 1, 700, 1000))
    ts = START + ((np.arange(len(step)) * size.seconds + pause) * 1e6).astype(np.int64)
    return Trajectory(attempt, step, ts, loss, grad, nan_from, round(11.2 * unit))


def rank_scalars(run: str, size: Size, course: Trajectory) -> pa.Table:
    tables, seq, slow = [], np.arange(len(course.step)), max(size.ranks - 2, 0)
    gpu = '{"gpu":"0"}'
    labels = {"learning_rate": '{"group":"0"}', "gpu_clock_hertz": '{"clock":"sm","gpu":"0"}', "gpu_utilization": gpu}
    labels |= {"gpu_temperature_celsius": '{"gpu":"0","sensor":"gpu"}', "gpu_memory_total_bytes": gpu}
    for rank in range(size.ranks):
        random = np.random.default_rng(100 + rank)
        kept = np.ones(len(seq), bool) if rank != size.ranks - 1 else course.step < round(course.slow_from * 1.02)
        common = {"attempt": course.attempt[kept], "seq": seq[kept], "ts": course.ts[kept], "rank": rank}
        common |= {"ordinal": seq[kept] * size.ranks + rank}
        common["incarnation"] = [f"{run}-{attempt}-{rank}" for attempt in course.attempt[kept].tolist()]
        noise = random.normal(0, 0.05, len(seq))
        is_slow = (rank == slow) & (course.step >= course.slow_from)
        compute = (4.5 + random.normal(0, 0.03, len(seq))) * np.where(is_slow, 1.31, 1.0)
        step_seconds = np.where(course.step >= course.slow_from, 6.5, 5.4) + 0 * compute
        warm_up = np.minimum(1, (course.step + 1) / (size.steps / 12))
        values = {
            "loss": course.loss + noise,
            "grad_norm": course.grad_norm,
            "learning_rate": 3e-4 * warm_up * (1 - 0.7 * course.step / size.steps),
            "step_seconds": step_seconds,
            "tokens_per_second": 4.2e6 / step_seconds / size.ranks,
            "pre_collective_seconds": compute,
            "device_memory_allocated_bytes": 62e9 + random.normal(0, 2e8, len(seq)),
            "gpu_memory_total_bytes": np.full(len(seq), 141e9),
            "gpu_utilization": np.clip(0.73 + random.normal(0, 0.01, len(seq)) + 0.2 * is_slow, 0, 1),
            "gpu_clock_hertz": np.where(is_slow, 1.305e9, 1.965e9),
            "gpu_temperature_celsius": np.where(is_slow, 83.0, 62.0),
        }
        for name, value in values.items():
            tables.append(scalars(run, name, course.step[kept], value[kept], **common, labels=labels.get(name)))
        forward = compute * 0.33
        parts = {"data_wait": 0.08, "forward": forward, "backward": compute - forward - 0.08}
        parts |= {"collective": step_seconds - compute - 0.2, "optimizer": 0.15, "other": 0.05}
        for phase, seconds in parts.items():
            known = common | {"labels": json.dumps({"phase": phase})}
            tables.append(scalars(run, "step_phase_seconds", course.step[kept], (seconds + 0 * compute)[kept], **known))
    return pa.concat_tables(tables)


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of the gradient of one tensor by rank (row) and row of the course, its baseline, and where it is NaN."""

    norm: Any
    baseline: float
    bad: Any


def source(size: Size) -> int:
    """Return the number of the tensor that becomes NaN first, on rank 1."""
    return 1 + (size.layers // 2) * len(PARTS) + PARTS.index("mlp.down_proj")


def norms(size: Size, course: Trajectory, number: int) -> Norms:
    """Return the norms of the tensor with this number; a blow-up begins in the last third of the layers on rank 1."""
    random = np.random.default_rng(1000 + number)
    unit, length = size.steps / 12, len(course.step)
    level = 0.05 * 10 ** random.uniform(0, 1.2)
    distance = abs(number - source(size)) / len(size.tensors)
    begin = 3.9 * unit + 0.6 * unit * distance * 1.6
    growth = np.clip((course.step - begin) / (0.6 * unit), 0, 1) * (course.attempt == 0)
    norm, bad = np.empty((size.ranks, length)), np.zeros((size.ranks, length), bool)
    for rank in range(size.ranks):
        is_first = rank == 1 and number == source(size)
        strength = 9.3 if is_first else 6.5 if rank == 1 else 4.0
        norm[rank] = level * (1 + 3 * np.exp(-10 * course.step / size.steps)) * np.exp(random.normal(0, 0.08, length))
        norm[rank] *= np.exp(strength * growth) * np.where(course.step == round(2.5 * unit), 8, 1)
        bad[rank] = (course.attempt == 0) & (course.step >= course.nan_from + (0 if is_first else 1))
    return Norms(norm, level, bad)


def tensor_rows(run: str, size: Size, course: Trajectory) -> pa.Table:
    tables, seq = [], np.arange(len(course.step))
    every = {"run": run, "attempt": course.attempt, "seq": seq, "step": course.step, "ts": course.ts}
    every |= {"ts_origin": "rank", "kind": "grad_unreduced", "placement": "full", "infs": 0 * seq, "numel": 4096}
    for number, name in enumerate(size.tensors):
        known = norms(size, course, number)
        for rank in range(size.ranks):
            norm, bad = known.norm[rank], known.bad[rank]
            own = {"incarnation": [f"{run}-{attempt}-{rank}" for attempt in course.attempt.tolist()], "tensor": name}
            own |= {"rank": rank, "ordinal": seq * size.ranks + rank, "norm_baseline": known.baseline}
            values = {"norm": pa.array(norm, mask=bad), "max": norm / 3, "nans": np.where(bad, 112, 0)}
            tables.append(rows("tensor_stats", **every, **own, **values))
    return pa.concat_tables(tables)


def main_events(run: str, size: Size, course: Trajectory) -> pa.Table:
    """Return launches, checkpoints, evaluations, anomalies and incidents of the main run."""
    unit = size.steps / 12
    found = []
    time_of = {(int(a), int(s)): int(t) for a, s, t in zip(course.attempt, course.step, course.ts, strict=True)}
    for attempt in range(3):
        begins = int(course.ts[course.attempt == attempt][0]) - 9_000_000
        for rank in range(size.ranks):
            host = f"gpu-{'ab'[rank * 2 // size.ranks]}07"
            details = {"host": host, "pid": 4000 + rank, "world_size": size.ranks, "versions": {"torch": "2.13.0"}}
            text = f"rank {rank} of {size.ranks} registered from {host}"
            found.append(event(run, "launch", None, begins, attempt=attempt, rank=rank, message=text, details=details))
    every = max(2, round(unit))
    for (attempt, step), at in time_of.items():
        if step and step % every == 0 and not (attempt == 0 and step > course.nan_from):
            text = f"saved checkpoint-{step}"
            found.append(event(run, "checkpoint", step, at, attempt=attempt, rank=0, message=text))
    tensor, known = size.tensors[source(size)], norms(size, course, source(size))
    subject = {"kind": "grad_unreduced", "tensor": tensor, "rank": 1}
    for row in np.flatnonzero((known.norm[1] > 4 * known.baseline) & ~known.bad[1] & (course.step > unit)).tolist():
        step, at, attempt = (int(column[row]) for column in (course.step, course.ts, course.attempt))
        values = {"value": float(known.norm[1, row]), "baseline": known.baseline, "threshold": 3.0}
        rule = {"rule": "AnomalyTurbulence", "severity": "warning", "op": "norm"}
        found += [event(run, "anomaly", step, at, **subject, **rule, **values, attempt=attempt)]
    nan = {"rule": "AnomalyNan", "op": "nans", "value": 112.0, "severity": "critical"}
    message = f"{tensor} has 112 NaN"
    found.append(event(run, "anomaly", course.nan_from, time_of[0, course.nan_from], **subject, **nan, message=message))
    for number, other in enumerate(size.tensors):
        step = course.nan_from + 1 + number % 3
        if (0, step) in time_of and other != tensor:
            own = {"kind": "grad_unreduced", "tensor": other, "rank": number % size.ranks}
            found.append(event(run, "anomaly", step, time_of[0, step], **own, **nan))
    at, ordinal = time_of[0, course.nan_from], 10_000_001
    details = {"key": "a1", "events": 41, "ranks": [0, 1], "last_step": course.nan_from + 9, "subjects": []}
    known = subject | nan | {"message": f"AnomalyNan on rank 1: {tensor}"}
    for number, state in enumerate(("opened", "notified")):
        own = {"ordinal": ordinal + number, "details": details | {"state": state}}
        found.append(event(run, "incident", course.nan_from, at + number * 2_000_000, **known, **own))
    slow, at = max(size.ranks - 2, 0), time_of[2, course.slow_from]
    details = {"key": "b2", "state": "opened", "events": 57, "ranks": [slow]}
    details |= {"last_step": size.steps - 1, "subjects": []}
    known = {"rule": "SlowRank", "severity": "warning", "message": f"rank {slow} is slow before the collective"}
    known |= {"attempt": 2, "rank": slow, "ordinal": 10_000_009, "details": details}
    found.append(event(run, "incident", course.slow_from, at, **known))
    return events(found)


def evaluations(run: str, size: Size, course: Trajectory) -> pa.Table:
    every = max(2, round(size.steps / 24))
    chosen = (course.step > 0) & (course.step % every == 0) & np.isfinite(course.loss)
    x, attempt = course.step[chosen] / size.steps, course.attempt[chosen]
    columns = {"attempt": attempt, "ts": course.ts[chosen], "ordinal": np.flatnonzero(chosen)}
    columns["incarnation"] = [f"{run}-{one}-0" for one in attempt.tolist()]
    losses = 2.75 + 5.5 * np.exp(-14 * x) + 1.1 * np.exp(-3 * x)
    return scalars(run, "eval_loss", course.step[chosen], losses, **columns)


def write_main(writer: Writer, run: str, size: Size) -> Trajectory:
    course = trajectory(size)
    tags = json.dumps({"team": "pretrain", "size": "1b", "ddp": str(size.ranks)})
    columns = {"planned_steps": round(size.steps * 1.6), "last_step": size.steps - 1, "world_size": size.ranks}
    config = json.dumps({"optimizer": {"lr": 3e-4, "name": "adamw"}, "batch_size": 512, "checkpoint_every": 100})
    labelled = run_row(run, "running", tags=tags, ts=int(course.ts[-1]), ordinal=None)
    state = run_row(run, "running", config=config, ts=int(course.ts[-1]), attempt=2, **columns)
    append(
        writer,
        runs=pa.concat_tables([state, labelled]),
        scalars=pa.concat_tables([rank_scalars(run, size, course), evaluations(run, size, course)]),
        events=main_events(run, size, course),
        tensor_stats=tensor_rows(run, size, course),
    )
    return course


def write_other(
    writer: Writer, run: str, state: str, steps: int, *, planned: int | None = None, **options: Any
) -> None:
    """Write a run of one rank with a loss. `loss` replaces its values, and `age` is in hours before START."""
    at = START + 6_000_000_000 - round(options.get("age", 0) * 3.6e9)
    step = np.arange(steps)
    ts = None if options.get("timeless") else at - (steps - step) * 900_000
    loss = options.get("loss", 2.5 + 6 * np.exp(-5 * step / max(steps, 1)) + 0.02 * np.sin(step))
    values = {options.get("name", "loss"): loss, "learning_rate": 3e-4 * (1 - step / max(steps, 1))}
    values["tokens_per_second"] = 8e5 + 1e3 * np.sin(step)
    tables = [scalars(run, name, step, value, ts=ts) for name, value in values.items() if steps]
    ended = {"ended_at": at} if state in {"completed", "failed", "stopped"} else {}
    tags = {"tags": json.dumps(options["tags"])} if "tags" in options else {}
    first = at - steps * 900_000
    row = run_row(run, state, ts=at, started_at=first, planned_steps=planned, last_step=steps - 1 if steps else None,
                  reason=options.get("reason"), **ended, **tags)  # fmt: skip
    batch = {"runs": row} | ({"scalars": pa.concat_tables(tables)} if tables else {})
    if options.get("events"):
        batch["events"] = events([event(run, **one) for one in options["events"]])
    append(writer, **batch)


MAIN = "llama-1b-d16"


def write_store(path: Path, size: Size) -> Trajectory:
    """Create a store with the main run and runs of all states and odd shapes. Return the course of the main run."""
    with Store.open(path, create=True).claim(owner="a test") as writer:
        course = write_main(writer, MAIN, size)
        known = {"rank": 1, "severity": "critical", "rule": "AnomalyNan", "kind": "grad_unreduced", "op": "nans"}
        known |= {"tensor": "layers.7.mlp.down_proj.weight", "value": 3.0, "message": "AnomalyNan on rank 1"}
        known["details"] = {"key": "c3", "state": "notified", "events": 3}
        incident = [{"type_": "incident", "step": 150, "ts": START, **known}]
        late = np.where(np.arange(187) > 150, np.nan, 2.4 + 3 * np.exp(-np.arange(187) / 40))
        other = partial(write_other, writer)
        failed = {"events": incident, "reason": "rank 1: ValueError: loss is not finite", "tags": {"team": "post"}}
        other("qwen-7b-sft-tulu", "failed", 187, planned=4200, age=0.5, loss=late, **failed)
        other("llama-1b-muon-sweep-04", "completed", 400, planned=400, age=2, tags={"sweep": "muon"})
        other("llama-1b-muon-sweep-02", "stopped", 150, planned=400, age=3, tags={"sweep": "muon"})
        stopping = [{"type_": "exit", "step": 220, "ts": START, "details": {"reason": "signal"}}]
        other("llama-8b-dpo-b0.1", "running", 221, planned=300, age=0, tags={"team": "post"}, events=stopping)
        other("qwen-moe-a2.7b-ep8", "stalled", 300, planned=6000, age=0.1, reason="alive, but no step for 432 s")
        other("mamba2-370m-32k-ctx", "pending", 0, planned=24_000, age=0.2)
        other("only-nan", "failed", 12, loss=np.full(12, np.nan), age=90)
        other("one-row", "stopped", 1, age=91)
        other("no-loss", "completed", 20, name="accuracy", age=92)
        other("no-times", "completed", 30, timeless=True, age=93)
        note = [{"type_": "note", "step": 1, "ts": START, "message": HOSTILE}]
        other(HOSTILE, "stopped", 5, age=94, reason=HOSTILE, tags={HOSTILE: HOSTILE}, events=note)
    return course
