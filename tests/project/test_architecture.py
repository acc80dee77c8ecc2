"""The import rules hold, and the training side loads no package of the services."""

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


def test_import_rules_hold():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("statement", "others"),
    [
        ("import rankscope", {*SERVING_SIDE, "torch", "pyarrow", "numpy"}),
        ("import rankscope; rankscope.Monitor; rankscope.MonitorConfig", {*SERVING_SIDE, "rankscope_msprobe"}),
        ("import rankscope_msprobe.files.csv_layout", {"torch", "pyarrow", "numpy", "rankscope_exporter"}),
        ("import rankscope; rankscope.connect", {"torch"}),
    ],
)
def test_training_loads_no_package_of_the_services(statement, others):
    assert not loaded_after(statement) & others


IMPORT_AND_EXPORT = (
    *("ingest/rankscope_ingest/importers", "cli/rankscope"),
    *("storage/rankscope_storage/formats", "storage/rankscope_storage/tensorboard"),
)
NAMES_MSPROBE = {
    "exporter/rankscope_exporter/process/extension.py": 1,  # the lazy import
    "exporter/rankscope_exporter/config/monitor_config.py": 2,  # MonitorConfig.from_msprobe
}
"""Number of words in each other file that name msprobe."""


def test_only_its_package_import_and_export_name_msprobe():
    packages = ("exporter", "ingest", "storage", "view", "dashboards", "cli")
    own = ("exporter/rankscope_msprobe", *IMPORT_AND_EXPORT)
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    places = {path.relative_to(ROOT).as_posix(): path.read_text().lower().count("msprobe") for path in files}
    found = {place: count for place, count in places.items() if count and not place.startswith(own)}

    assert NAMES_MSPROBE == found


def test_every_thread_of_the_exporter_is_started_by_process_threads():
    """A thread that is started elsewhere would open another OpenMP team next to that of the training."""
    exporter = ROOT / "exporter" / "rankscope_exporter"
    own = exporter / "process" / "threads.py"
    others = [path for path in exporter.rglob("*.py") if path != own and STARTS_THREADS.search(path.read_text())]

    assert [] == others


def test_unknown_name_lists_the_known_ones():
    import rankscope

    with pytest.raises(AttributeError, match="Monitor, MonitorConfig, TrainerMon, connect"):
        _ = rankscope.Montior
