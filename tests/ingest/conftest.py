"""What the tests of the ingest room share: bodies as a rank encodes them, written independently of the decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from rankscope_contract.fields import arrow_schema
from rankscope_contract.records import WIRE_FIELDS, WIRE_METADATA

Encode = Callable[..., bytes]


def encode_records(
    records: Sequence[Mapping[str, Any]], *, schema: pa.Schema | None = None, compression: str | None = "lz4"
) -> bytes:
    schema = schema or arrow_schema(pa, WIRE_FIELDS, WIRE_METADATA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(pa.Table.from_pylist(list(records), schema=schema))
    return sink.getvalue().to_pybytes()


@pytest.fixture
def encode() -> Encode:
    return encode_records
