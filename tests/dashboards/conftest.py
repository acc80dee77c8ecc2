"""promtool as the judge of alerts."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

Document = Mapping[str, Any]
Judge = Callable[[Sequence[tuple[Document, Document]]], list[str | None]]


@pytest.fixture
def promtool(require_server: Callable[..., str]) -> str:
    return require_server("promtool", "prometheus")


@pytest.fixture
def judge(promtool: str, tmp_path: Path) -> Judge:
    """Return what runs many (rule file, test file) at once and gives promtool's objection to each, or None."""

    def run(cases: Sequence[tuple[Document, Document]]) -> list[str | None]:
        names = [f"case{number}.yml" for number in range(len(cases))]
        for name, (rules, tests) in zip(names, cases, strict=True):
            (tmp_path / f"rules-of-{name}").write_text(yaml.safe_dump(rules), encoding="utf-8")
            (tmp_path / name).write_text(
                yaml.safe_dump({**tests, "rule_files": [f"rules-of-{name}"]}), encoding="utf-8"
            )
        command = [promtool, "test", "rules", *names]
        # One stream: objections go to the other one than the names they belong to.
        done = subprocess.run(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        text = done.stdout
        said = dict(re.findall(r"Unit Testing: +(\S+)\n(.*?)(?=\nUnit Testing:|\Z)", text, re.DOTALL))
        assert names == list(said), text
        return [None if said[name].strip() == "SUCCESS" else said[name] for name in names]

    return run


@pytest.fixture(scope="session")
def scenarios() -> ModuleType:
    """Return the module beside this file: test folders are no packages, so it cannot be imported by name."""
    spec = importlib.util.spec_from_file_location("alert_scenarios", Path(__file__).with_name("scenarios.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
