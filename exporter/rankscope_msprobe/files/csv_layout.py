"""Layout of msprobe's CSV output, and the mapping between the step numbers of msprobe and Rankscope.

    <output>/<Mon><DD>_<HH-MM-SS>-rank<R>-<8 hex>/<family>_<first>-<last>.csv
    vpp_stage,name,step[,micro_step],norm,min,max,mean,nans,zeros,shape,dtype

The time of a folder has no year and no time zone; msprobe writes it in UTC+8. msprobe counts steps from 0, Rankscope
from 1. msprobe measures Adam's moments before the step, Rankscope after it. The moments at msprobe's step s are
therefore those after Rankscope's step s. All readers and writers of msprobe files use this module. The functions have
no side effects.

Names and formats of msprobe's files other than statistics: call stacks, module structure, anomaly records.

An anomaly record has a tag such as `0:layers.0.input_1:0/rank3/actv`.
The elements of the tag are the model chunk, the name of the tensor, and the micro-batch; then the rank; then the task,
which is msprobe's term for the kind.

A family is the first word of a file name (`grad_reduced_0-4.csv`), of a TensorBoard task, or of an SQLite metric.
"""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.kinds import Kind

FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "actv": (Kind.ACT_IN, Kind.ACT_OUT),
    "actv_grad": (Kind.ACT_GRAD_IN, Kind.ACT_GRAD_OUT),
    "grad_unreduced": (Kind.GRAD_UNREDUCED,),
    "grad_reduced": (Kind.GRAD_REDUCED,),
    "exp_avg": (Kind.EXP_AVG,),
    "exp_avg_sq": (Kind.EXP_AVG_SQ,),
    "param_origin": (Kind.PARAM_BEFORE,),
    "param_updated": (Kind.PARAM_AFTER,),
    "other": (Kind.COMM_IN, Kind.COMM_OUT, Kind.GRAD_CLIPPED, Kind.MOMENTUM),
}
"""msprobe families of tensor statistics, and the kinds of Rankscope in each family.

The family `other` contains the kinds for which msprobe has no family.
"""

FEATURE_FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "attention_hook": ("attention_entropy", "softmax_max"),
    "linear_hook": ("stable_rank", "spectral_norm"),
    "moe_router_weight_hook": ("router_similarity",),
    "moe_router_logit_hook": ("router_entropy",),
    "other": ("direction_agreement",),
}
"""msprobe families of features, and the kinds of Rankscope in each family.

Features are numbers that are not tensor statistics.
"""

FAMILY_OF: Final[dict[str, str]] = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}

_TAILS: Final = tuple(
    re.compile(rf"(?s:.*)\.({word}(?s:.*))") for word in (r"layers?\.", r"embeddings?\.", "final", "output", "norm")
)
"""Substrings at which a shortened name begins, in msprobe's order.

The first of them that occurs in the name after a dot is used, at its last position in the name.
"""


def squashed(name: str) -> str:
    """Return `name` as msprobe's `squash_name`: `layers.0.weight` for `module.decoder.layers.0.weight`."""
    return next((match[1] for tail in _TAILS if (match := tail.fullmatch(name))), name)


class Squash:
    """Shortens names as msprobe's function `squash_name` does.

    If two names have the same short form, the later name is not shortened.
    """

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the short form of `name`, or `name` itself if another name already has this short form.

        Each call with the same name returns the same result.
        """
        known = self._given.get(name)
        if known is None:
            short = squashed(name)
            known = self._given[name] = name if short in self._taken else short
            self._taken.add(known)
        return known


LOCAL_TIME: Final = "local"
DEFAULT_TIME_ZONE: Final = "UTC+8"
"""The time zone of folder names in msprobe."""
SHANGHAI: Final = dt.timezone(dt.timedelta(hours=8))  # no daylight saving time since 1991

_OFFSET: Final = re.compile(r"UTC(?:(?P<sign>[+-])(?P<hours>\d{1,2})(?::(?P<minutes>[0-5]\d))?)?")

FLOAT_OPS: Final = ("norm", "min", "max", "mean")
OPS: Final = (*FLOAT_OPS, "nans", "zeros")
"""Columns of statistics in a CSV file, in the order in which Rankscope writes them.

In files that msprobe itself writes, the columns are in the order of msprobe's configuration.
"""

TENSOR_COLUMNS: Final = (*OPS, "shape", "dtype")

MOMENTS: Final = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
"""Kinds that msprobe measures before the optimizer step, and Rankscope after it."""

SLOTS: Final[dict[str, dict[str, Kind]]] = {
    "actv": {"input": Kind.ACT_IN, "output": Kind.ACT_OUT},
    "actv_grad": {"input": Kind.ACT_GRAD_IN, "output": Kind.ACT_GRAD_OUT},
}
"""msprobe families with row names that end in an input or output of the module, such as `.input` or `.output_1`."""

CALLS: Final = (Kind.COMM_IN, Kind.COMM_OUT)
"""Kinds whose row names are calls, such as `all_reduce@train.py[23]`.

msprobe itself writes no readable names for these rows.
"""

MICRO_STEP_FAMILIES: Final = ("actv", "actv_grad", "attention_hook", "moe_router_logit_hook")
"""msprobe families with CSV files that always have the column `micro_step`.

`grad_unreduced` has this column only if it is measured for each micro-batch.
"""

OTHER: Final = "other"
(DIRECTION,) = FEATURE_FAMILIES[OTHER]


@dataclass(frozen=True, slots=True)
class FeatureFamily:
    """An msprobe family of features, which are numbers that are not tensor statistics.

    `columns` maps each column to a kind of Rankscope. `suffix` is the end of the row names of the family.
    """

    columns: dict[str, str]
    suffix: str


_FEATURE_NAMES: Final = {
    "attention_hook": (("entropy", "softmax_max"), ".attention"),
    "linear_hook": (("sr", "kernel_norm"), ".linear"),
    "moe_router_weight_hook": (("router_weight_similarity",), ".moe_router"),
    "moe_router_logit_hook": (("per_token_expert_entropy",), ".moe_router"),
}

FEATURES: Final[dict[str, FeatureFamily]] = {
    family: FeatureFamily(dict(zip(columns, FEATURE_FAMILIES[family], strict=True)), suffix)
    for family, (columns, suffix) in _FEATURE_NAMES.items()
}
"""msprobe families of numbers that are not tensor statistics, by name.

msprobe's `stable_rank` is the Frobenius norm divided by the spectral norm, not squared.
"""

SCALARS: Final = "scalars"
SCALAR_COLUMNS: Final = ("value", "unit", "labels")
"""Columns of the family of scalars, which msprobe does not have.

The name of a row is the name of the scalar with its labels, as in event files. `labels` is JSON. `unit` and `labels`
may be empty.
"""

OWN_FAMILIES: Final = tuple(kind for kind, family in FAMILY_OF.items() if family == OTHER)
"""Kinds that have no family in msprobe.

Rankscope writes them to a family with the name of the kind, so that it can read the files again.
"""

TENSOR_FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    **{family: kinds for family, kinds in FAMILIES.items() if family != OTHER},
    **{kind: (kind,) for kind in OWN_FAMILIES},
}
"""Families of CSV files that contain tensor statistics, with the kinds of Rankscope in each family."""

KIND_OF_FAMILY: Final = {family: kinds[0] for family, kinds in TENSOR_FAMILIES.items() if family not in SLOTS}

KIND_OF_TASK: Final[dict[str, str]] = {
    "acc_grad": Kind.GRAD_UNREDUCED,
    "pre_grad": Kind.GRAD_UNREDUCED,
    "post_grad": Kind.GRAD_REDUCED,
    **KIND_OF_FAMILY,
}
"""The kind of each task in msprobe's tags, except `actv` and `actv_grad`.

For these two tasks, the kind depends on the slot in the name of the tensor. The place where msprobe reads a gradient
determines its kind.
"""

_FOLDER: Final = re.compile(
    r"(?:(?P<time>[A-Z][a-z]{2}\d{2}_\d{2}-\d{2}-\d{2})-)?rank(?P<rank>\d{1,9})(?:-(?P<tail>.*))?"
)
_FILE: Final = re.compile(
    r"(?P<family>[a-z][a-z_]*)_(?P<first>\d{1,18})-(?P<last>\d{1,18})(?:_part_(?P<part>\d+))?\.csv"
)
_TIME_FORMAT: Final = "%Y%b%d_%H-%M-%S"
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_LEAP_YEAR: Final = 2000

_FORMULA: Final = re.compile(r"'*[=+\-@]")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


_CALL: Final = re.compile(r"(?P<tensor>\w+@.*\[\d+\])(?:\.call_(?P<seq>\d{1,9}))?(?:_(?P<index>\d{1,9}))?", re.DOTALL)

SLOT_OF: Final[dict[str, str]] = {kind: slot for slots in SLOTS.values() for slot, kind in slots.items()}


@dataclass(frozen=True, slots=True)
class RankFolder:
    """Parsed name of the output folder of a rank.

    The name contains neither year nor time zone: `time` is in an arbitrary leap year and in UTC+8.
    """

    rank: int
    time: dt.datetime | None
    tail: str = ""


@dataclass(frozen=True, slots=True, order=True)
class FamilyFile:
    """Parsed name of one of msprobe's CSV files. Files of the same family sort by the first step in the name."""

    family: str
    first: int
    last: int
    part: int = 0


def parse_folder(name: str) -> RankFolder | None:
    """Return the parsed name of the output folder of a rank, or None if `name` has another form."""
    match = _FOLDER.fullmatch(name)
    if not match:
        return None
    return RankFolder(int(match["rank"]), parse_time(match["time"] or ""), match["tail"] or "")


def parse_time(text: str) -> dt.datetime | None:
    """Return the UTC+8 time in a text such as `Dec03_21-34-40`, in some leap year; None for another form."""
    try:
        return dt.datetime.strptime(f"{_LEAP_YEAR}{text}", _TIME_FORMAT).replace(tzinfo=SHANGHAI)
    except ValueError:
        return None


def check_time_zone(name: str) -> None:
    """Raise ValueError unless `name` is `local`, an offset (`UTC+8`, `UTC-03:30`) or a name (`Europe/Berlin`)."""
    _zone(name)


def _zone(name: str) -> dt.tzinfo | None:
    """Return the time zone with this name; None for the zone of the machine."""
    if name == LOCAL_TIME:
        return None
    if match := _OFFSET.fullmatch(name):
        minutes = 60 * int(match["hours"] or 0) + int(match["minutes"] or 0)
        if minutes < 24 * 60:
            return dt.timezone(dt.timedelta(minutes=-minutes if match["sign"] == "-" else minutes))
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, OSError, ValueError):
        raise ValueError(
            f"time_zone {name!r} is unknown: write local, an offset such as UTC+8, or a name such as Europe/Berlin"
        ) from None


def in_time_zone(moment: dt.datetime, time_zone: str) -> dt.datetime:
    """Return the time that clocks in `time_zone` show as `moment`. The time zone of `moment` is ignored."""
    zone = _zone(time_zone)
    return moment.replace(tzinfo=None).astimezone() if zone is None else moment.replace(tzinfo=zone)


def time_text(moment: dt.datetime, time_zone: str = DEFAULT_TIME_ZONE) -> str:
    """Return `moment` as the beginning of a folder name, such as `Dec03_21-34-40`, in every locale."""
    local = moment.astimezone(_zone(time_zone))
    return f"{_MONTHS[local.month - 1]}{local:%d_%H-%M-%S}"


def parse_file(name: str) -> FamilyFile | None:
    """Return the parsed name of one of msprobe's CSV files, or None if `name` has another form."""
    match = _FILE.fullmatch(name)
    if not match:
        return None
    return FamilyFile(match["family"], int(match["first"]), int(match["last"]), int(match["part"] or 0))


def folder_name(began: dt.datetime, rank: int, tail: str, time_zone: str = DEFAULT_TIME_ZONE) -> str:
    """Return the name of the output folder of a rank. `tail` is eight hexadecimal digits."""
    return f"{time_text(began, time_zone)}-rank{rank}-{tail}"


def file_name(family: str, block: int, steps: int, part: int = 0) -> str:
    """Return the name of the CSV file of `family` for block number `block`, where each block contains `steps` steps."""
    first = block * steps
    return f"{family}_{first}-{first + steps - 1}{f'_part_{part}' if part else ''}.csv"


def row_name(kind: str, tensor: str, index: int | None, call_seq: int | None = None) -> str:
    """Return the row name: the tensor, then the slot of the module, or the number of a collective after the first."""
    if kind in CALLS and call_seq:
        tensor = f"{tensor}.call_{call_seq}"
    return numbered(f"{tensor}.{SLOT_OF[kind]}" if kind in SLOT_OF else tensor, index)


def parse_call(name: str) -> tuple[str, int | None, int | None]:
    """Return (tensor, call number, tuple slot) from a collective's row name, with None for parts that it lacks."""
    match = _CALL.fullmatch(name)
    if not match:
        return name, None, None
    seq, index = (None if match[part] is None else int(match[part]) for part in ("seq", "index"))
    return match["tensor"], seq, index


def feature_name(family: str, module: str, index: int | None) -> str:
    """Return a feature's row name: module, suffix of its family (`.attention`), number of the head or expert."""
    return numbered(module + (FEATURES[family].suffix if family in FEATURES else ""), index)


def numbered(name: str, index: int | None) -> str:
    """Return `name`, followed by `_` and the number of the head, expert or tuple slot if `index` is not None."""
    return name if index is None else f"{name}_{index}"


def dtype_text(dtype: str) -> str:
    """Return a dtype in the form that msprobe writes, such as `torch.float32`."""
    return neutral(dtype if "." in dtype else f"torch.{dtype}")


def their_step(kind: str | None, step: int, first: int) -> int:
    """Return msprobe's number of our step `step` in a run that begins with `first`. It may be negative."""
    return step - first + 1 if kind in MOMENTS else step - first


def our_step(kind: str | None, step: int) -> int:
    """Return the Rankscope step number of msprobe's step `step`."""
    return step if kind in MOMENTS else step + 1


def neutral(text: str) -> str:
    """Return `text` as a CSV cell on one line that no spreadsheet takes for a formula; `plain` is the inverse."""
    clean = _CONTROL.sub("�", text)
    return f"'{clean}" if _FORMULA.match(clean) else clean


def plain(cell: str) -> str:
    """Return the text from which `neutral` made the CSV cell `cell`."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


Window = tuple[dt.datetime, dt.datetime]


def window(times: Sequence[str]) -> Window:
    """Return the two times (`Dec03_21-34-40`) in msprobe's `append_output`. Raises ValueError for another form."""
    if len(times) != 2:
        raise ValueError(f"append_output must be two folder times, such as Dec03_21-34-40, not {list(times)!r}")
    return _moment(times[0]), _moment(times[1])


def _moment(text: str) -> dt.datetime:
    moment = parse_time(text) if isinstance(text, str) else None
    if moment is None:
        raise ValueError(f"append_output: {text!r} is not a folder time: write it as in Dec03_21-34-40")
    return moment


def continued(names: Iterable[str], rank: int, begun: Window) -> str | None:
    """Return the output folder that the option `append_output` continues, or None if there is none.

    It is the latest folder of `rank` in `names` whose time is in the closed window `begun`. Folder names contain no
    year. A window whose end is before its start extends over the end of a year.
    """
    first, last = begun
    fitting = []
    for name in sorted(names):
        folder = parse_folder(name)
        if folder is None or folder.rank != rank or folder.time is None:
            continue
        inside = first <= folder.time <= last if first <= last else folder.time >= first or folder.time <= last
        if inside:
            fitting.append(((folder.time < first, folder.time), name))
    return max(fitting)[1] if fitting else None


CSV_KEYS: Final = ("vpp_stage", "name", "step")
"""First columns of each CSV file in which msprobe writes statistics."""
MICRO_STEP: Final = "micro_step"

STACKS_FILE: Final = "stack_info.csv"
STACKS_COLUMNS: Final = ("module_name", "stack_info")
STRUCTURE_FILE: Final = "module_struct.json"
ANOMALY_FOLDER: Final = "anomaly_detected"
ANOMALY_FILE: Final = "anomaly.json"
RANKED_ANOMALY_FILE: Final = "anomaly_analyse.json"
"""Name of the file with the most important anomalies of all ranks.

It repeats records of the anomaly files of the ranks.
"""

NOT_KNOWN: Final = -1
"""Number that represents an unknown call in an anomaly record."""

ANOMALY_TASKS: Final[dict[str, str]] = {
    Kind.GRAD_UNREDUCED: "acc_grad",
    Kind.GRAD_REDUCED: "post_grad",
    Kind.PARAM_BEFORE: "param_origin",
    Kind.PARAM_AFTER: "param_updated",
    Kind.ACT_IN: "actv",
    Kind.ACT_OUT: "actv",
    Kind.ACT_GRAD_IN: "actv_grad",
    Kind.ACT_GRAD_OUT: "actv_grad",
}
"""The msprobe task of each kind that has one.

For all other kinds, the task has the name of the kind. These include the moments, which have the same name in msprobe
and Rankscope.
"""


def anomaly_tag(
    kind: str,
    tensor: str,
    rank: int,
    *,
    index: int | None = None,
    micro_step: int | None = None,
    vpp_stage: int | None = None,
) -> str:
    """Return a tensor's tag in an msprobe anomaly record, such as `0:layers.0.input_1:0/rank3/actv`."""
    micro = "" if micro_step is None else f":{micro_step}"
    return f"{vpp_stage or 0}:{row_name(kind, tensor, index)}{micro}/rank{rank}/{ANOMALY_TASKS.get(kind, kind)}"


def anomaly_message(*, rule: str | None, tag: str, op: str | None, step: int, value: float, baseline: float) -> str:
    """Return the message of an msprobe anomaly record. `step` is the step number of msprobe."""
    return (
        f"Rule {rule} reports anomaly signal in ('{tag}', '{op}') at step {step}, "
        f"current value {value}, history mean {baseline}."
    )
