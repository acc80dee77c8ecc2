"""The record channel from ring to committed Parquet: CPU and bytes per sample, of every stage and of the whole."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

from _noise import STATISTICS, plan_of, records
from _rows import Row, cpu_seconds, print_rows

from rankscope_contract.model.identity import Identity
from rankscope_contract.wire.channel import SCHEMA_HEADER
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.publish.rank_server import RankServer
from rankscope_exporter.publish.ring import encode, stream
from rankscope_exporter.publish.serving_config import ServeConfig
from rankscope_ingest.record_channel.bodies import PlanColumns, RowContext, ValidBody, check, decode
from rankscope_ingest.record_channel.client import open_stream
from rankscope_storage.api.store import Batch, Store

TENSORS, STEPS_A_POLL, RANKS, POLLS = 2_500, 10, 8, 10
_UNIT = "CPU s per million samples"
SINGLE_STEPS = 200
"""Bodies of one step each, as many ranks send them whose steps are as long as the time between two polls."""


def run() -> list[Row]:
    made = records(TENSORS, STEPS_A_POLL)
    million = TENSORS * STEPS_A_POLL * STATISTICS / 1e6
    encoded = list(map(encode, made))
    body = stream(0, encoded).to_pybytes()
    plans = {made[0].statistics.plan.hash: PlanColumns(plan_of(TENSORS).plan)}
    context = RowContext(run="bench", attempt=0, rank=0, incarnation="0" * 32)

    def check_body() -> ValidBody:
        return check(open_stream(body), plans, context, after=-1, first_ordinal=1)

    checked = [check_body()] * RANKS
    rows = [
        Row("encode records", cpu_seconds(lambda: list(map(encode, made))) / million, _UNIT, _size()),
        Row("join them to a body", cpu_seconds(lambda: stream(0, encoded)) / million, _UNIT, "lz4"),
        Row("open and check a body", cpu_seconds(check_body) / million, _UNIT, "inflate, count, compare"),
        Row("decode bodies", cpu_seconds(lambda: decode(checked)) / million / RANKS, _UNIT, f"{RANKS} at once"),
        Row("bytes on the wire", len(body) / (million * 1e6), "bytes per sample", "lz4"),
    ]
    return rows + _single_steps(plans, context) + _whole()


def _single_steps(plans: dict[str, PlanColumns], context: RowContext) -> list[Row]:
    """Measure what bodies of one step cost, of which much is the same for ten."""
    million = TENSORS * STATISTICS * SINGLE_STEPS / 1e6
    bodies = [stream(0, [encode(record)]).to_pybytes() for record in records(TENSORS, SINGLE_STEPS)]

    def check_all() -> list[ValidBody]:
        return [check(open_stream(body), plans, context, after=-1, first_ordinal=1) for body in bodies]

    checked = check_all()
    note = f"{SINGLE_STEPS} bodies of {TENSORS:,} tensors x 1 step"
    return [
        Row("open and check bodies of one step", cpu_seconds(check_all) / million, _UNIT, note),
        Row("decode bodies of one step", cpu_seconds(lambda: decode(checked)) / million, _UNIT, "all together"),
    ]


def _whole() -> list[Row]:
    """Serve over HTTP, fetch, decode, sort, write and commit, all in this process: the sum of both sides."""
    folder = Path(tempfile.mkdtemp())
    try:
        return _into(folder)
    finally:
        shutil.rmtree(folder)


def _into(folder: Path) -> list[Row]:
    # Repeated values would flatter the compression: every rank and poll has noise of its own.
    ranks = [records(TENSORS, STEPS_A_POLL * POLLS, seed=rank) for rank in range(RANKS)]
    channels = [_channel(rank) for rank in range(RANKS)]
    addresses = [channel.start() for channel in channels]
    plans = {ranks[0][0].statistics.plan.hash: PlanColumns(plan_of(TENSORS).plan)}
    contexts = [RowContext(run="bench", attempt=0, rank=rank, incarnation=f"{rank:032x}") for rank in range(RANKS)]
    million = TENSORS * STEPS_A_POLL * STATISTICS * RANKS * POLLS / 1e6
    seconds, fetch_seconds, append_seconds = [], [], []
    try:
        with Store.open(folder / "store", create=True).claim("0/1", owner="bench") as writer:
            for poll in range(POLLS):
                for rank, channel in enumerate(channels):
                    for record in ranks[rank][poll * STEPS_A_POLL : (poll + 1) * STEPS_A_POLL]:
                        channel.publish(record)
                began = time.process_time()
                bodies = [_fetch(addresses[rank], contexts[rank], poll, plans) for rank in range(RANKS)]
                fetched = time.process_time()
                tables = decode(bodies)
                flushed = time.process_time()
                last = (poll + 1) * STEPS_A_POLL - 1
                writer.append(Batch(tables=tables, watermarks={f"{rank:032x}": last for rank in range(RANKS)}))
                seconds.append(time.process_time() - began)
                fetch_seconds.append(fetched - began)
                append_seconds.append(time.process_time() - flushed)
    finally:
        for channel in channels:
            channel.close()
    size = sum(path.stat().st_size for path in (folder / "store").glob("dataset=tensor_stats/**/*.parquet"))
    per_poll = million / POLLS
    note = f"{RANKS} ranks x {STEPS_A_POLL} steps x {TENSORS:,} tensors a flush"
    return [
        Row("ring to committed Parquet", statistics.median(seconds) / per_poll, _UNIT, note),
        Row("the least of it", min(seconds) / per_poll, _UNIT, "of 10 flushes: what other work on the machine leaves"),
        Row("of which both sides of the fetch", statistics.median(fetch_seconds) / per_poll, _UNIT),
        Row("of which sort, encode, commit", statistics.median(append_seconds) / per_poll, _UNIT),
        Row("bytes in the store", size / (million * 1e6), "bytes per sample", "before compaction"),
    ]


def _channel(rank: int) -> RankServer:
    identity = Identity(run="bench", launch_id="bench", rank=rank, world_size=RANKS, incarnation=f"{rank:032x}")
    return RankServer(
        identity=identity,
        config=ServeConfig(spool_dir=None),
        rules=(),
        settings={},
        planned_steps=None,
        boundary=ErrorBoundary(),
    )


def _fetch(address: str, context: RowContext, poll: int, plans: dict[str, PlanColumns]) -> ValidBody:
    after = poll * STEPS_A_POLL - 1
    request = urllib.request.Request(f"{address}/records?after={after}", headers={SCHEMA_HEADER: "1"})
    with urllib.request.urlopen(request) as answer:
        body = answer.read()
    checked = check(open_stream(body), plans, context, after=after, first_ordinal=1 + context.rank + 1000 * poll)
    assert checked.last == after + STEPS_A_POLL, "one poll must bring one flush"
    return checked


def _size() -> str:
    return f"{TENSORS:,} tensors x {STEPS_A_POLL} steps x {STATISTICS} statistics"


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
