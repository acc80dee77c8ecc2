"""Two real ranks on gloo: rows and positions of their collectives, compared with the log of the ranks."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.exporter.monitors.flight_recorder.rank_programs import LATE, LATE_SECONDS, STANDING, TRAINING
from tests.programs import run_program

from rankscope_contract.diagnostics.collective_calls import Call, calls_of_note, sentences
from rankscope_contract.diagnostics.collective_format import CallState
from rankscope_contract.diagnostics.stacks import FlightRecord
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.serving.wire_encoder import encode
from rankscope_ingest.record_channel.decode import decode
from rankscope_ingest.record_channel.validate import RowContext, check
from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect
from rankscope_storage.writer.writer import Batch

RANKS = (0, 1)
RUNS = ("script", "DDP", "FSDP1", "FSDP2", "tensor parallelism")

pytestmark = pytest.mark.timeout(300)


def diary(folder: Path, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / f"diary-{rank}").read_text().splitlines()]


def line_of(comment: str) -> int:
    return next(number for number, line in enumerate(TRAINING.splitlines(), 1) if line.endswith(f"# {comment}"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    done = run_program(TRAINING, seconds=200, FOLDER=str(folder))

    assert "exit codes [0, 0]\n" == done.stdout, done.stderr
    return folder


@pytest.fixture(scope="module")
def outcomes(trained: Path) -> list[dict[str, Any]]:
    """Results of both ranks, rows sorted by time: a call that torch retires late is in a later record."""
    results = [json.loads((trained / f"outcome-{rank}").read_text()) for rank in RANKS]
    for result in results:
        for name in RUNS:
            result[name]["rows"].sort(key=lambda row: row["t_start"])
    return results


def test_rows_have_the_order_and_times_of_the_calls(trained, outcomes):
    for rank, outcome in enumerate(outcomes):
        written = diary(trained, rank)
        rows = outcome["script"]["rows"]
        calls = list(zip(written[::2], written[1::2], strict=True))

        assert [(step, name) for (_, step, name, _), _ in calls] == [(row["step"], row["op"]) for row in rows]
        for (entered, left), row in zip(calls, rows, strict=True):
            assert entered[-1] <= row["t_start"] <= left[-1]
        assert [*range(4)] * 3 == [row["call_seq"] for row in rows]
        assert [*range(1, 13)] == [row["collective_seq"] for row in rows]
        assert (0, 0) == (outcome["script"]["faults"], outcome["script"]["overwritten"])


def test_rows_have_size_type_group_and_call_site(outcomes):
    sizes = {"all_reduce": (12, "float32"), "all_gather": (32, "float32"), "barrier": (None, None)}
    names = ("group", "group_size", "group_ranks", "state", "backend", "is_p2p", "duration")
    for row in [row for outcome in outcomes for row in outcome["script"]["rows"]]:
        size = (4 * row["step"], "bfloat16") if row["op"] == "broadcast" else sizes[row["op"]]

        assert size == (row["bytes"], row["dtype"])
        assert f"<string>[{line_of(row['op'] + ' is here')}]" == row["call_site"]
        # Gloo reports no duration.
        assert ("default_pg", 2, "0-1", "left", "gloo", False, None) == tuple(row[name] for name in names)


@pytest.mark.parametrize(
    ("framework", "operations"),
    [
        ("DDP", {"c10d.allreduce_": "all_reduce", "c10d.broadcast_": "broadcast"}),
        # Gloo has no reduce-scatter and records the operations that replace it.
        ("FSDP1", {"c10d.allgather_": "all_gather", "c10d._reduce_scatter_base_": "all_reduce"}),
        ("FSDP2", {"c10d._allgather_base_": "all_gather", "c10d._reduce_scatter_base_": "all_reduce"}),
        ("tensor parallelism", {"c10d_functional.all_reduce": "all_reduce"}),
    ],
)
def test_rows_of_a_framework_match_comm_debug_mode(framework, operations, outcomes):
    """CommDebugMode counts operations when they are dispatched, independent of the flight record."""
    for outcome in outcomes:
        run = outcome[framework]
        found: dict[int | None, Counter[str]] = defaultdict(Counter)
        for row in run["rows"]:
            found[row["step"]][row["op"]] += 1
        counted = [
            {operations[name]: count for name, count in of_step.items() if name in operations}
            for of_step in run["counted"]
        ]

        assert counted == [dict(found[step]) for step in (1, 2, 3)]
        assert all(counted)
        assert {f"<string>[{line_of('backward is here')}]"} == {row["call_site"] for row in run["rows"] if row["step"]}
        assert 0 == run["faults"]


def test_calls_before_the_first_step_have_no_step_and_one_monitor_each(outcomes):
    ops = [row["op"] for row in outcomes[0]["DDP"]["rows"] if row["step"] is None]

    assert ["all_gather", "broadcast", "broadcast"] == ops
    for outcome in outcomes:
        seen = [(row["group_id"], row["t_start"]) for name in RUNS for row in outcome[name]["rows"]]
        assert len(seen) == len(set(seen))


def test_page_counts_calls_and_bytes_by_operation(outcomes):
    """Only calls that were read: at the last scrape a step had not ended."""
    lines = dict(line.rsplit(" ", 1) for line in outcomes[0]["script"]["page"])
    calls = {name: float(value) for name, value in lines.items() if "calls_total" in name}

    assert {"all_reduce", "all_gather", "broadcast", "barrier"} == {name.split('"')[1] for name in calls}
    assert all(1 <= count <= 3 for count in calls.values())


def test_store_shows_the_late_rank_and_the_waits_of_the_others(outcomes, tmp_path):
    """The rank that slept before the call, checked with SQL on the store."""
    store = Store.open(tmp_path / "store", create=True)
    with store.claim(owner="test") as writer:
        for rank, outcome in enumerate(outcomes):
            body = encode(0, [StepRecord(ts=outcome["told_at"], collectives=tuple(outcome["script"]["rows"]))]).body
            context = RowContext(run="r", attempt=0, rank=rank, incarnation=f"i{rank}")
            wire = pa.ipc.open_stream(body).read_all()
            checked = check(wire, {}, context, after=-1, first_ordinal=0)
            writer.append(Batch(tables=decode([checked]), watermarks={f"i{rank}": 0}))
    with connect(store.root) as connection:
        calls = connection.query("FROM collective_calls ORDER BY collective_seq").to_pylist()

    assert [(step, op) for step in (1, 2, 3) for op in ("all_reduce", "all_gather", "broadcast", "barrier")] == [
        (row["step"], row["op"]) for row in calls
    ]
    assert {("over", False, (0, 1))} == {
        (row["state"], row["is_mismatch"], tuple(row["ranks_entered"])) for row in calls
    }
    late = next(row for row in calls if (row["step"], row["op"]) == LATE[1:])
    assert (LATE[0], True) == (late["last_rank"], late["spread"] > LATE_SECONDS / 5)


# Positions of the ranks.


@pytest.fixture(scope="module")
def stood(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stood")
    done = run_program(STANDING, seconds=200, FOLDER=str(folder))

    assert "exit codes [0, -9]\n" == done.stdout, done.stderr
    return folder


def records(folder: Path, case: str) -> dict[int, FlightRecord]:
    return {rank: FlightRecord.of(json.loads((folder / f"{case}-{rank}").read_text())) for rank in RANKS}


def only(folder: Path, case: str) -> Call:
    (call,) = calls_of_note(records(folder, case))
    return call


@pytest.mark.parametrize(
    ("case", "state", "words"),
    [
        ("never entered", CallState.NEVER_ENTERED, "rank 1 never entered all_reduce 2 (20 B float32) of default_pg; "),
        ("never left", CallState.NEVER_LEFT, "rank 1 entered broadcast 3 (12 B float32) of default_pg since "),
        ("all in", CallState.ALL_IN, "ranks 0-1 are all in all_reduce 4 (3.9 KiB float32) of default_pg since "),
    ],
)
def test_positions_of_two_ranks_match_the_log_of_the_ranks(case, state, words, stood):
    """A rank stops itself inside the call, so that its state does not change."""
    written = {rank: [(what, at) for what, of, at in diary(stood, rank) if of == case] for rank in RANKS}
    told_at = max(at for entries in written.values() for what, at in entries if what == "tell")
    done = {
        rank: tuple(what for what, at in entries if at <= told_at and what != "tell")
        for rank, entries in written.items()
    }
    call = only(stood, case)

    assert state is call.state
    assert sentences(records(stood, case))[0].startswith(words)
    for ranks, calls in ((call.missing, ()), (call.waiting, ("enter",)), (call.left, ("enter", "leave"))):
        assert {rank for rank in RANKS if done[rank] == calls} == set(ranks)


def test_different_calls_of_ranks_are_named(stood):
    call = only(stood, "mismatch")

    assert call.is_mismatch
    assert CallState.ALL_IN is call.state
    assert [("all_reduce (16 B float32)", (0,)), ("broadcast (64 B float64)", (1,))] == list(call.forms)
    forms = "rank 0 all_reduce (16 B float32), rank 1 broadcast (64 B float64); "
    assert sentences(records(stood, "mismatch"))[0].startswith(f"ranks differ in collective 5 of default_pg: {forms}")
