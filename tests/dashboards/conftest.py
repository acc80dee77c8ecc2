"""Fixtures that evaluate alert rules and queries with promtool."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
            document = yaml.safe_dump({**tests, "rule_files": [f"rules-of-{name}"]})
            (tmp_path / name).write_text(document, encoding="utf-8")
        command = [promtool, "test", "rules", *names]
        # Merge stdout and stderr: promtool prints file names to one and the errors of the file to the other.
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        text = subprocess.run(command, cwd=tmp_path, text=True, check=False, **both).stdout
        output = dict(re.findall(r"Unit Testing: +(\S+)\n(.*?)(?=\nUnit Testing:|\Z)", text, re.DOTALL))
        assert names == list(output), text
        return [None if output[name].strip() == "SUCCESS" else output[name] for name in names]

    return run
