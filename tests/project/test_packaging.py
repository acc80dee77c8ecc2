"""The wheel contains all seven packages. On a rank it needs only torch, numpy, pyarrow and prometheus_client."""

from __future__ import annotations

import email
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK_NEEDS = ("torch", "numpy", "pyarrow", "prometheus_client")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("rankscope-*.whl")
    return built


def distributions_needed_by(names: tuple[str, ...]) -> set[str]:
    """Return `names` and all their installed requirements, without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # required only on other platforms
        found.add(name)
        waiting += [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requires if "extra ==" not in text]
    return found


def link_distributions(names: set[str], folder: Path) -> None:
    """Link the installed files of `names` into `folder`."""
    for name in names:
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files if not file.parts[0].startswith("..")}:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            target = folder / top
            if top != "__pycache__" and not target.exists():
                target.symlink_to(source)


def test_wheel_contains_all_packages_and_their_type_markers(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    packages = {"rankscope_contract", "rankscope_exporter", "rankscope_ingest", "rankscope_storage"}
    packages |= {"rankscope_view", "rankscope_dashboards", "rankscope"}
    assert {f"{package}/py.typed" for package in packages} <= names


def test_wheel_contains_style_and_scripts_of_the_pages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {
        f"rankscope_view/assets/{name}" for name in ("style.css", "theme.js", "app.js", "heat.js", "icon.svg")
    } <= names


def test_wheel_contains_the_provisioning_tree_and_provision_writes_it(wheel, tmp_path):
    """The boards come from the files in the wheel: Grafana's library for boards is not imported."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    tree = tmp_path / "site" / "rankscope_dashboards" / "tree"
    committed = ROOT / "dashboards" / "provisioning"
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
from rankscope.base.provisioning import provision
provision(into=__import__("pathlib").Path({str(tmp_path / "into")!r}))
assert "grafana_foundation_sdk" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)

    def files(folder):
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    assert 0 == done.returncode, done.stderr
    assert files(committed) == files(tree)
    assert files(committed) - {"dashboards/.lint"} == files(tmp_path / "into") - {".rankscope.json"}


def test_base_requirements_are_those_of_a_rank(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        required = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    names = [re.split(r"[^\w-]", text, maxsplit=1)[0] for text in required if "extra ==" not in text]

    assert ["numpy", "prometheus-client", "pyarrow"] == sorted(names)


@pytest.fixture(scope="module")
def rank_install(wheel, tmp_path_factory):
    """Return a folder like the site-packages of a rank: the wheel and all its requirements."""
    folder = tmp_path_factory.mktemp("rank")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    link_distributions(distributions_needed_by(RANK_NEEDS), folder)
    return folder


def run_on_rank(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in an interpreter that can import only from `folder`."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{script}"]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


TRAINING = """
import rankscope, torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
monitor = rankscope.Monitor(total_steps=2)
monitor.attach(model, optimizer)
with monitor:
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=1.0)
assert monitor.faults == 0, monitor.faults
print(rankscope.__file__)
"""


def test_installed_wheel_monitors_with_base_requirements_only(rank_install):
    """A model is attached and trained without any library of the services."""
    done = run_on_rank(rank_install, TRAINING)

    assert not (rank_install / "duckdb").exists()
    assert 0 == done.returncode, done.stderr
    assert done.stdout.startswith(str(rank_install))


def test_command_on_a_rank_names_the_extra_to_install(rank_install):
    done = run_on_rank(rank_install, "import runpy; runpy.run_module('rankscope', run_name='__main__')")

    assert 1 == done.returncode
    assert "run pip install '.[all]'" in done.stderr
    assert 1 == done.stderr.count("\n")


def test_connect_on_a_rank_names_the_extra_to_install(rank_install):
    done = run_on_rank(rank_install, "import rankscope; rankscope.connect")

    assert "run pip install '.[store]'" in done.stderr


def test_paths_in_the_makefile_exist():
    missing = [
        path
        for path in re.findall(r"(?:tests|docs|benchmarks)/[\w/.]+", (ROOT / "Makefile").read_text())
        if not (ROOT / path).exists()
    ]

    assert missing == []
