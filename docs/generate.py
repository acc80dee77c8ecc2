"""Write the generated parts of the reference pages: `python docs/generate.py [--check]`.

A generated part is between `<!-- generated: name -->` and `<!-- end -->`; the other text is written by hand. The
meaning
of settings is in `settings.toml`, which must describe every setting.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined
from typer.models import ArgumentInfo

from rankscope.commands import subcommands
from rankscope.sizing.costs import EXTRAPOLATED, Costs, Line, Load, lines, short_number
from rankscope_contract.metrics import catalogue
from rankscope_contract.model import schema
from rankscope_contract.model.kinds import OPS
from rankscope_contract.model.schema import Field, FieldType, ListOf, StructOf
from rankscope_contract.rules import rule_classes
from rankscope_contract.rules.expression import GRADIENT, SERIES_KINDS, WORDS
from rankscope_contract.rules.score import CONDITIONS, RANKS_RULES, SCORE_RULES, ScoreRule
from rankscope_exporter import CaptureConfig, MonitorConfig, ServeConfig
from rankscope_exporter.config.monitor_config import HardwareConfig
from rankscope_exporter.monitors.throughput import ThroughputConfig
from rankscope_exporter.records.record import AMOUNTS, LABEL_OF_GROUP
from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.importers import Faults, ImportedBlock, find_importer
from rankscope_ingest.importers.common.log_names import names_of
from rankscope_storage.base import service_catalogue
from rankscope_storage.base.datasets import COMMON_FIELDS, DATASETS
from rankscope_view.data.series import SPEEDS

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
MEANINGS = DOCS / "settings.toml"
TOOLS = DOCS / "tools.toml"


def pages() -> dict[Path, str]:
    """Return the new text of every page with a generated part."""
    made = {}
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if BLOCK.search(text):
            made[path] = BLOCK.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", text)
    return made


def stale() -> list[str]:
    """Return the names of the pages whose generated parts are out of date."""
    return [path.name for path, text in pages().items() if path.read_text(encoding="utf-8") != text]


def metric_table(page: str) -> str:
    """Return the table of the metrics on one kind of page: `rank` or `service`."""
    rows = (
        (
            f"`{spec.name}`",
            spec.type,
            _labels(spec),
            spec.help,
            f"`{spec.stored_as}`" if spec.stored_as else "live only",
        )
        for spec in service_catalogue.CATALOG.values()
        if spec.page == page
    )
    return table(("metric", "type", "labels", "meaning", "in the store"), rows)


def dataset_tables() -> str:
    """Return one table of columns for each dataset, and first the columns that every dataset has."""
    parts = [f"### Columns of every dataset\n\n{_field_table(COMMON_FIELDS)}"]
    for name, columns in DATASETS.items():
        own = [column for column in columns if column not in COMMON_FIELDS]
        parts.append(f"### `{name}`\n\n{_field_table(own)}")
    return "\n\n".join(parts)


def wire_table() -> str:
    """Return the table of the fields of a record in the record channel."""
    return _field_table(schema.WIRE_FIELDS)


def rule_table() -> str:
    """Return the table of rules with their arguments and defaults."""
    rows = []
    for name, cls in sorted(rule_classes().items()):
        arguments = ", ".join(f"`{field.name}`" + _default_of(field) for field in fields(cls))
        rows.append((f"`{name}`", (cls.__doc__ or "").strip().splitlines()[0], arguments))
    return table(("rule", "fires", "arguments"), rows)


def score_rule_table(rules: Iterable[ScoreRule] = (*SCORE_RULES, *RANKS_RULES)) -> str:
    """Return the table of rules with a score, and their scores below it."""
    rows, scores = [], []
    for rule in rules:
        not_judged = [f"{CONDITIONS[name]}" for name in rule.holds_for]
        not_judged += [f"the process has measured fewer than {rule.after_steps + 1} steps"] if rule.after_steps else []
        judged = "tensor" if rule.is_of_tensors else "step"
        if rule.scope == "ranks":
            judged = "tensor, between ranks"
            not_judged.append(f"the score was not at most the limit for {rule.latch} steps before")
        meaning = f"{rule.summary[:1].upper()}{rule.summary[1:]}."
        rows.append((f"`{rule.name}`", meaning, f"{rule.above:g}", rule.severity, judged, "; ".join(not_judged)))
        scores.append((f"`{rule.name}`", f"`{rule.score}`"))
    head = ("rule", "fires if", "limit (`above`)", "severity", "for each", "not judged if")
    return f"{table(head, rows)}\n\n{table(('rule', 'score'), scores)}"


def word_table() -> str:
    """Return the table of the words of which the score of a rule consists."""
    rows = []
    for name, word in WORDS.items():
        arguments = ", ".join((*word.arguments, "…") if word.repeats else word.arguments)
        rows.append((f"`{name}({arguments})`" if arguments else f"`{name}`", word.doc))
    rows.append(
        (
            f"`{GRADIENT}.norm`, `param_after.mean`, …",
            f"Statistic of a tensor: {_listed(OPS)} of {_listed(SERIES_KINDS)}.",
        )
    )
    return table(("word", "value"), rows)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def service_settings() -> str:
    """Return one table for each section of the service's TOML file, with its keys, defaults and meanings."""
    meanings = _meanings("service")
    parts = []
    for section, description in ServiceConfig.model_fields.items():
        model = _model_in(description.annotation)
        heading = f"[[{section}]]" if get_origin(description.annotation) is tuple else f"[{section}]"
        rows = [
            (f"`{key}`", _written(_pydantic_default(field)), meanings.pop(f"{section}.{key}"))
            for key, field in model.model_fields.items()
        ]
        parts.append(f"### `{heading}`\n\n{table(('key', 'default', 'meaning'), rows)}")
    _nothing_left(meanings)
    return "\n\n".join(parts)


def monitor_settings() -> str:
    """Return the table of the monitor's settings, including those of its nested tables such as `serve`."""
    meanings = _meanings("monitor")
    rows = []
    tables = {
        "serve": ServeConfig,
        "throughput": ThroughputConfig,
        "hardware": HardwareConfig,
        "capture": CaptureConfig,
    }
    for prefix, cls in (("", MonitorConfig), *((f"{name}.", cls) for name, cls in tables.items())):
        for field in fields(cls):
            if not prefix and field.name in tables:
                continue  # the rows of its settings replace it
            made = field.default if field.default_factory is MISSING else field.default_factory() or None
            default = "see below" if field.name == "rules" else _written(made)
            rows.append((f"`{prefix}{field.name}`", default, meanings.pop(prefix + field.name)))
    _nothing_left(meanings)
    return table(("setting", "default", "meaning"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def tool_table() -> str:
    """Return the table of the tools whose logs are read, with the names that an import of their examples stores."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        for tool in tomllib.loads(TOOLS.read_text(encoding="utf-8"))["tool"]:
            path.write_text(f"{tool['example']}\n", encoding="utf-8")
            importer = find_importer(path)
            blocks = [item for item in importer.read(path, Faults()) if isinstance(item, ImportedBlock)]
            stored = {name for block in blocks for name in block.tables["scalars"]["name"].to_pylist()}
            loss = tool.get("loss", "loss")
            names = [f"`{name}`" for name in sorted(stored - {"epoch", "loss", loss})]
            if loss:
                names.insert(0, "`loss`" if loss == "loss" else f"`loss` from `{loss}`")
            source = "a real log" if tool.get("seen", True) else "its documentation"
            rows.append((tool["name"], f"`{importer.name}`", tool.get("axis", "step"), ", ".join(names), source))
    return table(("tool", "format", "axis", "names in the store", "known from"), rows)


def command_reference() -> str:
    """Return a section for each subcommand with its help text, arguments and options."""
    parts = []
    for name, function in subcommands().items():
        text = re.sub(r"\[/?bold\]", "**", inspect.cleandoc(function.__doc__ or ""))
        text = re.sub(r"^(\*\*Example\*\*: )?(rankscope .*)$", r"\1`\2`", text, flags=re.MULTILINE)
        hints = get_type_hints(function, include_extras=True)
        defaults = {item.name: item.default for item in inspect.signature(function).parameters.values()}
        rows = [_parameter(key, hints[key], default) for key, default in defaults.items()]
        shown = table(("argument or option", "meaning"), rows) if rows else ""
        parts.append(f"## `rankscope {name}`\n\n{text}\n\n{shown}".rstrip())
    return "\n\n".join(parts)


def logged_names() -> str:
    """Return the table of the names that `Monitor.log` treats in a special way."""

    def others(stored: str) -> str:
        return ", ".join(f"`{name}`" for name in names_of(stored) if name != stored and " " not in name)

    labels = ", ".join(f"`{name}` (label `{label}`)" for name, label in LABEL_OF_GROUP.items())
    rows = (
        ("`loss`", "The training loss: main chart, summary, incidents, comparison."),
        (others("loss"), "Stored as `loss` with the label `source_name`, also with a prefix `train/` or `training/`."),
        ("`eval_loss`", "The evaluation loss: chart, advice on early stopping."),
        (
            others("eval_loss"),
            "Stored as `eval_loss` with the label `source_name`; also `loss` after `val/`, `eval/`, …",
        ),
        (", ".join(f"`{name}`" for name in AMOUNTS), "Amounts of the step: their totals and rates are derived."),
        ("`flops`", "Work of the step, for [TFLOP/s and MFU](throughput.md)."),
        ("`learning_rate`, `grad_norm`, " + ", ".join(f"`{name}`" for name in SPEEDS), "Charts next to the loss."),
        ("a mapping", f"One line for each key, with the label `key`; of {labels}."),
        ("`step`", "The number of the step; it is not a number that is logged."),
        ("any other name", "A chart under this name. The part before the first `/` is its group."),
    )
    return table(("name in `log()`", "effect"), rows)


def sizing_table(every: int) -> str:
    """Return the sizes for several numbers of ranks. An asterisk marks an extrapolation."""

    def cell(line: Line) -> str:
        return short_number(line.value) + (r" \*" if line.formula.endswith(EXTRAPOLATED) else "")

    sizes = (8, 64, 256, 1_000, 10_000)
    columns = [list(lines(Load(ranks=ranks, every=every))) for ranks in sizes]
    rows = ((f"{one[0].quantity}, {one[0].unit}".rstrip(", "), *map(cell, one)) for one in zip(*columns, strict=True))
    return table(("ranks", *(f"{ranks:,}" for ranks in sizes)), rows)


def cost_table() -> str:
    """Return the table of measured costs and their sources."""
    rows = (
        (f"`{cost.name}`", short_number(cost.default), cost.metadata["unit"], f"`{cost.metadata['source']}`")
        for cost in fields(Costs)
    )
    return table(("cost", "value", "unit", "measured by"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "rank-metrics": lambda: metric_table("rank"),
    "service-metrics": lambda: metric_table("service"),
    "datasets": dataset_tables,
    "wire": wire_table,
    "rules": rule_table,
    "score-rules": score_rule_table,
    "words": word_table,
    "service-settings": service_settings,
    "monitor-settings": monitor_settings,
    "commands": command_reference,
    "tools": tool_table,
    "logged-names": logged_names,
    "sizing": lambda: sizing_table(Load().every),
    "sizing-every-step": lambda: sizing_table(1),
    "costs": cost_table,
}


def main() -> int:
    """Write the pages. With --check, write nothing, print the stale pages and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page would change")
    if parser.parse_args().check:
        for name in stale():
            print(f"stale: docs/{name}: run make generate", file=sys.stderr)
        return 1 if stale() else 0
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


def _parameter(name: str, hint: Any, default: Any) -> tuple[str, str]:
    """Return the spelling and the meaning of an argument or option."""
    kind, info = get_args(hint)
    words = []
    if isinstance(info, ArgumentInfo):
        spelling = f"`{name.upper()}`"
    else:
        # In an Annotated hint, typer stores the first spelling in the field of the default.
        first = info.default if isinstance(info.default, str) else f"--{name.replace('_', '-')}"
        spelling = ", ".join(f"`{item}`" for item in dict.fromkeys((first, *(info.param_decls or ()))))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        words.append(f"one of {', '.join(str(item.value) for item in kind)}")
    elif get_origin(kind) is Literal:
        words.append(f"one of {', '.join(get_args(kind))}")
    if default is inspect.Parameter.empty:
        words.append("required")
    elif default is not None and not isinstance(default, bool):
        words.append(f"default `{getattr(default, 'value', default)}`")
    if info.envvar:
        words.append(f"`{info.envvar}`")
    return spelling, (info.help or "") + (f" ({', '.join(words)})" if words else "")


def _labels(spec: catalogue.MetricSpec) -> str:
    return ", ".join(f"`{label}`" for label in spec.all_labels)


def _field_table(columns: Iterable[Field]) -> str:
    rows = (
        (f"`{column.name}`", _type(column.type), "" if column.nullable else "never null", _meaning(column))
        for column in columns
    )
    return table(("column", "type", "", "meaning"), rows)


def _meaning(column: Field) -> str:
    return column.doc + (f" In {column.unit}." if column.unit else "")


def _type(kind: FieldType) -> str:
    if isinstance(kind, ListOf):
        return f"list of {_type(kind.item)}"
    if isinstance(kind, StructOf):
        return f"struct ({', '.join(field.name for field in kind.fields)})"
    return kind


def _meanings(section: str) -> dict[str, str]:
    document = tomllib.loads(MEANINGS.read_text(encoding="utf-8"))[section]
    return dict(_flat(document, ""))


def _flat(document: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nothing_left(meanings: dict[str, str]) -> None:
    if meanings:
        raise SystemExit(f"docs/settings.toml explains settings that do not exist: {', '.join(meanings)}")


def _model_in(annotation: Any) -> type[BaseModel]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(_model_in(argument) for argument in get_args(annotation) if argument is not Ellipsis)


def _pydantic_default(field: Any) -> Any:
    return MISSING if field.default is PydanticUndefined else field.default


def _default_of(field: Any) -> str:
    return " (required)" if field.default is MISSING else f" = {_written(field.default)}"


def _written(value: Any) -> str:
    """Return the text of a default for the reference pages; the defaults of secrets are not shown."""
    if value is MISSING:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, SecretStr):
        return "none"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{item}"' for item in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value:_}`" if isinstance(value, int) else f"`{value}`"


if __name__ == "__main__":
    sys.exit(main())
