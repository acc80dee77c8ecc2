"""Record a body, its plan and its rows with the code of this checkout: `python record_fixed_ops.py FOLDER`.

The files in this folder were written by the release whose plans do not name their ops. They must never be written
again: `test_old_bodies.py` reads them with the current code and expects the same rows.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pyarrow as pa

from rankscope_contract.model.events import Event
from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_exporter.records.step_record import NamedPlan, Scalar, Statistics, StepRecord
from rankscope_exporter.serving.wire_encoder import encode
from rankscope_ingest.record_channel.decode import decode
from rankscope_ingest.record_channel.validate import PlanCache, RowContext, check

CONTEXT = RowContext(run="old", attempt=0, rank=1, incarnation="0123456789abcdef")
VALUES = 6  # norm, min, max, mean, norm_baseline, mean_baseline
COUNTS = 4  # nans, infs, zeros, numel


def records(plan: Plan) -> list[StepRecord]:
    """Return three records: two with statistics (one tensor absent in the second) and one without a plan."""
    named, size = NamedPlan.of(plan), len(plan.entries)
    full = [None if at % 7 == 3 else at / 8 - 1 for at in range(VALUES * size)]
    counts = [at * at for at in range(COUNTS * size)]
    partial = [None if at % size == 1 else count for at, count in enumerate(counts)]
    return [
        StepRecord(ts=1_700_000_000_000_000, step=5, statistics=_statistics(named, full, counts)),
        StepRecord(ts=1_700_000_001_000_000, step=6, scalars=(Scalar("loss", math.nan),), events=(Event(type="note"),)),
        StepRecord(ts=1_700_000_002_000_000, step=7, statistics=_statistics(named, full[::-1], partial)),
    ]


def _statistics(named: NamedPlan, values: list[float | None], counts: list[int | None]) -> Statistics:
    return Statistics(named, pa.array(values, pa.float32()), pa.array(counts, pa.int64()))


def main(folder: Path) -> None:
    """Write `body.arrows`, `plan.json` and `rows.json` into `folder`."""
    plan = Plan(
        (
            PlanEntry(kind="param_before", tensor="w", dtype="float32", shape=(2, 3)),
            PlanEntry(kind="grad_reduced", tensor="w", dtype="bfloat16", shape=(2, 3)),
            PlanEntry(kind="act_out", tensor="layer", index=1, call_seq=2, micro_step=0, placement="shard"),
        )
    )
    body = encode(0, records(plan)).body
    cache = PlanCache()
    cache.add(plan.hash, plan.to_json())
    columns = cache.get(plan.hash)
    wire = pa.ipc.open_stream(body).read_all()
    valid = check(wire, {plan.hash: columns}, CONTEXT, after=-1, first_ordinal=0)
    rows = {name: table.to_pylist() for name, table in decode([valid]).items()}
    (folder / "body.arrows").write_bytes(body)
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    (folder / "rows.json").write_text(json.dumps(rows, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
