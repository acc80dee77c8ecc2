"""Read lines that name their numbers by position: patterns, tables within a text, and lines with Chinese words.

A pattern of a tool, or one `--pattern` of the user, is a regular expression whose named groups are the counters
`epoch`, `step` (of `total`) and `batch` (of `batches`), and the quantities on a line. Rows of tables and Chinese words
are rewritten, so that the grammar of names and values can read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.keys import BATCH, EPOCH
from rankscope_ingest.importers.common.pairs import Line, named_value, parse
from rankscope_ingest.importers.common.values import NUMBER, whole

EVALUATION: Final = "evaluation"
"""Name of a group that begins an evaluation, which has the counters of the record before it."""

EVALUATION_MARK: Final = "[eval] "
"""The beginning of a rewritten line of an evaluation."""

_PLANS: Final = {"step": "total", "batch": "batches", "epoch": "epochs"}
_COUNTERS: Final = {*_PLANS, *_PLANS.values()}

# Logs of these tools are in `docs/tools.toml`. "^" is matched: a search would try each position of the text.
_PATTERNS: Final = (
    rf"^(?P<step>\d{{1,15}}) train (?P<loss>{NUMBER})$",  # build-nanogpt
    rf"^(?P<step>\d{{1,15}}) val (?P<val_loss>{NUMBER})$",
    # Keras
    r"^(\d+)/\1 (?:\[=*\]|━+|- \d+m?s)[\s-]*(?:\d+m?s\s+)?(?:\d+[mun]?s/(?:step|epoch))?[\s-]*",
    rf"^(?P<epoch>\d{{1,9}})\|(?P<step>\d{{1,15}})\|Loss: (?P<loss>{NUMBER}).*$",  # torchtune
    r"^\[(?:batch|ba|iteration|iter)=(?P<step>\d{1,15})(?:/(?P<total>\d{1,15}))?\]:?$",  # Composer
    r"^\[epoch=(?P<epoch>\d{1,9})(?:/\d+)?\]\[batch=(?P<batch>\d{1,15})(?:/(?P<batches>\d{1,15}))?\]:?$",
    r"^\[Eval batch=\d+/\d+\] (?P<evaluation>Eval) on .{0,80} data:$",
    r"^\[(?P<step>\d{1,15})\]\t",  # XGBoost, LightGBM
    rf"^(?P<step>\d{{1,15}}):\tlearn: (?P<loss>{NUMBER})",  # CatBoost
    # Darknet
    rf"^(?P<step>\d{{1,15}}): (?P<loss>{NUMBER}), (?P<avg_loss>{NUMBER}) avg(?: loss)?, (?P<lr>{NUMBER}) rate",
    rf"^Train loss (?P<step>\d{{1,15}}) (?P<loss>{NUMBER})(?= Grad Norm)",  # Tacotron 2
    rf"^Validation loss (?P<step>\d{{1,15}}): +(?P<val_loss>{NUMBER})",
    r"^\[(?P<step>\d{1,15}) \| (?P<elapsed>\d+\.\d+)\]",  # gpt-2-simple
    r"TRAIN Batch (?P<epoch>\d{1,9})/(?P<batch>\d{1,15})|(?P<evaluation>CV) Batch \d{1,9}/\d{1,15}",  # WeNet
    # timm
    (
        r"Train:\s+(?P<epoch>\d{1,9})(?:/\d{1,9} \(\s*\d+%\))? "
        r"\[\s*(?P<batch>\d{1,15})/(?P<batches>\d{1,15}) \(\s*\d+%\)\]"
    ),
    r"(?<=: )(?P<epoch>\d{1,9})epoch:train:\d{1,15}-(?P<batch>\d{1,15})batch: ",  # ESPnet
    # Levanter
    (
        r"Progress on:train (?P<step>\d{1,15})(?:\.\d)?it/(?P<total>\d{1,15})(?:\.\d)?it "
        r"rate:(?P<rate>\S{1,20}) remaining:(?P<remaining>\S{1,20}) elapsed:(?P<elapsed>\S{1,20}) postfix:"
    ),
)
_MATCHES: Final = [re.compile(text).match if text[0] == "^" else re.compile(text).search for text in _PATTERNS]


def match_of(text: str) -> re.Match[str] | None:
    """Return the match of the pattern of a tool in `text`, or None."""
    return next((found for match in _MATCHES if (found := match(text))), None)


def pattern_of(text: str) -> re.Pattern[str]:
    """Return the compiled `--pattern` of a user. Raises IngestError if it is invalid or names no quantity."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise IngestError(f"--pattern {text!r} is no regular expression: {error}") from error
    if not pattern.groupindex.keys() - _COUNTERS:
        raise IngestError(f"--pattern {text!r} names no quantity: add a group such as `(?P<loss>[0-9.]+)`")
    return pattern


def line_of(found: re.Match[str], counters: Mapping[str, Any]) -> Line:
    """Return the counters and the quantities in the groups of `found` and in the text around it.

    `counters` are those of the record before the line. Two underscores in the name of a group become a slash.
    """
    groups = {name: value for name, value in found.groupdict().items() if value is not None}
    line = parse(f"{found.string[: found.start()]}| {found.string[found.end() :]}".strip(), is_counted=True)
    if groups.pop(EVALUATION, None):
        line.prefix["split"] = "eval"
        line.counters = {**counters, **line.counters}
    for name, plan in _PLANS.items():
        count, total = (whole(groups.pop(group, "")) for group in (name, plan))
        if count is not None and name == EPOCH:
            line.counters[EPOCH] = float(count)
        elif count is not None:
            line.counters[BATCH if name == "batch" else name] = f"{count}/{total}" if total else count
    line.has_point |= any("." in text for text in groups.values())
    line.pairs = dict(named_value(name.replace("__", "/"), text) for name, text in groups.items()) | line.pairs
    return line


_HEADING: Final = re.compile(
    r"^\s*#?\s*(?:(?:epoch|step|iter(?:ation)?|class)(?: \([^()]{1,20}\))?\s{2,}[A-Za-z]|E\s{2,}#\s)", re.IGNORECASE
)
_HEADING_CELL: Final = re.compile(r"#|[A-Za-z_][\w./()@:%+ -]{0,80}:?")
_SHORT_NAMES: Final = {"E": EPOCH, "#": "step"}  # of spaCy
_COLUMNS: Final = re.compile(r"\s{2,}")
_BAR_BEHIND: Final = re.compile(r":\s+(?P<percent>\d{1,3})%.*$")
_CELL: Final = re.compile(
    r"[-+]?[\d.]+(?:e[-+]?\d+)?(?:[KMGTBm%]| ?m?s)?|\d+/\d+|nan|inf|\d+:\d\d(?::\d\d)?"
    r"|\d+ [dhm] \d+ [hms]|\[[-+.\de, ]*\]",
    re.IGNORECASE,
)
_IN_BRACKETS: Final = re.compile(r" \([^()]*\)$")
_ASIDE: Final = re.compile(rf"{_IN_BRACKETS.pattern}| (?=[KMGTB]$)|(?<=[dhm]),")
"""A regular expression for the parts of a cell such as `10 (0.5%)`, `12.5 M` or `41 m, 8 s` that are left out."""
_OF_ALL: Final = "all"
_FEWEST_CELLS: Final = 3


class Tables:
    """The tables within one text log, such as those of Ultralytics and fastai.

    The heading of a table begins with `epoch`, `step` or `class`, and its cells are separated by several blanks. A row
    has as many cells as the heading.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        """The names of the cells of the current table."""

    def row(self, line: str, counters: Mapping[str, Any]) -> str | None:
        """Return a row of the current table with the names of its cells; None if `line` is no row.

        `counters` are those of the record before it, which a row without a counter has.
        """
        if _HEADING.match(line):
            self._begin(_BAR_BEHIND.sub("", line))
            return None
        if not self.names:
            return None
        bar = _BAR_BEHIND.search(line)
        if bar and bar["percent"] != "100":
            return None
        text = _BAR_BEHIND.sub("", line).strip()
        cells = text.split()
        if len(cells) != len(self.names):  # a cell may have blanks
            cells = [_ASIDE.sub("", cell) for cell in _COLUMNS.split(text)]
        if len(cells) != len(self.names):
            return None
        is_summary = self.names[0].lower() == "class"
        values = cells[1:] if is_summary else cells
        if (is_summary and cells[0] != _OF_ALL) or not all(map(_CELL.fullmatch, values)):
            return None
        if is_summary:
            known = "".join(f"{name} {int(v) if name == EPOCH else v} " for name, v in counters.items())
            return f"{EVALUATION_MARK}{known}| " + _listed(self.names[1:], values)
        return f"{self.names[0]} {values[0]} | " + _listed(self.names[1:], values[1:])

    def _begin(self, heading: str) -> None:
        """Begin the table with this heading. In `Box(P  R  mAP50)`, the cells are named Box/P, Box/R and Box/mAP50."""
        parts = _COLUMNS.split(heading.lstrip("# ").rstrip())
        cells = parts if len(parts) >= _FEWEST_CELLS else heading.lstrip("# ").split()
        self.names = ()
        group = ""
        if len(cells) < _FEWEST_CELLS or not all(map(_HEADING_CELL.fullmatch, cells)):
            return
        for cell in cells:
            before, bracket, name = _IN_BRACKETS.sub("", cell).partition("(")
            group = f"{before}/" if bracket else group
            name = (name if bracket else before).rstrip("):").replace(" / ", "/")
            self.names += (f"{group}{_SHORT_NAMES.get(name, name)}",)


def _listed(names: Iterable[str], values: Iterable[str]) -> str:
    return " | ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))


_CHINESE: Final = {
    "训练损失": "train_loss", "验证损失": "val_loss", "测试损失": "test_loss", "平均损失": "avg_loss",
    "损失值": "loss", "损失": "loss", "学习率": "lr", "梯度范数": "grad_norm",
    "全局步数": "global_step", "训练步数": "step", "步数": "step", "步骤": "step", "迭代次数": "iter",
    "迭代": "iter", "训练轮次": "epoch", "训练轮数": "epoch", "轮次": "epoch", "轮数": "epoch",
    "周期": "epoch", "验证准确率": "val_accuracy", "准确率": "accuracy", "困惑度": "perplexity",
    "吞吐量": "throughput", "吞吐": "throughput", "剩余时间": "eta", "耗时": "step_time",
    "用时": "step_time", "显存": "memory", "样本/秒": "samples/s", "毫秒": "ms", "秒": "s",
}  # fmt: skip
_IS_CHINESE: Final = re.compile(r"[\u4e00-\u9fff，；（）＝]")
_WORDS: Final = re.compile("|".join(sorted(_CHINESE, key=len, reverse=True)))
_ORDINAL: Final = re.compile(
    r"第\s*(\d{1,15})\s*(?:/\s*(\d{1,15})\s*)?(?:个\s*)?"
    r"(步|轮|周期|迭代|epoch|step)",
    re.IGNORECASE,
)
_ORDINALS: Final = {"步": "step", "step": "step", "迭代": "iter"}
_MARKS: Final = str.maketrans("，；（）＝", ",;()=")


def in_english(text: str) -> str:
    """Return `text` with the English names of Chinese counters and quantities, such as `第 10 步，损失：2.3`."""
    if not _IS_CHINESE.search(text):
        return text
    text = _ORDINAL.sub(_ordinal, text.translate(_MARKS))
    return _WORDS.sub(lambda found: f" {_CHINESE[found[0]]} ", text)


def _ordinal(found: re.Match[str]) -> str:
    name = _ORDINALS.get(found[3].lower(), EPOCH)
    return f" {name} {found[1]}{f'/{found[2]}' if found[2] else ''} "
