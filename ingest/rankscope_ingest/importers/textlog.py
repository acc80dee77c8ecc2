"""Import text lines with a step followed by names and numbers, as most training scripts print them.

    iter 10: loss 9.61, time 62.3ms, mfu 3.40%                      nanoGPT
    step:1/6200 train_loss:10.9 train_time:285ms                    modded-nanogpt
    s:0 trl:11.01 norm:15.4                                         llm.c, log file
    step 1/18865 | loss 11.0 | 12.3 ms | 42 tok/s                   llm.c, console
    step:  1  loss:  8.05  memory:  1.9GiB(2.0%)  tps: 1,234        torchtitan
    [Rank 0] step=10, skipped=0, lr=[1e-05], mom=[…]                DeepSpeed

A name that is followed by a space must be the name of a known quantity. After the step, any name is accepted that is
followed by a colon or an equals sign. Lines without a step or without numbers are counted, but not stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope_contract.model.events import EventType
from rankscope_ingest.importers.common.aliases import UNITS, canonical, is_known
from rankscope_ingest.importers.common.importer import NOT_MINE, Detection, Faults, Imported
from rankscope_ingest.importers.common.lines import (
    prefix_fields,
    read_log,
    sample_lines,
    shown,
    torn_size,
    without_colours,
)
from rankscope_ingest.importers.common.values import NUMBER

MAX_LINE_CHARACTERS: Final = 8192

_BAR: Final = re.compile(
    r"\|\s*(?P<step>\d{1,15})/(?P<planned>\d{1,15}) "
    r"\[[^\[\],]{1,40},\s*[\d.?]{1,20}(?:it/s|s/it)(?:, (?P<numbers>[^\r\n]*))?\]"
)
_EPOCH: Final = re.compile(r"\bepoch:?[ =]{0,2}(?P<epoch>\d{1,9})\b", re.IGNORECASE)

_COUNT: Final = r"(?P<step>\d{1,3}(?:,\d{3})+|\d{1,15})"
_OF: Final = r"(?:\s*/\s*(?P<planned>\d{1,15}))?"
_STEPS: Final = (
    re.compile(rf"^s:{_COUNT}\b"),
    re.compile(rf"(?<![\w.-])(?:global[_ ]|training )?steps?\s*[:=#]?\s*\[?\s*{_COUNT}{_OF}", re.IGNORECASE),
    re.compile(rf"(?<![\w.-])(?!micro)[A-Za-z]+_steps?\s*[:=]\s*{_COUNT}{_OF}", re.IGNORECASE),
    re.compile(rf"(?<![\w.-])(?:iter(?:ation)?s?|updates?)\s*[:=#]?\s*\[?\s*{_COUNT}{_OF}", re.IGNORECASE),
)
_BARE: Final = re.compile(rf"^(?P<step>\d{{1,15}}) (?P<name>[A-Za-z_]{{2,20}}) (?P<value>{NUMBER})$")
_BARE_NAMES: Final = {"train": "loss", "val": "val_loss"}
_WORD: Final = r"[A-Za-z][\w./%-]{0,40}"
_UNIT: Final = r"(?P<unit>[mun]?s|sec|%|[KMGT]i?B|it/s|tok(?:ens)?/s(?:ec)?|samples/s(?:ec)?)"
_PAIR: Final = re.compile(
    rf"(?<![\w.])(?P<name>{_WORD}(?: (?:{_WORD}|\([\w/]{{1,16}}\))){{0,4}}?)(?P<mark>\s*[:=]\s*|\s+)"
    rf"(?:\[(?P<list>[-+.,eE\d ]{{1,400}})\]|(?P<clock>\d+:\d\d(?::\d\d)?)"
    rf"|(?P<value>{NUMBER})(?:\s?{_UNIT}(?!\s*[=:]))?)(?![\w:]|\.\w)",
    re.IGNORECASE,
)
_VALUE_FIRST: Final = re.compile(rf"(?:^|\|)\s*(?P<value>{NUMBER})\s*{_UNIT}\s*(?P<name>(?:\w+ )?MFU)?\s*(?=\||$)")
_NAME_OF_UNIT: Final = {"seconds": "step_time", "tokens/s": "tokens/s", "samples/s": "samples/s", "steps/s": "it/s"}
_CHECKPOINT: Final = re.compile(r"\b(?:checkpoint|ckpt)", re.IGNORECASE)
_EVALUATION: Final = re.compile(r"(?:^|[\[|(\s])(?:eval|valid|validation|val)(?:[\])|:\s]|$)", re.IGNORECASE)
_SHORT_NAMES: Final = {"train": "train_loss", "val": "val_loss"}  # "train=3.2, val=3.3"
_MEGATRON: Final = re.compile(r"consumed samples:|elapsed time per iteration")
_TYPICAL: Final = {"loss", "eval_loss", "step_seconds", "grad_norm", "learning_rate", "samples_per_second"}
_MANY: Final = 5
_WRAPPED: Final = re.compile(r"\b(?:(?:np|numpy|jnp|torch)\.\w{1,16}|tensor)\(([^(),]{1,40})(?:, [^()]{0,80})?\)")
"""A regular expression for a number as the `repr` of a type prints it.

Examples: np.float64(2.5), tensor(2.5, device='cuda:0').
"""
_FEWEST: Final = 2


class TextLog:
    """The importer of text lines that contain a step and numbers."""

    name = "textlog"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that the file is a text log whose lines contain a step and numbers.

        The confidence depends on the share of lines with a step and a typical quantity, such as the loss. The lines are
        sampled from the beginning, the middle and the end of the file.
        """
        if path.is_dir() or b"\0" in head[:4096]:
            return NOT_MINE
        sample = [line.decode(errors="replace") for line in sample_lines(path, head) if line.strip()]
        lines = [part for line in sample for part in bar_lines(line)]
        found = [record for line in lines if (record := numbers_of(line))]
        records = [
            record for record in found if len(record) > _MANY or any(canonical(key).name in _TYPICAL for key in record)
        ]
        if len(records) < min(_FEWEST, len(lines)) or not records:
            return NOT_MINE
        because = f"{len(records)} of {len(lines)} sampled lines contain a step and its loss"
        if any(_MEGATRON.search(line) for line in lines):
            return Detection(0.1, because)
        return Detection(0.35 + 0.5 * len(records) / len(lines), because)

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield one record per line with a step and numbers, then the facts about the run.

        A last line without line end may be incomplete. It counts as a record only if it has the same names as the
        previous record and as many decimals in its last number.
        """
        counts = {"other_lines": 0}
        torn = torn_size(path)
        previous: tuple[tuple[str, ...], int] | None = None

        def documents(number: int, line: bytes) -> Sequence[dict[str, Any]]:
            nonlocal previous
            found = []
            for part in bar_lines(line.decode(errors="replace")):
                text = without_colours(part)
                record = numbers_of(text) or _checkpoint(text)
                if record is None:
                    counts["other_lines"] += 1
                    continue
                shape = tuple(record), len(text.rstrip().rpartition(".")[2])
                if torn is not None and faults.read_bytes >= torn and shape != previous:
                    faults.add(number, f"the last line has no line end and may be incomplete: {shown(line)}")
                else:
                    found.append(record)
                previous = shape
            return found

        yield from read_log(path, faults, documents, counts)


def bar_lines(text: str) -> list[str]:
    """Return the successive states of a progress bar as lines such as `step 10/100 loss=2.1`.

    Text that is not a progress bar with numbers is returned unchanged.
    """
    if "|" not in text or ("it/s" not in text and "s/it" not in text):
        return [text]
    found = [line for part in text.split("\r") if (line := _bar_line(part)) is not None]
    return list(dict.fromkeys(found)) or [text]


def _bar_line(part: str) -> str | None:
    bar = _BAR.search(part)
    if bar is None or not bar["numbers"]:
        return None
    epoch = _EPOCH.search(part, 0, bar.start())
    before = f"epoch {epoch['epoch']} " if epoch else ""
    planned = "" if epoch else f"/{bar['planned']}"  # with an epoch, the plan is that of the epoch
    return f"{before}step {bar['step']}{planned} {bar['numbers']}"


def numbers_of(line: str) -> dict[str, Any] | None:
    """Return the step and the numbers on `line` by name; None if the line lacks a step or a number."""
    text = without_colours(line).strip()
    if not text or len(text) > MAX_LINE_CHARACTERS:
        return None
    text = _WRAPPED.sub(r"\1", text) if "(" in text else text
    if bare := _BARE.match(text):
        return {"step": bare["step"], _BARE_NAMES.get(bare["name"].lower(), bare["name"]): bare["value"]}
    step = _step(text)
    if step is None:
        return None
    before, after = text[: step.start()], text[step.end() :]
    pairs = dict(_pairs(before, any_name=False)) | dict(_pairs(after, any_name=True)) | dict(_values_first(after))
    if not pairs:
        return None
    if "val loss" in pairs and "train loss" in pairs:
        # nanoGPT's estimate over both sets is another quantity than the loss of each step.
        pairs["train_loss_estimate"] = pairs.pop("train loss")
    planned = step.groupdict().get("planned")
    count = step["step"].replace(",", "")
    split = {"split": "val"} if _EVALUATION.search(before) else {}
    return {**prefix_fields(before), **split, "step": f"{count}/{planned}" if planned else count, **pairs}


def _step(text: str) -> re.Match[str] | None:
    return next((found for pattern in _STEPS if (found := pattern.search(text))), None)


def _pairs(text: str, *, any_name: bool) -> Iterator[tuple[str, Any]]:
    for found in _PAIR.finditer(text):
        name = _SHORT_NAMES.get(found["name"].lower(), found["name"])
        if not is_known(name) and not (found["name"] == "time" and found["unit"] is not None):
            marked = any_name and not found["mark"].isspace()
            if not marked or " " in name:
                continue
        if found["list"]:
            yield name, _floats(found["list"])
        elif found["clock"]:
            yield name, found["clock"]
        elif not (found["unit"] and found["value"].lower() == "nan"):
            # "nanms" is the average of no measurement yet: absent.
            yield _with_unit(name, found["value"], found["unit"])


def _with_unit(name: str, value: str, unit: str | None) -> tuple[str, str]:
    """Return name and value of a quantity in a log line, with its unit appended to one of them.

    The unit follows the value if the name implies a unit; otherwise it follows the name, in parentheses.
    """
    if unit is None or unit.lower() not in UNITS:
        return name, value
    return (name, f"{value}{unit}") if canonical(name).unit else (f"{name} ({unit})", value)


def _values_first(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and value for each value with a unit but without a name, such as `| 42 tok/s`.

    The unit implies the name.
    """
    for found in _VALUE_FIRST.finditer(text):
        unit = UNITS[found["unit"].lower()]
        name = "mfu" if found["name"] else _NAME_OF_UNIT.get(unit.name or "")
        if name:
            yield name, f"{found['value']}{found['unit']}"


def _floats(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []


def _checkpoint(text: str) -> dict[str, Any] | None:
    """Return an object with a checkpoint event for a line that mentions a checkpoint and a step; otherwise None."""
    if len(text) > MAX_LINE_CHARACTERS or not _CHECKPOINT.search(text):
        return None
    step = _step(text)
    return None if step is None else {"event": EventType.CHECKPOINT, "step": step["step"], "line": text.strip()[:1000]}


IMPORTER = TextLog()
