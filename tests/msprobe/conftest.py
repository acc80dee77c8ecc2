"""Fixtures that isolate these tests from environment variables and keep their output in a temporary folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.exporter.conftest import eventually, group, quiet, reader  # noqa: F401 - fixtures of these tests, too
from tests.msprobe.monitored_runs import Run, train


@pytest.fixture(autouse=True)
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "out"
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(folder))
    monkeypatch.delenv("DYNAMIC_MONITOR", raising=False)
    monkeypatch.delenv("RANKSCOPE_RUN", raising=False)
    return folder


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Run]:
    """Return `train` in this test's folder, with msprobe's keys as arguments and the arguments of `train` in `how`."""

    def run(how: dict[str, object] | None = None, /, **document: object) -> Run:
        return train(tmp_path, document, **(how or {}))  # type: ignore[arg-type]  # a test's own words

    return run
