"""Protobuf messages of an event file, restricted to the fields for numbers and texts; protobuf skips the other fields.

The messages are declared here because the package `tensorboard` (44 MB) includes a web server, and `tensorboardX`
imports torch if torch is installed. Tags are declared as bytes. As texts, one invalid UTF-8 tag would make a whole
record unreadable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from rankscope_storage.base.protobuf import message_classes

__all__ = ["SESSION_START", "DecodeError", "Event", "Histogram", "put_number", "scalar_value", "text_value"]

SESSION_START: Final = 1
_FLOAT: Final = 1
_DT_STRING: Final = 7
_BFLOAT16: Final = 14
_HALF: Final = 19

_EXACT_FIELD: Final = 1000
"""Number of a protobuf field that only Rankscope uses: the float64 value before it was rounded to `simple_value`.

Other readers skip the field."""

_MESSAGES: Final = message_classes(
    "rankscope.tensorboard",
    {
        "Event": "double wall_time = 1; int64 step = 2; bytes file_version = 3 what; Summary summary = 5 what; "
        "SessionLog session_log = 7 what; SourceMetadata source_metadata = 10",
        "SourceMetadata": "bytes writer = 1",
        "SessionLog": "int32 status = 1",
        "Summary": "repeated Value value = 1",
        "Value": "bytes tag = 1; float simple_value = 2 value; bytes histo = 5 value; TensorProto tensor = 8 value; "
        f"SummaryMetadata metadata = 9; double exact = {_EXACT_FIELD} exactly",
        "Histogram": "double low = 1; double high = 2; double count = 3; double total = 4; double squares = 5; "
        "repeated double limits = 6; repeated double counts = 7",
        "SummaryMetadata": "PluginData plugin_data = 1; bytes display_name = 2; bytes summary_description = 3; "
        "int32 data_class = 4",
        "PluginData": "bytes plugin_name = 1; bytes content = 2",
        "TensorProto": "int32 dtype = 1; TensorShape tensor_shape = 2; bytes tensor_content = 4; "
        "repeated float float_val = 5; repeated double double_val = 6; repeated int32 int_val = 7; "
        "repeated bytes string_val = 8; repeated int64 int64_val = 10; repeated bool bool_val = 11; "
        "repeated int32 half_val = 13; repeated uint32 uint32_val = 16; repeated uint64 uint64_val = 17",
        "TensorShape": "repeated Dim dim = 2",
        "Dim": "int64 size = 1",
    },
)
# The fields of a histogram are those of TensorFlow's HistogramProto, under other names.
Event, Histogram = _MESSAGES["Event"], _MESSAGES["Histogram"]

# numpy's type of one number in `tensor_content`, and the repeated field used otherwise, by TensorFlow's data type.
_CONTENT: Final = {
    1: "<f4",
    2: "<f8",
    3: "<i4",
    4: "u1",
    5: "<i2",
    6: "i1",
    9: "<i8",
    10: "?",
    17: "<u2",
    19: "<f2",
    22: "<u4",
    23: "<u8",
}
_REPEATED: Final[dict[int, str]] = {
    1: "float_val",
    2: "double_val",
    **dict.fromkeys((3, 4, 5, 6, 17), "int_val"),
    9: "int64_val",
    10: "bool_val",
    **dict.fromkeys((_BFLOAT16, _HALF), "half_val"),
    22: "uint32_val",
    23: "uint64_val",
}


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
    values: Sequence[float] = getattr(tensor, _REPEATED.get(tensor.dtype, ""), ())
    if len(values) != 1:
        return None
    if tensor.dtype in {_HALF, _BFLOAT16}:
        return _from_content(tensor.dtype, (int(values[0]) & 0xFFFF).to_bytes(2, "little"))
    return float(values[0])


def _from_content(dtype: int, content: bytes) -> float | None:
    if dtype == _BFLOAT16 and len(content) == 2:
        dtype, content = _FLOAT, bytes(2) + content
    form = _CONTENT.get(dtype)
    if form is None or np.dtype(form).itemsize != len(content):
        return None
    return float(np.frombuffer(content, form)[0])
