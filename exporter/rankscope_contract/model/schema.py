"""Fields of the datasets whose rows ranks send, and of the record that a rank sends; types of fields; plans.

A dataset is one table of the store. A wire record is one `StepRecord`: it contains rows of several datasets, and refers
to tensors by their position in a plan. The storage package builds the datasets of the store from these fields.

The contract imports only the standard library. Therefore callers pass the pyarrow module as an argument.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.model.redaction import MAX_LABEL, redacted_name, short_name

ScalarName = Literal["bool", "int32", "int64", "float32", "float64", "string", "timestamp"]


@dataclass(frozen=True, slots=True)
class ListOf:
    """Field type: a list of values of one type."""

    item: FieldType


@dataclass(frozen=True, slots=True)
class StructOf:
    """Field type: a struct of named fields."""

    fields: tuple[Field, ...]


FieldType = ScalarName | ListOf | StructOf


@dataclass(frozen=True, slots=True)
class Field:
    """One column of a dataset: name, type, documentation, unit if it has one, and whether it may be null."""

    name: str
    type: FieldType
    doc: str = ""
    unit: str | None = None
    nullable: bool = True


def required(name: str, type: FieldType, doc: str = "", unit: str | None = None) -> Field:  # noqa: A002 - field word
    """Return a field that must not be null."""
    return Field(name, type, doc, unit, nullable=False)


def arrow_type(pa: ModuleType, type: FieldType) -> Any:  # noqa: A002 - field word
    """Return the Arrow type of the field type `type`; `pa` is the pyarrow module. Timestamps are UTC microseconds."""
    if isinstance(type, ListOf):
        return pa.list_(pa.field("item", arrow_type(pa, type.item)))
    if isinstance(type, StructOf):
        return pa.struct([arrow_field(pa, field) for field in type.fields])
    return pa.timestamp("us", tz="UTC") if type == "timestamp" else getattr(pa, type if type != "bool" else "bool_")()


def arrow_field(pa: ModuleType, field: Field) -> Any:
    """Return the Arrow field of `field`; `pa` is the pyarrow module."""
    return pa.field(field.name, arrow_type(pa, field.type), nullable=field.nullable)


def arrow_schema(pa: ModuleType, fields: tuple[Field, ...], metadata: dict[str, str] | None = None) -> Any:
    """Return the Arrow schema of `fields` with `metadata`; `pa` is the pyarrow module."""
    return pa.schema([arrow_field(pa, field) for field in fields], metadata=metadata)


STEP: Final = Field("step", "int64", "Step number of the training; may restart at a lower number in a new attempt.")
MICRO_STEP: Final = Field("micro_step", "int32", "Micro-batch within the step; null if the row covers the whole step.")
VPP_STAGE: Final = Field("vpp_stage", "int32", "Virtual pipeline stage (model chunk); null without one.")

TENSOR_FIELDS: Final = (
    required("kind", "string", "Quantity and stage of the step: see Kind."),
    required("tensor", "string", "Name of the parameter, module slot or call site."),
    Field("index", "int32", "Number of the head, expert or tuple slot; null for the whole tensor."),
    Field("placement", "string", "Placement of the tensor on this rank: full, shard, partial or replica."),
    Field("shard_group", "string", "Ranks that hold the other shards; null unless sharded."),
    Field("call_seq", "int64", "Order of the call within the step, if a tensor is measured more than once per step."),
)

SCALAR_FIELDS: Final = (
    required("name", "string"),
    Field("value", "float64", "Value of the scalar, also NaN and Inf; a scalar that was not logged has no row."),
    Field("unit", "string", "Unit of the value: seconds, bytes, tokens, …; null without a unit."),
    Field("labels", "string", "Labels of the scalar as canonical JSON object; null without labels."),
)

FEATURE_FIELDS: Final = (
    required("kind", "string"),
    required("module", "string"),
    Field("index", "int32", "Number of the head or expert; null for the whole module."),
    Field("value", "float32"),
)

HISTOGRAM_FIELDS: Final = (
    required("kind", "string"),
    required("tensor", "string"),
    required("scheme", "string", "Bins of the histogram: linear:lo:hi:n (n equal bins from lo to hi) or log2."),
    Field("below", "int64", unit="elements"),
    Field("above", "int64", unit="elements"),
    Field("nonfinite", "int64", unit="elements"),
    Field("counts", ListOf("int64"), unit="elements"),
)

HASH_FIELDS: Final = (
    required("kind", "string", "Quantity and stage of the step: see Kind."),
    required("tensor", "string", "Name of the parameter, state or buffer."),
    Field("vpp_stage", "int32", "Virtual pipeline stage (model chunk); null without one."),
    Field("replicas", "string", "Ranks that must hold the same elements, such as 0-7 or 1,5; null if no other must."),
    Field("dtype", "string"),
    Field("hash", "int64", "Hash of the exact bits of this rank's elements (docs/desync.md); equal on all replicas."),
    Field("norm", "float32", "Norm of the finite elements; null without a finite element."),
    Field("numel", "int64", unit="elements"),
)

COLLECTIVE_FIELDS: Final = (
    Field("call_seq", "int64", "Position among the rank's collectives of the step; null if Rankscope missed some."),
    required("op", "string", "Name of the collective in the backend."),
    Field("group", "string", "Description of the process group, else its name. Groups may share a description."),
    Field("group_size", "int32", unit="ranks"),
    Field("bytes", "int64", "Size of the message: the larger of this rank's input and output.", unit="bytes"),
    Field("dtype", "string"),
    Field("call_site", "string", "Place of the call in the innermost frame outside torch, such as model/loss.py[23]."),
    Field("t_start", "timestamp", "Time of the call, by the rank's clock."),
    Field("duration", "float64", "Duration on the device; null if the backend does not report it.", unit="seconds"),
    Field("collective_seq", "int64", "Sequence number of the call in its group; equal on all ranks of the group."),
    Field("group_id", "string", "Torch's name of the group, unique within the job."),
    Field("group_ranks", "string", "Ranks of the group, such as 0-2,5."),
    Field("state", "string", "Progress: left, or entered if the process ended in it; null if torch overwrote it."),
    Field("backend", "string", "gloo, nccl, …"),
    Field("is_p2p", "bool", "True for a message between two ranks: collective_seq counts such messages only."),
)

MODULE_FIELDS: Final = (
    required("module", "string"),
    Field("class", "string"),
    Field("inputs", "string", "Shape and dtype of each input of the module, as JSON."),
    Field("outputs", "string", "Shape and dtype of each output of the module, as JSON."),
    Field("placement", "string"),
    Field("stack", "string", "Python call stack at the call of the module."),
)

EVENT_FIELDS: Final = (
    required("type", "string", "Type of the event: see EventType."),
    Field("severity", "string", "Severity of the event: info, warning or critical."),
    Field("rule", "string", "Name of the rule that fired, which is unique in the configuration."),
    Field("kind", "string"),
    Field("tensor", "string"),
    Field("op", "string"),
    Field("value", "float64"),
    Field("baseline", "float64"),
    Field("threshold", "float64"),
    Field("pp_stage", "int32"),
    Field("vpp_stage", "int32"),
    Field("call_id", "int64", "Position of the tensor in the order of the calls of the step; null if unknown."),
    Field("message", "string"),
    Field("details", "string", "Details of the event as JSON; the keys depend on the type."),
)

NESTED: Final[dict[str, tuple[Field, ...]]] = {
    "scalars": SCALAR_FIELDS,
    "features": (*FEATURE_FIELDS, MICRO_STEP, VPP_STAGE),
    "histograms": (*HISTOGRAM_FIELDS, VPP_STAGE),
    "hashes": HASH_FIELDS,
    "collectives": (*COLLECTIVE_FIELDS, STEP),
    "modules": (*MODULE_FIELDS, VPP_STAGE),
    "events": (*EVENT_FIELDS, MICRO_STEP),
}
"""Datasets whose rows are sent inside a wire record, as a list of structs.

If a field of the struct is null, the value of the record's field with the same name is used.
"""

WIRE_VALUE_OPS: Final = ("norm", "min", "max", "mean", "norm_baseline", "mean_baseline")
WIRE_COUNT_OPS: Final = ("nans", "infs", "zeros", "numel")
"""Float statistics (value ops) and integer counts (count ops) of a plan that does not name its ops.

The first release wrote such plans, so these lists must never change.
"""

WIRE_FIELDS: Final = (
    required("seq", "int64"),
    Field("step", "int64"),
    Field("micro_step", "int32"),
    required("ts", "timestamp"),
    Field("plan", "string", "Hash of the plan of the statistics; null without statistics."),
    Field("values", ListOf("float32"), "Statistics: the plan's first for all tensors, the second, …; null: no value."),
    Field("counts", ListOf("int64"), "Counts: the plan's first for all tensors, …; null: no row in tensor_stats."),
    Field("clock_offset", "int64", "Sum of the jumps of the rank's clock since the process began, in µs; null: none."),
    *(Field(name, ListOf(StructOf(fields))) for name, fields in NESTED.items()),
)
"""Fields of a wire record, which has one row per StepRecord.

If the plan of the record has T tensors and V value ops (float statistics), the field `values` has V * T elements.
"""

WIRE_METADATA: Final = {"rankscope_schema": str(SCHEMA_VERSION)}


@dataclass(slots=True, unsafe_hash=True)
class PlanEntry:
    """Description of one tensor of a plan. Its position in the plan is its position in the statistics of a record.

    An entry is never changed. The class is not frozen, and its constructor accepts positional arguments: creating an
    object of a frozen class takes three times as long, with keyword arguments twice as long, and a plan may have
    200,000 entries.
    """

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
    shape_varies: bool = False
    """True if the tensor has another shape at each step. `shape` is empty then."""

    @property
    def series(self) -> tuple[Any, ...]:
        """Return the fields that identify the series of this entry. Shape and dtype of a series may change."""
        return self.kind, self.tensor, self.index, self.vpp_stage, self.micro_step, self.call_seq

    @property
    def label(self) -> str:
        return self.tensor if self.index is None else f"{self.tensor}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Plan:
    """Descriptions of the tensors whose statistics a record contains.

    A rank sends a plan once; records refer to the plan by the hash of its content.
    """

    entries: tuple[PlanEntry, ...]
    value_ops: tuple[str, ...] = WIRE_VALUE_OPS
    count_ops: tuple[str, ...] = WIRE_COUNT_OPS

    def to_json(self) -> str:
        """Return the plan as canonical JSON text, as served at `/plan/<hash>`."""
        entries = ",".join(_entry_texts(self.entries))
        value_ops, count_ops, version = map(_JSON.encode, (self.value_ops, self.count_ops, SCHEMA_VERSION))
        return f'{{"count_ops":{count_ops},"entries":[{entries}],"schema_version":{version},"value_ops":{value_ops}}}'

    @property
    def hash(self) -> str:
        return plan_hash(self.to_json())

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan in the JSON `text`. Keys of a newer release are ignored.

        Raises ValueError if `text` is not a plan.
        """
        try:
            document = json.loads(text)
            entries = tuple(_plan_entry(entry) for entry in document["entries"])
            return Plan(
                entries, _names(document, "value_ops", WIRE_VALUE_OPS), _names(document, "count_ops", WIRE_COUNT_OPS)
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a plan: {error!r}") from error


_JSON: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
_NAMES: Final = tuple(sorted(PlanEntry.__dataclass_fields__))
_KIND, _TENSOR = _NAMES.index("kind"), _NAMES.index("tensor")
_VALUES: Final = operator.attrgetter(*_NAMES)


def _entry_texts(entries: Iterable[PlanEntry]) -> Iterator[str]:
    """Yield the canonical JSON text of each entry.

    Many entries differ in the kind and the tensor only. The text of their other fields is built once: a fifth of the
    time, and 100,000 entries took 0.6 s.
    """
    known: dict[tuple[Any, ...], tuple[str, str, str]] = {}
    for values in map(_VALUES, entries):
        others = values[:_KIND] + values[_KIND + 1 : _TENSOR] + values[_TENSOR + 1 :]
        texts = known.get(others)
        if texts is None:
            fields = list(zip(_NAMES, values, strict=True))
            groups = fields[:_KIND], fields[_KIND + 1 : _TENSOR], fields[_TENSOR + 1 :]
            before, between, after = (_JSON.encode(dict(group))[1:-1] for group in groups)
            texts = known[others] = f'{{{before},"kind":', f',{between},"tensor":', f",{after}}}"
        yield f"{texts[0]}{_JSON.encode(values[_KIND])}{texts[1]}{_JSON.encode(values[_TENSOR])}{texts[2]}"


def plan_hash(text: str) -> str:
    """Return the hash of the plan whose canonical JSON is `text`. A rank serves the plan under this hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _names(document: dict[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(document.get(key, default))
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"not a plan: {key} is {names!r}")
    return names


def _plan_entry(entry: dict[str, Any]) -> PlanEntry:
    known = {name: value for name, value in entry.items() if name in PlanEntry.__dataclass_fields__}
    known["shape"], known["aliases"] = tuple(known.get("shape", ())), tuple(map(short_name, known.get("aliases", ())))
    for name in ("tensor", "module"):
        if known.get(name) is not None:
            known[name] = short_name(known[name])
    return PlanEntry(**known)


def canonical_labels(labels: dict[str, str] | None) -> str | None:
    """Return `labels` as JSON with sorted keys, secrets masked and long texts cut; None without labels."""
    if not labels:
        return None
    clean = {redacted_name(name): redacted_name(text, MAX_LABEL) for name, text in labels.items()}
    return json.dumps(clean, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
