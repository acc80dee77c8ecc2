"""Fixed statuses for tests and for a look at the page in a browser."""

import dataclasses

from rankscope_ingest.http.status_page import RunStatus, ServiceStatus, Status, TargetStatus
from rankscope_ingest.live.progress import RunProgress
from rankscope_ingest.remote_write.senders import RefusedSender

STARTED = 1_767_225_600_000_000
HOSTILE = "</h3><script>alert(1)</script>\u202e&\"'\x1b[2J"

TARGETS = {"pending": 0, "up": 0, "draining": 0, "failing": 0, "gone": 0}
ABOUT = {"status": "ok", "reason": None, "version": "0.1.0", "schema_version": 1, "started_at": STARTED}
PLACE = {"store": "/data/history", "shard": "0/1", "url": "http://127.0.0.1:9470"}
COUNTS = dict.fromkeys(("rows_pending", "rows_committed", "commits", "records_lost", "samples_dropped"), 0)
TIMES = {"uptime_seconds": 93_784.2, "last_commit_ago_seconds": None}
SERVICE = ServiceStatus(targets=TARGETS, **ABOUT, **PLACE, **COUNTS, **TIMES)  # type: ignore[arg-type]

STATE = {"run": "pretraining", "attempt": 0, "state": "running", "reason": None, "started_at": STARTED}
RANKS = {"ranks_alive": 2, "world_size": 2, "rows_stored": 48_230_112, "lag_records": 3, "records_lost": 0}
STEPS = {"step": 12_500, "planned_steps": 100_000, "loss": 2.31, "tokens_per_second": 1_048_576.0}
STEPS |= {"eta_seconds": 176_400.0, "steps_per_second": 0.496}
PROGRESS = RunProgress(**STATE, **RANKS, **STEPS)  # type: ignore[arg-type]


def target(rank: int, **changes: object) -> TargetStatus:
    seconds = {"last_scrape_seconds": 0.012, "last_scrape_ago_seconds": 1.2, "last_sign_ago_seconds": 1.2}
    records = {"cursor": 12_499, "committed": 12_497, "head": 12_499, "lag_records": 2, "records_lost": 0}
    place = {"host": f"node{rank // 8:03}", "pid": 4000 + rank, "incarnation": f"i{rank}", "served_by": None}
    known = {"run": "pretraining", "attempt": 0, "rank": rank, "world_size": 2, "health": "up", "last_error": None}
    known |= {"url": f"http://10.0.0.{rank // 8 + 1}:{9400 + rank % 8}", "lag_seconds": 3.4, "ring_fill_ratio": 0.01}
    return TargetStatus(**(known | place | seconds | records | changes))


def run(state: str = "running", **changes: object) -> RunStatus:
    beside = {
        key: changes.pop(key) for key in ("goodput_ratio", "tags", "note", "last_seen_ago_seconds") if key in changes
    }
    return RunStatus(progress=dataclasses.replace(PROGRESS, state=state, **changes), **beside)  # type: ignore[arg-type]


def empty() -> Status:
    return Status(service=SERVICE, runs=(), targets=(), exporters=())


def small() -> Status:
    """Two ranks of which one fails, an earlier failed run, and an exporter that is down."""
    sender = RefusedSender(
        name="10.0.0.7 (Prometheus/3.5.0)", reason="unsupported: Content-Encoding lz4 is not supported",
        requests=1_250, last_request_ago_seconds=12.0,
    )  # fmt: skip
    counts = {"rows_pending": 5120, "rows_committed": 48_230_112, "commits": 9400, "records_lost": 17}
    counts |= {"samples_dropped": 2, "remote": {"rankscope_ingest_remote_write_samples_total": 125_000.0}}
    service = dataclasses.replace(
        SERVICE, **counts, last_commit_ago_seconds=4.25, targets=TARGETS | {"up": 1, "failing": 1},
        refused_senders=[sender],
    )  # fmt: skip
    refused = "http://10.0.0.1:9401: connection refused; is the rank still there?"
    reason = "rank 1: ValueError: loss is not finite"
    trial = {"run": "trial-3", "attempt": 2, "step": 812, "planned_steps": 1000, "ranks_alive": 0, "records_lost": 17}
    lost = {"loss": float("nan"), "nonfinite_loss": "loss", "eta_seconds": None, "started_at": STARTED - 1}
    labels = {"tags": {"size": "7b", "team": "ours"}, "note": "lr 3e-4\nas r2"}
    node = {"name": "node001", "url": "http://10.0.0.1:9100/metrics", "labels": {}, "up": True, "last_error": None}
    gpu = node | {"name": "gpu001", "url": "http://10.0.0.1:9835/metrics", "up": False}
    return Status(
        service=service,
        runs=(
            run("failed", reason=reason, **trial, **lost),
            run(goodput_ratio=0.9417, last_seen_ago_seconds=0.4, **labels),
        ),
        targets=(target(0), target(1, health="failing", last_error=refused, lag_records=340, lag_seconds=171.0)),
        exporters=(
            node | {"last_scrape_seconds": 0.02, "lag_seconds": 4.2, "samples": 1432},
            gpu
            | {"last_error": "connection refused", "lag_seconds": 171.0, "last_scrape_seconds": None, "samples": None},
        ),
    )


def large(ranks: int = 1000) -> Status:
    """The given number of ranks, of which a few are degraded, and runs of every state."""
    sick = {
        3: {"health": "failing", "last_error": "http://10.0.0.1:9403: no answer within 10 s", "lag_seconds": 512.0},
        77: {"health": "pending", "last_scrape_ago_seconds": None},
        400: {"lag_seconds": 95.0, "lag_records": 190, "ring_fill_ratio": 0.74},
        401: {"records_lost": 12},
        512: {"health": "gone"},
    }
    targets = [target(rank, world_size=ranks, **sick.get(rank, {})) for rank in range(ranks)]
    states = ("pending", "stalled", "completed", "stopped", "failed")
    others = []
    for number, state in enumerate(states, 1):
        name = f"ablation-{number:02} of the learning rate schedule, with warm-up"
        steps = {"step": None if state == "pending" else 100 * number, "planned_steps": 1000 if number % 2 else None}
        alive = {"ranks_alive": 0 if number > 2 else 8, "world_size": 8, "started_at": STARTED - number}
        others.append(run(state, run=name, reason=f"said why it is {state}" if number > 1 else None, **steps, **alive))
    service = dataclasses.replace(
        SERVICE,
        status="degraded",
        reason="rows come faster than the store takes them: pulling waits for commits",
        targets={"pending": 1, "up": ranks - 3, "draining": 0, "failing": 1, "gone": 1},
        rows_pending=3_998_120,
        rows_committed=2_148_230_112,
        last_commit_ago_seconds=41.0,
        records_lost=12,
    )
    whole = run(goodput_ratio=0.88, last_seen_ago_seconds=0.4, world_size=ranks, ranks_alive=ranks - 1)
    return Status(service=service, runs=(whole, *others), targets=targets, exporters=())
