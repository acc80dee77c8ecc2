"""Protobuf messages of an event file, restricted to the fields for numbers and texts; protobuf skips the other fields.

The messages are declared here because the package `tensorboard` (44 MB) includes a web server, and `tensorboardX`
imports torch if torch is installed. Tags are declared as bytes. As texts, one invalid UTF-8 tag would make a whole
record unreadable.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Final, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

__all__ = ["SESSION_START", "DecodeError", "Event", "Histogram", "put_number", "scalar_value", "text_value"]

SESSION_START: Final = 1
_FLOAT: Final = struct.Struct("<f")
_DT_STRING: Final = 7

_EXACT_FIELD: Final = 1000
"""Number of a protobuf field that only Rankscope uses: the float64 value before it was rounded to `simple_value`.

Other readers skip the field."""

_PACKAGE: Final = "rankscope.tensorboard"
_Field = descriptor_pb2.FieldDescriptorProto

# Message -> (number, name, type, repeated, oneof). A type in capitals is a message of this list.
_MESSAGES: Final[dict[str, tuple[tuple[int, str, str, bool, str], ...]]] = {
    "Event": (
        (1, "wall_time", "double", False, ""),
        (2, "step", "int64", False, ""),
        (3, "file_version", "bytes", False, "what"),
        (5, "summary", "Summary", False, "what"),
        (7, "session_log", "SessionLog", False, "what"),
        (10, "source_metadata", "SourceMetadata", False, ""),
    ),
    "SourceMetadata": ((1, "writer", "bytes", False, ""),),
    "SessionLog": ((1, "status", "int32", False, ""),),
    "Summary": ((1, "value", "Value", True, ""),),
    "Value": (
        (1, "tag", "bytes", False, ""),
        (2, "simple_value", "float", False, "value"),
        (5, "histo", "bytes", False, "value"),
        (8, "tensor", "TensorProto", False, "value"),
        (9, "metadata", "SummaryMetadata", False, ""),
        (_EXACT_FIELD, "exact", "double", False, "exactly"),
    ),
    "Histogram": (
        (1, "low", "double", False, ""),
        (2, "high", "double", False, ""),
        (3, "count", "double", False, ""),
        (4, "total", "double", False, ""),
        (5, "squares", "double", False, ""),
        (6, "limits", "double", True, ""),
        (7, "counts", "double", True, ""),
    ),
    "SummaryMetadata": (
        (1, "plugin_data", "PluginData", False, ""),
        (2, "display_name", "bytes", False, ""),
        (3, "summary_description", "bytes", False, ""),
        (4, "data_class", "int32", False, ""),
    ),
    "PluginData": ((1, "plugin_name", "bytes", False, ""), (2, "content", "bytes", False, "")),
    "TensorProto": (
        (1, "dtype", "int32", False, ""),
        (2, "tensor_shape", "TensorShape", False, ""),
        (4, "tensor_content", "bytes", False, ""),
        (5, "float_val", "float", True, ""),
        (6, "double_val", "double", True, ""),
        (7, "int_val", "int32", True, ""),
        (8, "string_val", "bytes", True, ""),
        (10, "int64_val", "int64", True, ""),
        (11, "bool_val", "bool", True, ""),
        (13, "half_val", "int32", True, ""),
        (16, "uint32_val", "uint32", True, ""),
        (17, "uint64_val", "uint64", True, ""),
    ),
    "TensorShape": ((2, "dim", "Dim", True, ""),),
    "Dim": ((1, "size", "int64", False, ""),),
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="rankscope/tensorboard.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        oneofs = list(dict.fromkeys(field[4] for field in fields if field[4]))
        for oneof in oneofs:
            message.oneof_decl.add(name=oneof)
        for number, field_name, type_, repeated, oneof in fields:
            field = message.field.add(
                name=field_name,
                number=number,
                label=_Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL,
            )
            if type_ in _MESSAGES:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{type_}"
            else:
                field.type = getattr(_Field, f"TYPE_{type_.upper()}")
            if oneof:
                field.oneof_index = oneofs.index(oneof)
    return file


# A separate pool, because the default one may contain TensorFlow's messages and duplicate names are an error.
_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())
Event, Histogram = (  # the fields of a histogram are those of TensorFlow's HistogramProto, under other names
    cast("Any", message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")))
    for name in ("Event", "Histogram")
)


# Format of one number in `tensor_content`, and the repeated field used otherwise, by TensorFlow's data type.
_CONTENT: Final = {1: "<f", 2: "<d", 3: "<i", 4: "<B", 5: "<h", 6: "<b", 9: "<q", 10: "<?", 17: "<H", 19: "<e"}
_CONTENT_UNSIGNED: Final = {22: "<I", 23: "<Q"}
_REPEATED: Final[dict[int, str]] = {
    1: "float_val",
    2: "double_val",
    3: "int_val",
    4: "int_val",
    5: "int_val",
    6: "int_val",
    9: "int64_val",
    10: "bool_val",
    17: "int_val",
    22: "uint32_val",
    23: "uint64_val",
}
_BFLOAT16: Final = 14
_HALF: Final = 19


def scalar_value(value: Any) -> float | None:
    """Return the number in a summary value, or None if the value contains anything other than one number."""
    which = value.WhichOneof("value")
    if which == "simple_value":
        return float(value.exact if value.WhichOneof("exactly") else value.simple_value)
    return _tensor_scalar(value.tensor) if which == "tensor" else None


def text_value(value: Any) -> str | None:
    """Return the first text in a summary value, or None."""
    if value.WhichOneof("value") != "tensor" or value.tensor.dtype != _DT_STRING or not value.tensor.string_val:
        return None
    text: bytes = value.tensor.string_val[0]
    return text.decode("utf-8", "replace")


def put_number(value: Any, number: float) -> None:
    """Store `number` in a summary value: as float32 for all readers, and exactly in a field for Rankscope."""
    value.simple_value = number
    if value.simple_value != number and not math.isnan(number):
        value.exact = number


def _tensor_scalar(tensor: Any) -> float | None:
    if math.prod(dim.size for dim in tensor.tensor_shape.dim) != 1:
        return None
    if tensor.tensor_content:
        return _from_content(tensor.dtype, tensor.tensor_content)
    if tensor.dtype in {_HALF, _BFLOAT16}:
        return _from_bits(tensor.dtype, tensor.half_val[0] & 0xFFFF) if len(tensor.half_val) == 1 else None
    values: Sequence[float] = getattr(tensor, _REPEATED.get(tensor.dtype, ""), ())
    return float(values[0]) if len(values) == 1 else None


def _from_content(dtype: int, content: bytes) -> float | None:
    if dtype == _BFLOAT16 and len(content) == 2:
        return _from_bits(dtype, int.from_bytes(content, "little"))
    form = _CONTENT.get(dtype) or _CONTENT_UNSIGNED.get(dtype)
    if form is None or struct.calcsize(form) != len(content):
        return None
    return float(struct.unpack(form, content)[0])


def _from_bits(dtype: int, bits: int) -> float:
    if dtype == _BFLOAT16:
        return float(_FLOAT.unpack((bits << 16).to_bytes(4, "little"))[0])
    return float(struct.unpack("<e", bits.to_bytes(2, "little"))[0])
