"""Documents as YAML text that a person can read and a diff can show."""

from __future__ import annotations

from typing import Any

import yaml


def as_yaml(document: dict[str, Any]) -> str:
    """Return `document` as text: keys in their order, expressions of several lines as blocks."""
    return yaml.dump(document, sort_keys=False, width=10_000, Dumper=_Dumper, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes expressions of several lines as blocks, and every value where it is used rather than as an alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class' signature
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)
