"""A store with two runs of one hour each, months apart, and the samples of one machine."""

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.storage.rows import table

from rankscope_storage.api.store import Batch, Store
from rankscope_storage.connection import Connection, connect
from rankscope_storage.prometheus.query import Matcher, MatchType, SeriesQuery
from rankscope_storage.prometheus.read import read

OPERATORS = {"=": MatchType.EQUAL, "!=": MatchType.NOT_EQUAL, "=~": MatchType.REGEX, "!~": MatchType.NOT_REGEX}
MARCH = int(dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC).timestamp() * 1000)
JULY = int(dt.datetime(2026, 7, 1, 12, tzinfo=dt.UTC).timestamp() * 1000)
ALWAYS = (0, 1 << 42)
LABELS = '{"cluster":"b","job":"j\\"ä"}'


def row(run: str, rank: int | None, step: int, ms: int, **more: Any) -> dict[str, Any]:
    return {"run": run, "attempt": 0, "rank": rank, "step": step, "ts": ms * 1000, "ts_origin": "rank", **more}


def stored(folder: Path, *commits: dict[str, pa.Table]) -> Connection:
    """Return a connection to a new store with these tables by dataset, in one commit for each argument."""
    with Store.open(folder, create=True).claim(owner="test") as writer:
        for tables in commits:
            writer.append(Batch(tables=tables, watermarks={}))
    return connect(folder)


def datasets(run: str, start_ms: int) -> dict[str, list[dict[str, Any]]]:
    moments = [(rank, step, start_ms + step * 60_000) for rank in (0, 1) for step in (1, 2, 3)]
    tensors = [
        row(run, rank, step, ms, kind=kind, tensor=tensor, norm=step + rank / 4, nans=0, norm_baseline=1.0)
        for rank, step, ms in moments
        for kind, tensor in (("grad_reduced", "layers.0.weight"), ("grad_reduced", "head"), ("param_after", "head"))
    ]
    odd = {"kind": "act_out", "tensor": "attn", "index": 3, "placement": "shard", "vpp_stage": 1}
    tensors.append(row(run, 1, 3, start_ms + 180_000, norm=float("nan"), **odd))
    scalars = [row(run, rank, step, ms, name="loss", value=1 / step) for rank, step, ms in moments]
    scalars += [
        row(run, 0, 1, start_ms + 60_000, name="tokens_total", unit="tokens", value=8.0),
        row(run, 0, 2, start_ms + 120_000, name="tokens_total", unit="tokens", value=-1.0),
        row(run, None, 2, start_ms + 120_000, name="accuracy", value=0.5),
        row(run, 0, 2, start_ms + 120_000, name="learning_rate", value=0.1, labels='{"group":"a|b"}'),
    ]
    heads = enumerate((2.0, 0.5))
    core = {"kind": "attention_entropy", "module": "core"}
    features = [row(run, 0, 2, start_ms + 120_000, index=head, value=value, **core) for head, value in heads]
    return {"tensor_stats": tensors, "scalars": scalars, "features": features}


def machine() -> list[dict[str, Any]]:
    common = {"run": "", "target": "node-1", "metric": "DCGM_TEMP", "ts_origin": "ingest"}
    return [
        {**common, "ts": (MARCH + 15_000 * n) * 1000, "labels": f'{{"gpu":"{gpu}"}}', "value": 40.0 + n}
        for n in range(3)
        for gpu in (0, 1)
    ] + [{**common, "metric": "up", "ts": MARCH * 1000, "labels": None, "value": 1.0}]


def brought_in() -> list[dict[str, Any]]:
    """Return what an importer makes of a dump of several runs: labels that live data have, under a run of its own."""
    common = {"run": "dump", "target": "", "metric": "rankscope_loss", "ts_origin": "file"}
    labels = '{"instance":"spring/0","job":"rankscope","rank":"0","run":"spring"}'
    return [{**common, "ts": (MARCH + ms) * 1000, "labels": labels, "value": 9.0} for ms in (1_000, 60_000)]


def pushed() -> list[dict[str, Any]]:
    """Return what a Prometheus of another cluster pushed; its series ended."""
    common = {"run": "", "target": "", "metric": "pushed", "ts_origin": "prometheus", "labels": LABELS}
    return [{**common, "ts": (MARCH + ms) * 1000, "value": value} for ms, value in ((0, 7.0), (15_000, None))]


class History:
    """Asks a store as Prometheus does."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def ask(
        self, *matchers, start=ALWAYS[0], end=ALWAYS[1], series=1000, samples=10_000, alone=False, last=False, **more
    ):
        """Return {labels: [(ms, value)]} for matchers (name, operator, value); `alone` and `last`: last samples."""
        given = tuple(Matcher(OPERATORS[operator], name, value) for name, operator, value in matchers)
        question = SeriesQuery(given, start, end, series_alone=alone, last_alone=last)
        (answer,) = read(self.connection, [question], max_series=series, max_samples=samples, **more)
        assert [one.labels for one in answer] == sorted({one.labels for one in answer})
        return {one.labels: list(zip(one.times_ms.tolist(), one.values.tolist(), strict=True)) for one in answer}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history") / "store"
    runs = [datasets(run, start) for run, start in (("spring", MARCH), ("summer/1", JULY))]
    commits = [*runs, {"samples": machine() + brought_in() + pushed()}]
    stored(folder, *({name: table(name, rows) for name, rows in commit.items()} for commit in commits)).close()
    return folder


@pytest.fixture(scope="module")
def history(folder: Path) -> Iterator[History]:
    with connect(folder) as connection:
        yield History(connection)
