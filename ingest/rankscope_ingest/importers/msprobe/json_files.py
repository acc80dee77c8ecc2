"""What modules look like and where they are called from: `module_struct.json` and `stack_info.csv`."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rankscope_ingest.importers.common.importer import Faults, ImportedRecord
from rankscope_ingest.importers.common.json_text import Cut, JsonWindow, Malformed
from rankscope_ingest.importers.common.lines import read_lines, refuse_no_text

_CHUNK_BYTES: Final = 1 << 20


def members(path: Path, faults: Faults) -> Iterator[tuple[int, str, Any]]:
    """Yield (line, key, value) of the object in the file at `path`; of a cut or damaged one what stands before that."""
    window = JsonWindow(_chunks(path, faults))
    try:
        window.take("{")
        while window.peek() != "}":
            line = window.line_here
            key = window.value()
            window.take(":")
            value = window.value()
            yield line, str(key), value
            if window.peek() == ",":
                window.take(",")
    except Cut:
        faults.add(window.line_here, f"{path.name}: the file ends in the middle")
    except Malformed as error:
        faults.add(window.line_here, f"{path.name}: {error}")


def _chunks(path: Path, faults: Faults) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if file.tell() <= _CHUNK_BYTES:
                refuse_no_text(path, chunk[:4096])
            faults.read_bytes += len(chunk)
            yield chunk


_NAME: Final = re.compile(r"(?:(?P<vpp>\d{1,9}):)?(?P<module>.*)", re.DOTALL)
_TENSOR: Final = re.compile(r"size=\((?P<shape>[\d,\s]*)\), dtype=(?:torch\.)?(?P<dtype>\w+)")
_HEADER: Final = ["module_name", "stack_info"]
_MAX_STACK: Final = 1 << 20


def read_structure(path: Path, faults: Faults, *, rank: int | None, source: str) -> Iterator[ImportedRecord]:
    """Yield a row for each module that the file at `path` describes."""
    for line, name, described in members(path, faults):
        if not isinstance(described, dict):
            faults.add(line, f"{path.name}: {name[:80]!r} is no module")
            continue
        row = {"inputs": _tensors(described.get("input")), "outputs": _tensors(described.get("output"))}
        yield _record(name, row, rank=rank, attempt=0, source=source)


def read_stacks(path: Path, faults: Faults, *, rank: int | None, attempt: int, source: str) -> Iterator[ImportedRecord]:
    """Yield a row for each module whose call stack stands in the file at `path`."""
    limit = csv.field_size_limit(_MAX_STACK)
    try:
        reader = csv.reader(f"{line.decode(errors='replace')}\n" for _, line in read_lines(path, faults))
        for fields in reader:
            if fields == _HEADER or not fields:
                continue
            if len(fields) != len(_HEADER):
                faults.add(reader.line_num, f"{path.name}: {len(fields)} fields where two belong")
                continue
            yield _record(fields[0], {"stack": fields[1]}, rank=rank, attempt=attempt, source=source)
    except csv.Error as error:
        faults.add(reader.line_num, f"{path.name}: {error}")
    finally:
        csv.field_size_limit(limit)


def _record(name: str, row: Mapping[str, Any], *, rank: int | None, attempt: int, source: str) -> ImportedRecord:
    match = _NAME.fullmatch(name)
    assert match is not None  # it takes any text
    vpp = None if match["vpp"] is None else int(match["vpp"])
    own = {"module": match["module"], "vpp_stage": vpp, **row}
    return ImportedRecord(rows={"modules": [own]}, rank=rank, attempt=attempt, source=source)


def _tensors(slots: Any) -> str | None:
    """Return shape and dtype of each slot as JSON; null for what is no tensor."""
    if not isinstance(slots, dict):
        return None
    return json.dumps([_tensor(text) for slot, text in slots.items() if slot != "config"])


def _tensor(text: Any) -> dict[str, Any] | None:
    match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    if not match:
        return None
    return {"shape": [int(size[:20]) for size in match["shape"].split(",") if size.strip()], "dtype": match["dtype"]}
