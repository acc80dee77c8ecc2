"""Steps from months ago in a store, and the boards that show them through a Prometheus that scraped none of them."""

import itertools
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.dashboards.conftest import substituted

from rankscope_contract.metrics.catalogue import FEATURE_VALUE, STEP, TENSOR_BASELINE, TENSOR_VALUE
from rankscope_contract.metrics.spec import MetricSpec
from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import canonical_labels
from rankscope_dashboards.boards.elements.pages import all_panels
from rankscope_dashboards.generate import generated_files
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.base.schema import dataset_schema
from rankscope_storage.base.service_catalogue import CATALOG

RUN = "before"
STEPS, SECONDS_PER_STEP = 40, 15
CHOSEN = {"clock": ["sm"], "type": ["uncorrected"], "phase": ["data_wait", "checkpoint"]}
"""Label values that panels use."""

CHECKPOINT_STEP = 20
KINDS = (Kind.PARAM_AFTER, Kind.GRAD_REDUCED, Kind.ACT_OUT, Kind.EXP_AVG, Kind.COMM_OUT)
"""One kind of each panel that shows several kinds."""

SCALARS = [spec for spec in CATALOG.values() if (spec.stored_as or "").startswith("scalars:")]
BOARDS = {
    name: json.loads(text)
    for name, text in generated_files().items()
    if name.startswith("dashboards/") and ".json" in name
}
VARIABLES = {"$__rate_interval": "1m", "$__interval": "30s", "$__range": "10m", "$smooth": "1m", "$run": RUN}
VARIABLES |= {"$rank": ".+", "$kind": "grad_reduced", "$tensor": ".+", "$rows": ".+", "$lines": ".+"}


def put(folder: Path, then: int) -> None:
    """Store steps of two ranks from `then` (seconds) on. All values equal the step, those of rank 1 twice the step.

    The ranks saved one checkpoint, and the seconds of this phase are those of its step.
    """
    rows = [
        row for rank in (0, 1) for step in range(STEPS) for spec in SCALARS for row in _scalars(spec, rank, step, then)
    ]
    tensors = [_tensor(kind, rank, step, then) for kind in KINDS for rank in (0, 1) for step in range(STEPS)]
    feature = {"kind": "stable_rank", "module": "layer", "value": 2.0}
    tables = {
        name: pa.Table.from_pylist(made, schema=dataset_schema(name))
        for name, made in (
            ("scalars", rows),
            ("tensor_stats", tensors),
            ("attempts", [_attempt(step, then) for step in range(STEPS)]),
            ("events", [_incident(then), *(_checkpoint(rank, then) for rank in (0, 1))]),
            ("features", [_when(rank, step, then) | feature for rank in (0, 1) for step in range(STEPS)]),
        )
    }
    with Store.open(folder, create=True).claim(owner="before") as writer:
        writer.append(Batch(tables=tables, watermarks={}))


def _when(rank: int, step: int, then: int) -> dict[str, Any]:
    return {"run": RUN, "attempt": 0, "rank": rank, "step": step, "ts": (then + SECONDS_PER_STEP * step) * 1_000_000}


def _attempt(step: int, then: int) -> dict[str, Any]:
    """Return a version of the attempt, which is running until its last step."""
    ended = {"state": "completed", "ended_at": (then + SECONDS_PER_STEP * step) * 1_000_000}
    columns = {"rank": None, "started_at": then * 1_000_000, "planned_steps": STEPS, "last_step": step, "world_size": 2}
    state = ended if step == STEPS - 1 else {"state": "running"}
    return {**_when(0, step, then), "source_kind": "live", **columns, **state}


def _incident(then: int) -> dict[str, Any]:
    symptom = {"rule": "AnomalyNan", "kind": Kind.GRAD_REDUCED, "tensor": "weight", "op": "norm"}
    event = {"type": "incident", "severity": "critical", "message": "", "details": '{"state":"opened"}'}
    return {**_when(1, 12, then), **symptom, **event}


def _checkpoint(rank: int, then: int) -> dict[str, Any]:
    event = {"type": "phase", "severity": "info", "message": "", "details": '{"phase":"checkpoint"}'}
    return {**_when(rank, CHECKPOINT_STEP, then), **event}


def _tensor(kind: Kind, rank: int, step: int, then: int) -> dict[str, Any]:
    value = float(step * (rank + 1))
    numbers = {"norm": value, "norm_baseline": 1.0, "mean": value, "mean_baseline": 1.0, "nans": step}
    return {**_when(rank, step, then), "kind": kind, "tensor": "weight", "placement": "full", **numbers}


def _scalars(spec: MetricSpec, rank: int, step: int, then: int) -> Iterator[dict[str, Any]]:
    named = {"name": (spec.stored_as or "").removeprefix("scalars:"), "unit": spec.unit}
    for values in itertools.product(*(CHOSEN.get(label, ["x"]) for label in spec.labels)):
        at = CHECKPOINT_STEP if "checkpoint" in values else step
        labels = canonical_labels(dict(zip(spec.labels, values, strict=True)))
        if at <= step:
            yield {**_when(rank, step, then), **named, "labels": labels, "value": float(at * (rank + 1))}


def panels_of_the_past() -> dict[str, str]:
    """Return the queries whose metrics are all stored, by panel and position, as Grafana sends them."""
    stored = {spec.name for spec in SCALARS} | {STEP.name, TENSOR_VALUE.name, TENSOR_BASELINE.name, FEATURE_VALUE.name}
    stored |= {spec.name for spec in CATALOG.values() if spec.page == "service" and spec.stored_as}
    found = {}
    for board in BOARDS.values():
        for panel in all_panels(board):
            for target in panel.get("targets", ()):
                reads_store = 'job="rankscope"' in target["expr"]
                if reads_store and set(re.findall(r"rankscope_\w+", target["expr"])) <= stored:
                    found[f"{board['title']}: {panel['title']} {target['refId']}"] = substituted(
                        target["expr"], VARIABLES
                    )
    return found


def shown(prometheus: str, expression: str, then: int) -> list[list[float]]:
    start, end = (then + SECONDS_PER_STEP * step for step in (16, 24))
    data = _asked(f"{prometheus}/api/v1/query_range", query=expression, start=start, end=end, step=4 * SECONDS_PER_STEP)
    return [[float(value) for _, value in series["values"]] for series in data["result"]]


def listed(prometheus: str, then: int) -> dict[str, set[str]]:
    """Return the entries of the variable lists of a board in that time. Grafana requests them from `seriesEndpoint`."""
    found = {}
    for variable in BOARDS["dashboards/rankscope/tensors.json"]["templating"]["list"]:
        if variable["type"] == "query":
            text = substituted(variable["query"], VARIABLES)
            if ordered := re.fullmatch(r"query_result\((.+)\)", text):
                at = {"query": ordered[1], "time": then + STEPS * SECONDS_PER_STEP}
                runs = _asked(f"{prometheus}/api/v1/query", **at)["result"] if variable["name"] == "run" else ()
                found |= {"run": {one["metric"]["run"] for one in runs}} if runs else {}
                continue
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", text).groups()
            window = {"start": then, "end": then + STEPS * SECONDS_PER_STEP}
            found[label] = {
                one[label] for one in _asked(f"{prometheus}/api/v1/series", **{"match[]": selector}, **window)
            }
    return found


def _asked(url: str, **arguments: Any) -> Any:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(arguments)}", timeout=20) as answer:
        document = json.load(answer)
    assert "warnings" not in document, document["warnings"]
    return document["data"]
