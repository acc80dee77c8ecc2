"""The arrows between the rooms hold, and the training side loads nothing of the serving side."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVING_SIDE = ("deltalake", "duckdb", "aiohttp", "pydantic", "apprise", "typer", "rich")
STARTS_THREADS = re.compile(r"threading\.(Thread|Timer)\(|ThreadPoolExecutor|_thread\.start_new_thread")


def loaded_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_arrows():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_import_rankscope_alone_loads_nothing_heavy():
    assert not loaded_after("import rankscope") & {*SERVING_SIDE, "torch", "pyarrow", "numpy"}


@pytest.mark.parametrize("name", ["Monitor", "MonitorConfig"])
def test_training_api_never_loads_the_serving_side(name):
    assert not loaded_after(f"import rankscope; rankscope.{name}") & set(SERVING_SIDE)


def test_every_thread_of_the_monitor_limits_torch_on_itself():
    """One that is started by another way would open an OpenMP team beside that of training."""
    exporter = ROOT / "exporter" / "rankscope_exporter"
    own = exporter / "process" / "threads.py"
    others = [path for path in exporter.rglob("*.py") if path != own and STARTS_THREADS.search(path.read_text())]

    assert [] == others


def test_connect_never_loads_torch():
    assert "torch" not in loaded_after("import rankscope; rankscope.connect")


def test_unknown_name_lists_the_known_ones():
    import rankscope

    with pytest.raises(AttributeError, match="Monitor, MonitorConfig, TrainerMon, connect"):
        _ = rankscope.Montior
