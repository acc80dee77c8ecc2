"""Types of record fields, and their conversion to Arrow.

The contract imports only the standard library. Therefore callers pass the pyarrow module as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

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
