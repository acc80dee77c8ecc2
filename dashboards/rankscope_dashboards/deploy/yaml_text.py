"""Write documents as YAML that is easy to read, and easy to compare with diff."""

from __future__ import annotations

from typing import Any

import yaml


def as_yaml(document: dict[str, Any]) -> str:
    """Return `document` as YAML text. Keys remain in their order, and texts with several lines become block scalars."""
    return yaml.dump(document, sort_keys=False, width=10_000, Dumper=_Dumper, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes texts with several lines as block scalars, and that never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - signature of the base class
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)
