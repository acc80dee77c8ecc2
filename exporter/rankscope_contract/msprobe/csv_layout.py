"""The existing tool's output on disk, and how its numbers and ours correspond. Pure; all who write or read it share it.

    <output>/<Mon><DD>_<HH-MM-SS>-rank<R>-<8 hex>/<family>_<first>-<last>.csv
    vpp_stage,name,step[,micro_step],norm,min,max,mean,nans,zeros,shape,dtype

The time of a folder is that of Shanghai and has no year. Steps count from 0 where ours count from 1, and Adam's moments
are taken before the step, where ours are taken after it: the moments that stand at its step s are those that our step s
left behind.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.kinds import Kind
from rankscope_contract.msprobe.families import FAMILIES, FAMILY_OF, FEATURE_FAMILIES

SHANGHAI: Final = dt.timezone(dt.timedelta(hours=8))  # no summer time since 1991

OPS: Final = ("norm", "min", "max", "mean", "nans", "zeros")
"""The tool's own order is that of its configuration; this is ours."""

TENSOR_COLUMNS: Final = (*OPS, "shape", "dtype")

MOMENTS: Final = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
"""Kinds that the tool takes before the step."""

SLOTS: Final[dict[str, dict[str, Kind]]] = {
    "actv": {"input": Kind.ACT_IN, "output": Kind.ACT_OUT},
    "actv_grad": {"input": Kind.ACT_GRAD_IN, "output": Kind.ACT_GRAD_OUT},
}
"""Families whose names end in a slot of the module, such as `.input` or `.output_1`."""

CALLS: Final = (Kind.COMM_IN, Kind.COMM_OUT)
"""Kinds whose rows are of calls, such as `all_reduce@train.py[23]`; the tool writes nothing legible of them."""

MICRO_STEP_FAMILIES: Final = ("actv", "actv_grad", "attention_hook", "moe_router_logit_hook")
"""Families that always have the column; `grad_unreduced` has it when gradients were taken per micro-batch."""

OTHER: Final = "other"
(DIRECTION,) = FEATURE_FAMILIES[OTHER]


@dataclass(frozen=True, slots=True)
class FeatureFamily:
    """A family of numbers that are no statistics of a tensor: its columns as our kinds, and how its names end."""

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
"""`stable_rank` is the tool's: Frobenius norm over spectral norm, not squared."""

OWN_FAMILIES: Final = tuple(kind for kind, family in FAMILY_OF.items() if family == OTHER)
"""Kinds that the tool has no family for stand under their own names, so that they can be told apart when read back."""

TENSOR_FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    **{family: kinds for family, kinds in FAMILIES.items() if family != OTHER},
    **{kind: (kind,) for kind in OWN_FAMILIES},
}
"""Families of tensor statistics, and the kinds in each."""

KIND_OF_FAMILY: Final = {family: kinds[0] for family, kinds in TENSOR_FAMILIES.items() if family not in SLOTS}

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

_SLOT_OF: Final[dict[str, str]] = {kind: slot for slots in SLOTS.values() for slot, kind in slots.items()}


@dataclass(frozen=True, slots=True)
class RankFolder:
    """What the name of a rank's folder says. `time` is of a leap year that stands for the one not told."""

    rank: int
    time: dt.datetime | None
    tail: str = ""


@dataclass(frozen=True, slots=True, order=True)
class FamilyFile:
    """What the name of a file says; files of a family sort by their steps."""

    family: str
    first: int
    last: int
    part: int = 0


def parse_folder(name: str) -> RankFolder | None:
    """Return what `name` says if it is that of a rank's folder."""
    match = _FOLDER.fullmatch(name)
    if not match:
        return None
    return RankFolder(int(match["rank"]), parse_time(match["time"] or ""), match["tail"] or "")


def parse_time(text: str) -> dt.datetime | None:
    """Return a time such as `Dec03_21-34-40`, in a leap year of no meaning; None when it is no time."""
    try:
        return dt.datetime.strptime(f"{_LEAP_YEAR}{text}", _TIME_FORMAT).replace(tzinfo=SHANGHAI)
    except ValueError:
        return None


def time_text(moment: dt.datetime) -> str:
    """Return `moment` as the first part of a folder's name, the same under any locale."""
    local = moment.astimezone(SHANGHAI)
    return f"{_MONTHS[local.month - 1]}{local:%d_%H-%M-%S}"


def parse_file(name: str) -> FamilyFile | None:
    """Return what `name` says if it is that of a family's file."""
    match = _FILE.fullmatch(name)
    if not match:
        return None
    return FamilyFile(match["family"], int(match["first"]), int(match["last"]), int(match["part"] or 0))


def folder_name(began: dt.datetime, rank: int, tail: str) -> str:
    """Return the name of a rank's folder; `tail` is eight hexadecimal digits."""
    return f"{time_text(began)}-rank{rank}-{tail}"


def file_name(family: str, block: int, steps: int, part: int = 0) -> str:
    """Return the name of the file with the steps of `block`, of so many each."""
    first = block * steps
    return f"{family}_{first}-{first + steps - 1}{f'_part_{part}' if part else ''}.csv"


def row_name(kind: str, tensor: str, index: int | None, call_seq: int | None = None) -> str:
    """Return the name of a tensor's row: that of activations ends in the slot of the module, that of calls in the call.

    The first call of a step is not numbered; of activations the tool knows one call.
    """
    if kind in CALLS and call_seq:
        tensor = f"{tensor}.call_{call_seq}"
    return numbered(f"{tensor}.{_SLOT_OF[kind]}" if kind in _SLOT_OF else tensor, index)


def parse_call(name: str) -> tuple[str, int | None, int | None]:
    """Return tensor, call and index of a row of CALLS; of any other name, the name."""
    match = _CALL.fullmatch(name)
    if not match:
        return name, None, None
    seq, index = (None if match[part] is None else int(match[part]) for part in ("seq", "index"))
    return match["tensor"], seq, index


def feature_name(family: str, module: str, index: int | None) -> str:
    """Return the name of a feature's row."""
    return numbered(module + (FEATURES[family].suffix if family in FEATURES else ""), index)


def numbered(name: str, index: int | None) -> str:
    """Return the name of element `index`, or that of the whole."""
    return name if index is None else f"{name}_{index}"


def dtype_text(dtype: str) -> str:
    """Return a type as the tool writes it."""
    return neutral(dtype if "." in dtype else f"torch.{dtype}")


def their_step(kind: str | None, step: int, first: int) -> int:
    """Return the number that our `step` of a run whose first step is `first` has with the tool; may be negative."""
    return step - first + 1 if kind in MOMENTS else step - first


def our_step(kind: str | None, step: int) -> int:
    """Return the number that the tool's `step` has with us."""
    return step if kind in MOMENTS else step + 1


def neutral(text: str) -> str:
    """Return `text` as a cell that no spreadsheet takes for a formula, on one line; `plain` takes it back."""
    clean = _CONTROL.sub("�", text)
    return f"'{clean}" if _FORMULA.match(clean) else clean


def plain(cell: str) -> str:
    """Return the text that `neutral` made a cell of."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
