"""Read msprobe's `module_struct.json` (module structure), `stack_info.csv` (call stacks) and anomaly records.

The key of an anomaly record does not contain the name of the anomalous statistic. If several statistics of a tensor are
anomalous, the file contains only the last one, which is named in the message. `micro_step` of a record is always 0; the
actual micro-batch is in the `tag_name` of the record, which also contains the name of the tensor.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rankscope_contract.model.events import EventType, Severity
from rankscope_contract.model.kinds import Kind
from rankscope_ingest.importers.common.importer import Faults, ImportedBlock, block_of
from rankscope_ingest.importers.common.lines import LogLines, checked_text
from rankscope_ingest.importers.common.values import Cut, JsonReader, Malformed, number, plain, whole
from rankscope_ingest.importers.msprobe.discovery import Named, parse_name
from rankscope_msprobe.files.csv_layout import KIND_OF_TASK, SLOTS, STACKS_COLUMNS, our_step

_NAME: Final = re.compile(r"(?:(?P<vpp>\d{1,9}):)?(?P<module>.*)", re.DOTALL)
_TENSOR: Final = re.compile(r"size=\((?P<shape>[\d,\s]*)\), dtype=(?:torch\.)?(?P<dtype>\w+)")
_SMALL_LIMIT: Final = 1 << 31
_KIND_OF_TASK: Final[dict[str, str]] = {
    **KIND_OF_TASK,
    # Older releases of msprobe write the slot of the module as the task.
    "input": Kind.ACT_IN,
    "output": Kind.ACT_OUT,
    "input_grad": Kind.ACT_GRAD_IN,
    "output_grad": Kind.ACT_GRAD_OUT,
}

_TAG: Final = re.compile(r"(?:\d{1,9}:)?(?P<name>.*?)(?::(?P<micro>\d{1,9}))?(?:/rank\d+/(?P<task>\w+))?", re.DOTALL)
"""The tag of a tensor, such as `0:layers.0.input_1:0/rank3/actv`: virtual stage, name, micro-batch, rank, task."""

_MESSAGE: Final = re.compile(
    r"Rule (?P<rule>\w+) reports .*, '(?P<op>\w+)'\) at step \d+"
    r"(?:, current value (?P<value>\S+), history mean (?P<baseline>\S+?)\.?$)?",
    re.DOTALL,
)


def members(path: Path, faults: Faults) -> Iterator[tuple[int, str, Any]]:
    """Yield (line number, key, value) for each member of the JSON object in the file at `path`.

    If the file is damaged, the members before the damage are yielded.
    """
    window = JsonReader(checked_text(path.read_bytes(), path, faults))
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
        faults.add(window.line_here, f"{path.name}: the file is truncated")
    except Malformed as error:
        faults.add(window.line_here, f"{path.name}: {error}")


def read_structure(path: Path, faults: Faults, *, rank: int | None, source: str) -> ImportedBlock:
    """Return one record per module that the file `module_struct.json` at `path` describes."""
    modules = []
    for line, name, described in members(path, faults):
        if not isinstance(described, dict):
            faults.add(line, f"{path.name}: the entry {name[:80]!r} does not describe a module")
            continue
        row = {"inputs": _tensors(described.get("input")), "outputs": _tensors(described.get("output"))}
        modules.append({**_module(name), **row, "rank": rank, "attempt": 0})
    return block_of("modules", modules, source)


def read_stacks(path: Path, faults: Faults, *, rank: int | None, attempt: int, source: str) -> ImportedBlock:
    """Return one record per module whose call stack is in the file `stack_info.csv` at `path`."""
    modules = []
    reader = csv.reader(f"{line.decode(errors='replace')}\n" for _, line in LogLines(path, faults))
    try:
        for fields in reader:
            if fields == [*STACKS_COLUMNS] or not fields:
                continue
            if len(fields) != len(STACKS_COLUMNS):
                faults.add(reader.line_num, f"{path.name}: {len(fields)} fields, expected 2")
                continue
            modules.append({**_module(fields[0]), "stack": fields[1], "rank": rank, "attempt": attempt})
    except csv.Error as error:
        faults.add(reader.line_num, f"{path.name}: {error}")
    return block_of("modules", modules, source)


def _module(name: str) -> dict[str, Any]:
    match = _NAME.fullmatch(name)
    assert match is not None  # the expression matches any text
    vpp = None if match["vpp"] is None else int(match["vpp"])
    return {"module": match["module"], "vpp_stage": vpp}


def _tensors(slots: Any) -> str | None:
    """Return shape and dtype of each input or output of a module as a JSON list.

    An element is null if the input or output is not a tensor.
    """
    if not isinstance(slots, dict):
        return None
    return json.dumps([_tensor(text) for slot, text in slots.items() if slot != "config"])


def _tensor(text: Any) -> dict[str, Any] | None:
    match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    if not match:
        return None
    return {"shape": [int(size[:20]) for size in match["shape"].split(",") if size.strip()], "dtype": match["dtype"]}


def read_anomalies(path: Path, faults: Faults, *, attempt: int, source: str) -> ImportedBlock:
    """Return one record with an anomaly event for each entry of the anomaly file at `path`."""
    events = []
    for line, key, entry in members(path, faults):
        step = whole(entry.get("step")) if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or step is None:
            faults.add(line, f"{path.name}: the entry {key[:80]!r} is not an anomaly record of msprobe")
            continue
        events.append({**_anomaly(entry, step), "attempt": attempt})
    return block_of("events", events, source)


def _anomaly(entry: Mapping[str, Any], step: int) -> dict[str, Any]:
    tag_name = str(entry.get("tag_name", ""))
    tag = _TAG.fullmatch(tag_name)
    assert tag is not None  # the expression matches any text
    name, task = tag["name"], tag["task"]
    text = str(entry.get("message", ""))
    found = _MESSAGE.search(text)
    message: dict[str, str | None] = found.groupdict() if found else {}
    if task in SLOTS:
        named = parse_name(task, name) or Named("", name)
    else:
        named = Named(str(_KIND_OF_TASK.get(task, "")), name)
    details = {
        "group_mates": entry.get("group_mates"),
        "index": named.index,
        "tag_name": tag_name,
    }
    return {
        "step": our_step(named.kind, step),
        "rank": _small(entry.get("rank")),
        "micro_step": _small(tag["micro"] and int(tag["micro"])),
        "type": EventType.ANOMALY,
        "severity": Severity.CRITICAL if message.get("rule") == "AnomalyNan" else Severity.WARNING,
        "rule": message.get("rule"),
        "kind": named.kind or None,
        "tensor": named.tensor,
        "op": message.get("op"),
        "value": number(plain(message.get("value") or "")),
        "baseline": number(plain(message.get("baseline") or "")),
        "pp_stage": _small(entry.get("pp_stage")),
        "vpp_stage": _small(entry.get("vpp_stage")),
        "call_id": _small(entry.get("call_id")),
        "message": text,
        "details": json.dumps(details),
    }


def _small(value: Any) -> int | None:
    """Return an integer from 0 to 2**31 - 1; None for any other value, such as -1, which msprobe writes for unknown."""
    number = whole(value)
    return number if number is not None and 0 <= number < _SMALL_LIMIT else None
