"""Layout of msprobe's CSV output, and the mapping between its numbers and ours. Used by all readers and writers. Pure.

    <output>/<Mon><DD>_<HH-MM-SS>-rank<R>-<8 hex>/<family>_<first>-<last>.csv
    vpp_stage,name,step[,micro_step],norm,min,max,mean,nans,zeros,shape,dtype

The time of a folder is Shanghai time, without a year. msprobe counts steps from 0, Rankscope from 1. msprobe measures
Adam's moments before the step, Rankscope after it. The moments at msprobe's step s are therefore those after our step
s.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.kinds import Kind
from rankscope_contract.msprobe.names import FAMILIES, FAMILY_OF, FEATURE_FAMILIES

SHANGHAI: Final = dt.timezone(dt.timedelta(hours=8))  # no daylight saving time since 1991

FLOAT_OPS: Final = ("norm", "min", "max", "mean")
OPS: Final = (*FLOAT_OPS, "nans", "zeros")
"""Columns of statistics, in our order. In msprobe the order is that of its configuration."""

TENSOR_COLUMNS: Final = (*OPS, "shape", "dtype")

MOMENTS: Final = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
"""Kinds that msprobe measures before the step."""

SLOTS: Final[dict[str, dict[str, Kind]]] = {
    "actv": {"input": Kind.ACT_IN, "output": Kind.ACT_OUT},
    "actv_grad": {"input": Kind.ACT_GRAD_IN, "output": Kind.ACT_GRAD_OUT},
}
"""Families whose row names end in a slot of the module, such as `.input` or `.output_1`."""

CALLS: Final = (Kind.COMM_IN, Kind.COMM_OUT)
"""Kinds whose row names are calls, such as `all_reduce@train.py[23]`. msprobe writes no readable name for them."""

MICRO_STEP_FAMILIES: Final = ("actv", "actv_grad", "attention_hook", "moe_router_logit_hook")
"""Families that always have the column `micro_step`. `grad_unreduced` has it if measured per micro-batch."""

OTHER: Final = "other"
(DIRECTION,) = FEATURE_FAMILIES[OTHER]


@dataclass(frozen=True, slots=True)
class FeatureFamily:
    """A family of numbers that are not tensor statistics: column -> kind of Rankscope, and the suffix of row names."""

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
"""Feature families by name. msprobe's `stable_rank` is the Frobenius norm divided by the spectral norm, not squared."""

OWN_FAMILIES: Final = tuple(kind for kind, family in FAMILY_OF.items() if family == OTHER)
"""Kinds without a family in msprobe. Their family has the name of the kind, which makes the files readable again."""

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
    """Parsed name of a rank's folder. The name has no year: the year of `time` is an arbitrary leap year."""

    rank: int
    time: dt.datetime | None
    tail: str = ""


@dataclass(frozen=True, slots=True, order=True)
class FamilyFile:
    """Parsed name of a file. Files of a family sort by their steps."""

    family: str
    first: int
    last: int
    part: int = 0


def parse_folder(name: str) -> RankFolder | None:
    """Return the parsed name of a rank's folder, or None for another name."""
    match = _FOLDER.fullmatch(name)
    if not match:
        return None
    return RankFolder(int(match["rank"]), parse_time(match["time"] or ""), match["tail"] or "")


def parse_time(text: str) -> dt.datetime | None:
    """Return a time such as `Dec03_21-34-40`, in an arbitrary leap year, or None if `text` is not such a time."""
    try:
        return dt.datetime.strptime(f"{_LEAP_YEAR}{text}", _TIME_FORMAT).replace(tzinfo=SHANGHAI)
    except ValueError:
        return None


def time_text(moment: dt.datetime) -> str:
    """Return `moment` as the first part of a folder name, independent of the locale."""
    local = moment.astimezone(SHANGHAI)
    return f"{_MONTHS[local.month - 1]}{local:%d_%H-%M-%S}"


def parse_file(name: str) -> FamilyFile | None:
    """Return the parsed name of a family's file, or None for another name."""
    match = _FILE.fullmatch(name)
    if not match:
        return None
    return FamilyFile(match["family"], int(match["first"]), int(match["last"]), int(match["part"] or 0))


def folder_name(began: dt.datetime, rank: int, tail: str) -> str:
    """Return the name of a rank's folder; `tail` is eight hexadecimal digits."""
    return f"{time_text(began)}-rank{rank}-{tail}"


def file_name(family: str, block: int, steps: int, part: int = 0) -> str:
    """Return the name of the file that contains block number `block` of `steps` steps each."""
    first = block * steps
    return f"{family}_{first}-{first + steps - 1}{f'_part_{part}' if part else ''}.csv"


def row_name(kind: str, tensor: str, index: int | None, call_seq: int | None = None) -> str:
    """Return the name of a tensor's row. It ends in the module slot (activations) or in the call number (collectives).

    The first call of a step has no number. msprobe has only one call per activation.
    """
    if kind in CALLS and call_seq:
        tensor = f"{tensor}.call_{call_seq}"
    return numbered(f"{tensor}.{_SLOT_OF[kind]}" if kind in _SLOT_OF else tensor, index)


def parse_call(name: str) -> tuple[str, int | None, int | None]:
    """Return tensor, call number and index of a row of a kind in CALLS. For another name, return (name, None, None)."""
    match = _CALL.fullmatch(name)
    if not match:
        return name, None, None
    seq, index = (None if match[part] is None else int(match[part]) for part in ("seq", "index"))
    return match["tensor"], seq, index


def feature_name(family: str, module: str, index: int | None) -> str:
    """Return the name of a feature's row."""
    return numbered(module + (FEATURES[family].suffix if family in FEATURES else ""), index)


def numbered(name: str, index: int | None) -> str:
    """Return the name of element `index`, or `name` for the whole tensor."""
    return name if index is None else f"{name}_{index}"


def dtype_text(dtype: str) -> str:
    """Return a dtype as msprobe writes it, such as `torch.float32`."""
    return neutral(dtype if "." in dtype else f"torch.{dtype}")


def their_step(kind: str | None, step: int, first: int) -> int:
    """Return msprobe's number of our step `step`, in a run whose first step is `first`. The result may be negative."""
    return step - first + 1 if kind in MOMENTS else step - first


def our_step(kind: str | None, step: int) -> int:
    """Return our number of msprobe's step `step`."""
    return step if kind in MOMENTS else step + 1


def neutral(text: str) -> str:
    """Return `text` as a one-line cell that a spreadsheet does not treat as a formula. `plain` is the inverse."""
    clean = _CONTROL.sub("�", text)
    return f"'{clean}" if _FORMULA.match(clean) else clean


def plain(cell: str) -> str:
    """Return the text from which `neutral` made `cell`."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


Window = tuple[dt.datetime, dt.datetime]


def window(times: Sequence[str]) -> Window:
    """Return the two moments of `append_output`, such as `Dec03_21-34-40`. Raises ValueError."""
    if len(times) != 2:
        raise ValueError(f"append_output must be two folder times, such as Dec03_21-34-40, not {list(times)!r}")
    return _moment(times[0]), _moment(times[1])


def _moment(text: str) -> dt.datetime:
    moment = parse_time(text) if isinstance(text, str) else None
    if moment is None:
        raise ValueError(f"append_output: {text!r} is not a folder time: write it as in Dec03_21-34-40")
    return moment


def continued(names: Iterable[str], rank: int, begun: Window) -> str | None:
    """Return the folder in `names` that `append_output` continues: the latest of `rank` in the closed window `begun`.

    Names have no year. A window whose end is before its start spans the turn of the year.
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
