"""Fixtures that evaluate alert rules and queries with promtool."""

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
    """Return a function that runs `promtool test rules` on pairs of (rule file, test file).

    It returns one item for each pair: promtool's error text, or None if the test passed.
    """

    def run(cases: Sequence[tuple[Document, Document]]) -> list[str | None]:
        names = [f"case{number}.yml" for number in range(len(cases))]
        for name, (rules, tests) in zip(names, cases, strict=True):
            (tmp_path / f"rules-of-{name}").write_text(yaml.safe_dump(rules), encoding="utf-8")
            (tmp_path / name).write_text(
                yaml.safe_dump({**tests, "rule_files": [f"rules-of-{name}"]}), encoding="utf-8"
            )
        command = [promtool, "test", "rules", *names]
        # Merge stdout and stderr: promtool prints file names to one and the errors of the file to the other.
        done = subprocess.run(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        text = done.stdout
        output = dict(re.findall(r"Unit Testing: +(\S+)\n(.*?)(?=\nUnit Testing:|\Z)", text, re.DOTALL))
        assert names == list(output), text
        return [None if output[name].strip() == "SUCCESS" else output[name] for name in names]

    return run


@pytest.fixture(scope="session")
def scenarios() -> ModuleType:
    """Return the module `alerts/scenarios.py`. Test folders are not packages, so it cannot be imported by name."""
    path = Path(__file__).parent / "alerts" / "scenarios.py"
    spec = importlib.util.spec_from_file_location("alert_scenarios", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
