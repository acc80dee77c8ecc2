"""Read the anomaly rules of a configuration file, TOML or JSON, and find its errors."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope.shell.errors import USAGE, CommandError, suggestion
from rankscope_contract.rules import AnomalyRule, rule_from_config

RULES: Final = "rules"
DEFAULT: Final = "default"
_EXAMPLE: Final = '[{"rule_name": "AnomalyNan"}]'


def check_rules(path: Path, default: Sequence[AnomalyRule]) -> tuple[list[AnomalyRule], list[str]]:
    """Return the rules in the file `path`, and a sentence with the position for each error.

    The file has a list of rules, or a table with the setting `rules`, as the configuration of the monitor. The entry
    "default" means the rules `default` with other names than those of the file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        document: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        return [], [f"{path}: {getattr(error, 'strerror', None) or error}"]
    entries = document.get(RULES) if isinstance(document, dict) else document
    if not isinstance(entries, list):
        return [], [f"{path}: expected a list such as {_EXAMPLE}, or a table with the setting {RULES}"]
    found: list[str] = []
    own: list[Sequence[AnomalyRule] | None] = []  # None: the default rules
    for number, entry in enumerate(entries):
        errors = list(_errors_of(entry))
        try:
            own.append(None if entry == DEFAULT else [] if errors else [rule_from_config(entry)])
        except (ValueError, TypeError) as error:  # TypeError: an argument of a wrong type
            errors = [str(error)]
        found.extend(f"{path}: {RULES}[{number}]: {error}" for error in errors)
    names = {rule.name for rules in own if rules is not None for rule in rules}
    others = [rule for rule in default if rule.name not in names]
    return [rule for rules in own for rule in (others if rules is None else rules)], found


def read_rules(path: Path, default: Sequence[AnomalyRule]) -> list[AnomalyRule]:
    """Return the rules in the file `path`, see `check_rules`. Raise CommandError for its first error."""
    rules, errors = check_rules(path, default)
    if errors:
        raise CommandError(errors[0], code=USAGE)
    return rules


def _errors_of(entry: Any) -> Iterator[str]:
    if entry == DEFAULT:
        return
    if not isinstance(entry, dict):
        yield f'expected a table such as {_EXAMPLE[1:-1]}, or "{DEFAULT}", not {json.dumps(entry, default=str)}'
        return
    if not isinstance(entry.get("args", {}), dict):
        yield "args must be a table of arguments"
    for name in entry.keys() - {"rule_name", "args"}:
        yield f"{name!r} is no key of a rule.{suggestion(name, ('rule_name', 'args'))}"
