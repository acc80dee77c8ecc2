"""Selection of the first anomalies in the files `anomaly.json` of all ranks, in the order of msprobe's processor."""

from __future__ import annotations

import argparse
import heapq
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope_msprobe.files.csv_layout import ANOMALY_FILE, ANOMALY_FOLDER, NOT_KNOWN, RANKED_ANOMALY_FILE

_FORWARD: Final = 0
_STAGES: Final = {
    "actv": _FORWARD,
    **dict.fromkeys(("actv_grad", "pre_grad", "post_grad", "acc_grad"), 1),
    **dict.fromkeys(("exp_avg", "exp_avg_sq"), 2),
}
"""Stage of a training step in which msprobe measures a task, msprobe's term for a kind.

Anomalies of other tasks have the stage -1 and sort first within a micro-batch, as in msprobe.
"""

_DEFAULTS: Final[dict[str, Any]] = {
    **dict.fromkeys(("rank", "step", "micro_step", "pp_stage", "vpp_stage", "call_id"), 0),
    "tag_name": "",
    "message": "",
    "group_mates": None,
}
"""Fields of an anomaly in msprobe's order, and the values that msprobe uses for missing fields."""

_PART: Final = re.compile(r"(\d{1,18})(?:\s*[:-]\s*(\d{1,18}))?")

Anomaly = dict[str, Any]


def analyse_anomalies(
    data_path: str | Path, out_path: str | Path = "", topk: int = 8, step_list: str | Iterable[int] = ()
) -> dict[str, Anomaly]:
    """Write the first anomalies of all ranks to `anomaly_analyse.json`, print their messages, and return them by key.

    The order is that of msprobe: step, micro-batch, stage of the step, pipeline stage, order of calls. The content of
    the file is the returned dict.

    Args:
        data_path: folder with the files `rank<R>/anomaly.json`, usually `$MONITOR_OUTPUT_DIR/anomaly_detected`.
        out_path: folder of the result, or its file if the name ends in `.json`. The default is `data_path`.
        topk: largest number of anomalies.
        step_list: steps to analyse, as integers or as text with steps and ranges: `[1, 5]`, `3`, `1,5,10:20`. A range
            includes its last step. Empty selects all steps.

    Raises ValueError if an argument is wrong or if `data_path` contains no file of anomalies.
    """
    if not isinstance(topk, int) or isinstance(topk, bool) or topk <= 0:
        raise ValueError(f"topk must be a positive integer, not {topk!r}")
    steps = _steps(step_list)
    folder = Path(data_path).expanduser()
    found = (
        (key, anomaly)
        for path in _anomaly_files(folder)
        for key, anomaly in _anomalies(path)
        if not steps or any(anomaly["step"] in listed for listed in steps)
    )
    first = dict(heapq.nsmallest(topk, found, key=lambda item: _order(item[1])))
    target = Path(out_path).expanduser() if str(out_path) else folder
    if target.suffix != ".json":
        target /= RANKED_ANOMALY_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(first, indent=1), encoding="utf-8")
    print(f"{target}: the first {len(first)} anomalies")
    for number, anomaly in enumerate(first.values()):
        print(f"{number}: {anomaly['message']}")
    return first


def _steps(step_list: str | Iterable[int]) -> Sequence[Sequence[int]]:
    """Return the steps that `step_list` selects, as a sequence of lists or ranges of steps.

    If `step_list` has integers, the result has one list. If it is a text, the result has one range for each element of
    the text. An empty result selects all steps.
    """
    if not isinstance(step_list, str):
        listed = [*step_list]
        if any(not isinstance(step, int) for step in listed):
            raise ValueError(f"step_list must contain integers, not {step_list!r}")
        return [listed] if listed else []
    text = step_list.strip()
    if text[:1] + text[-1:] in {"[]", "()"}:
        text = text[1:-1].strip()
    parts = [part.strip() for part in text.removesuffix(",").split(",")] if text else []
    ranges = []
    for part in parts:
        match = _PART.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(
                f"step_list {step_list!r}: {part!r} is neither a step nor a range: write [1, 5] or 1,5,10:20"
            )
        ranges.append(range(first, last + 1))
    return ranges


def _anomaly_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob(f"*/{ANOMALY_FILE}"))
    if not found:
        below = folder / ANOMALY_FOLDER
        hint = f": use {below}" if below.is_dir() else ", such as rank0/anomaly.json"
        raise ValueError(f"{folder} contains no folder of a rank with a file {ANOMALY_FILE}{hint}")
    return found


def _anomalies(path: Path) -> Iterator[tuple[str, Anomaly]]:
    """Yield the key and the fields of each anomaly in a file `anomaly.json`.

    Entries that are not anomalies are counted, and reported on standard error.
    """
    from rankscope_ingest.importers.common.importer import Faults
    from rankscope_ingest.importers.msprobe.json_files import members

    faults = Faults()
    for line, key, entry in members(path, faults):
        anomaly = {**_DEFAULTS, **entry} if isinstance(entry, dict) else {}
        if all(isinstance(anomaly.get(name), type(value)) for name, value in _DEFAULTS.items() if value is not None):
            theirs = f"{anomaly['tag_name']}_step_{anomaly['step']}_call_{anomaly['call_id']}"
            # Rankscope appends the statistic to msprobe's key, so that each statistic has an entry.
            yield (key if key.startswith(theirs) else theirs), anomaly
        else:
            faults.add(line, f"the entry {key[:80]!r} is not an anomaly of msprobe")
    if faults.count:
        first = faults.first[0]
        text = f"{faults.count} entries are not analysed; line {first.line}: {first.text}"
        print(f"{path.parent.name}/{path.name}: {text}", file=sys.stderr)


def _order(anomaly: Anomaly) -> tuple[int, ...]:
    """Return the key by which msprobe sorts anomalies.

    Pipeline stages ascend for anomalies of the forward pass, and descend for all others.
    """
    stage = _STAGES.get(anomaly["tag_name"].rpartition("/")[2], NOT_KNOWN)
    sign = 1 if stage == _FORWARD else -1
    places = sign * anomaly["vpp_stage"], sign * anomaly["pp_stage"]
    return (anomaly["step"], anomaly["micro_step"], stage, *places, anomaly["call_id"])


def main() -> None:
    """Run `analyse_anomalies` with the options of msprobe's command: -d, -o, -k and -s."""
    parser = argparse.ArgumentParser(description="Write the first anomalies of all ranks to anomaly_analyse.json.")
    parser.add_argument(
        "-d", "--data_path", required=True, help="folder of the anomalies: monitor_output/anomaly_detected"
    )
    parser.add_argument("-o", "--out_path", default="", help="folder of anomaly_analyse.json; default: --data_path")
    parser.add_argument("-k", "--topk", type=int, default=8, help="largest number of anomalies; default: 8")
    parser.add_argument("-s", "--step_list", "--step", default="[]", help="only these steps: [1,5] or 1,5,10:20")
    try:
        analyse_anomalies(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
