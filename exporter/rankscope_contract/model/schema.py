"""The fields of every dataset, and of the record a rank sends.

A dataset is one table of the store. A wire record is one `StepRecord`: it carries rows of all datasets at once, and
tensors by position in a *plan* instead of by name. Three shapes of one truth, so they stand in one file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.model.fields import Field, ListOf, StructOf, required
from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, VALUE_OPS
from rankscope_contract.model.rollups import SCALAR_ROLLUP_FIELDS, TENSOR_ROLLUP_FIELDS

_STEP: Final = Field("step", "int64", "The training's own number; may rewind in a new attempt.")
_MICRO_STEP: Final = Field("micro_step", "int32", "Micro-batch within the step; null for what covers the whole step.")
_VPP_STAGE: Final = Field("vpp_stage", "int32", "Virtual pipeline stage (model chunk); null without one.")

COMMON_FIELDS: Final = (
    required("run", "string", "Name of the run."),
    Field("attempt", "int32", "0, 1, …: which launch of the run."),
    Field("rank", "int32", "Global rank; null for what concerns the whole run."),
    Field("incarnation", "string", "One exporter process; null for what no rank sent."),
    Field("seq", "int64", "0, 1, … within an incarnation; a gap is lost data."),
    Field("ordinal", "int64", "Arrival order within a run."),
    _STEP,
    _MICRO_STEP,
    _VPP_STAGE,
    Field("ts", "timestamp", "When it was measured, UTC, microseconds."),
    Field("ts_origin", "string", "Whose clock `ts` is: rank, log, file, ingest, exporter or prometheus."),
)

TENSOR_FIELDS: Final = (
    required("kind", "string", "What was measured, and at which moment: see Kind."),
    required("tensor", "string", "Name of the parameter, module slot or call site."),
    Field("index", "int32", "Head, expert or tuple slot; null for the whole tensor."),
    Field("placement", "string", "full, shard, partial or replica."),
    Field("shard_group", "string", "Ranks that hold the other parts; null unless sharded."),
    Field("call_seq", "int64", "Order of the call within the step, where a tensor is seen more than once."),
)

STATISTIC_FIELDS: Final = (
    *(Field(op, "float32", "Over finite elements; null without one.") for op in VALUE_OPS),
    *(Field(op, "int64", "Over all elements.", unit="elements") for op in COUNT_OPS),
    *(Field(op, "float32", "What the rules compared with.") for op in BASELINE_OPS),
)

SCALAR_FIELDS: Final = (
    required("name", "string"),
    Field("value", "float64", "NaN and Inf are values; an absent scalar has no row."),
    Field("unit", "string", "seconds, bytes, tokens, …; null when it has none."),
    Field("labels", "string", "Canonical JSON object of text labels; null without any."),
)

FEATURE_FIELDS: Final = (
    required("kind", "string"),
    required("module", "string"),
    Field("index", "int32", "Head or expert; null for the whole module."),
    Field("value", "float32"),
)

HISTOGRAM_FIELDS: Final = (
    required("kind", "string"),
    required("tensor", "string"),
    required("scheme", "string", "linear:lo:hi:n or log2."),
    Field("below", "int64", unit="elements"),
    Field("above", "int64", unit="elements"),
    Field("nonfinite", "int64", unit="elements"),
    Field("counts", ListOf("int64"), unit="elements"),
)

HASH_FIELDS: Final = (
    required("kind", "string", "What was read, and at which moment: see Kind."),
    required("tensor", "string", "Name of the parameter, state or buffer."),
    Field("vpp_stage", "int32", "Virtual pipeline stage (model chunk); null without one."),
    Field("replicas", "string", "Ranks that hold the same elements by construction, such as 0-7 or 1,5; null: none."),
    Field("dtype", "string"),
    Field("hash", "int64", "Of the exact bits of this rank's elements: docs/desync.md; equal on all replicas."),
    Field("norm", "float32", "Of the same elements, over finite ones; null without one."),
    Field("numel", "int64", unit="elements"),
)

COLLECTIVE_FIELDS: Final = (
    Field("call_seq", "int64", "Place among all collectives of the step on this rank; null where some were missed."),
    required("op", "string", "As the backend calls it."),
    Field("group", "string", "Description of the process group, else its name; many groups may share a description."),
    Field("group_size", "int32", unit="ranks"),
    Field("bytes", "int64", "Of what this rank gives or of what it gets, whichever is more.", unit="bytes"),
    Field("dtype", "string"),
    Field("call_site", "string", "The innermost place in code that is not torch's: model/loss.py[23]."),
    Field("t_start", "timestamp", "When this rank called it, by its own clock."),
    Field("duration", "float64", "On the device, where the backend says it.", unit="seconds"),
    Field("collective_seq", "int64", "Counted by the group: the same call on all of its ranks."),
    Field("group_id", "string", "Torch's name of the group, which no other group of the job has."),
    Field("group_ranks", "string", "Its ranks, such as 0-2,5."),
    Field("state", "string", "left, or entered when the rank was not through at its end; null when torch forgot it."),
    Field("backend", "string", "gloo, nccl, …"),
    Field("is_p2p", "bool", "A message between two ranks: its collective_seq counts those alone."),
)

MODULE_FIELDS: Final = (
    required("module", "string"),
    Field("class", "string"),
    Field("inputs", "string", "JSON: shape and dtype of each."),
    Field("outputs", "string", "JSON: shape and dtype of each."),
    Field("placement", "string"),
    Field("stack", "string", "Where the module was called from."),
)

EVENT_FIELDS: Final = (
    required("type", "string", "See EventType."),
    Field("severity", "string", "info, warning or critical."),
    Field("rule", "string", "Unique name of the configured rule."),
    Field("kind", "string"),
    Field("tensor", "string"),
    Field("op", "string"),
    Field("value", "float64"),
    Field("baseline", "float64"),
    Field("threshold", "float64"),
    Field("pp_stage", "int32"),
    Field("vpp_stage", "int32"),
    Field("call_id", "int64", "Order of first sight within the step."),
    Field("message", "string"),
    Field("details", "string", "JSON."),
)

SAMPLE_FIELDS: Final = (
    required("target", "string"),
    required("metric", "string"),
    Field("labels", "string", "Canonical JSON object."),
    Field("value", "float64", "Null where Prometheus said that the series had ended."),
)

RUN_FIELDS: Final = (
    required("state", "string", "See RunState."),
    Field("started_at", "timestamp"),
    Field("ended_at", "timestamp"),
    Field("planned_steps", "int64"),
    Field("last_step", "int64"),
    Field("world_size", "int32", unit="ranks"),
    Field("source_kind", "string", "live, or the importer that brought it."),
    Field("config", "string", "JSON, secrets left out."),
    Field("reason", "string", "Why it ended, in words."),
)

LABEL_FIELDS: Final = (
    Field("tags", "string", "JSON object of text, as people gave them; null in versions that say nothing of them."),
    Field("note", "string", "What people wrote about the run; null in versions that say nothing of it."),
)

ATTEMPT_FIELDS: Final = (*RUN_FIELDS, Field("launch_id", "string", "Equal on all ranks of one launch."))

TENSOR_DIMENSION_FIELDS: Final = (
    required("kind", "string"),
    required("tensor", "string"),
    Field("index", "int32", "Tuple slot; null for the whole tensor."),
    Field("shape", ListOf("int64")),
    Field("dtype", "string"),
    Field("numel", "int64", unit="elements"),
    Field("module", "string"),
    Field("aliases", ListOf("string"), "Other names of the same storage (tied weights)."),
)


def _dataset(*fields: Field) -> tuple[Field, ...]:
    """Return `fields` behind the common ones; a field of the same name takes the common one's place."""
    own = {field.name for field in fields}
    return (*(field for field in COMMON_FIELDS if field.name not in own), *fields)


DATASETS: Final[dict[str, tuple[Field, ...]]] = {
    "tensor_stats": _dataset(*TENSOR_FIELDS, *STATISTIC_FIELDS),
    "features": _dataset(*FEATURE_FIELDS),
    "histograms": _dataset(*HISTOGRAM_FIELDS),
    "hashes": _dataset(*HASH_FIELDS),
    "collectives": _dataset(*COLLECTIVE_FIELDS),
    "modules": _dataset(*MODULE_FIELDS),
    "scalars": _dataset(*SCALAR_FIELDS),
    "events": _dataset(*EVENT_FIELDS),
    "samples": _dataset(*SAMPLE_FIELDS),
    "runs": _dataset(*RUN_FIELDS, *LABEL_FIELDS),
    "attempts": _dataset(*ATTEMPT_FIELDS),
    "tensors": _dataset(*TENSOR_DIMENSION_FIELDS),
    "tensor_rollups": _dataset(*TENSOR_FIELDS, *TENSOR_ROLLUP_FIELDS),
    "scalar_rollups": _dataset(*(field for field in SCALAR_FIELDS if field.name != "value"), *SCALAR_ROLLUP_FIELDS),
}
"""Columns of each dataset of the store, in the order of the table."""

DIMENSIONS: Final = ("runs", "attempts", "tensors")
"""Append-only versions; a view shows the latest."""

TENSOR_ROW_KEY: Final = ("incarnation", "seq", "vpp_stage", "kind", "tensor", "index", "micro_step", "call_seq")
"""No two rows of `tensor_stats` agree on all of these."""

NESTED: Final[dict[str, tuple[Field, ...]]] = {
    "scalars": SCALAR_FIELDS,
    "features": (*FEATURE_FIELDS, _MICRO_STEP, _VPP_STAGE),
    "histograms": (*HISTOGRAM_FIELDS, _VPP_STAGE),
    "hashes": HASH_FIELDS,
    "collectives": (*COLLECTIVE_FIELDS, _STEP),
    "modules": (*MODULE_FIELDS, _VPP_STAGE),
    "events": (*EVENT_FIELDS, _MICRO_STEP),
}
"""Datasets that travel inside a wire record as a list of structs: what is null there is as the record has it."""

WIRE_VALUE_OPS: Final = (*VALUE_OPS, *BASELINE_OPS)
WIRE_COUNT_OPS: Final = COUNT_OPS

WIRE_FIELDS: Final = (
    required("seq", "int64"),
    Field("step", "int64"),
    Field("micro_step", "int32"),
    required("ts", "timestamp"),
    Field("plan", "string", "Hash of the plan that names the statistics; null without statistics."),
    Field("values", ListOf("float32"), "Statistic-major: all of WIRE_VALUE_OPS[0], then of [1], …; a null is absent."),
    Field("counts", ListOf("int64"), "Statistic-major over WIRE_COUNT_OPS; a tensor with null counts has no row."),
    *(Field(name, ListOf(StructOf(fields))) for name, fields in NESTED.items()),
)
"""One row per StepRecord. With T entries in the plan, `values` has len(WIRE_VALUE_OPS) * T elements."""

WIRE_METADATA: Final = {"rankscope_schema": str(SCHEMA_VERSION)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """What stands at one position of a record's statistics."""

    kind: str
    tensor: str
    index: int | None = None
    vpp_stage: int | None = None
    micro_step: int | None = None
    call_seq: int | None = None
    placement: str = "full"
    shard_group: str | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    module: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Return the name that people and pages see: parts of a tensor are told apart by their number."""
        return self.tensor if self.index is None else f"{self.tensor}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Plan:
    """The names behind the numbers: sent once, then known by the hash of its content."""

    entries: tuple[PlanEntry, ...]

    def to_json(self) -> str:
        """Return the canonical JSON text that `/plan/<hash>` serves."""
        document = {"schema_version": SCHEMA_VERSION, "entries": [asdict(entry) for entry in self.entries]}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @property
    def hash(self) -> str:
        """Return 32 hex digits of the SHA-256 of the canonical JSON."""
        return plan_hash(self.to_json())

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan in `text`; unknown keys of a newer sender are ignored. Raises ValueError on anything else."""
        try:
            entries = json.loads(text)["entries"]
            return Plan(tuple(_plan_entry(entry) for entry in entries))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a plan: {error!r}") from error


def plan_hash(text: str) -> str:
    """Return the hash under which the plan of this canonical JSON `text` is served."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plan_entry(entry: dict[str, Any]) -> PlanEntry:
    known = {name: value for name, value in entry.items() if name in PlanEntry.__dataclass_fields__}
    for name in ("shape", "aliases"):
        known[name] = tuple(known.get(name, ()))
    return PlanEntry(**known)


def canonical_labels(labels: dict[str, str] | None) -> str | None:
    """Return labels as the text of a `labels` column: sorted JSON, or None without any."""
    if not labels:
        return None
    return json.dumps(labels, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
