"""The wheel contains all eight packages. On a rank it needs only torch, numpy, pyarrow and prometheus_client."""

import ast
import email
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.programs import run_command

import rankscope
from rankscope.shell.overview import MODULES, NEEDED, USUAL, command_files

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "view" / "rankscope_view" / "templates"
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


def test_wheel_contains_all_packages_and_the_assets_of_the_pages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packages = ("contract", "exporter", "msprobe", "ingest", "storage", "view", "dashboards")
    assets = ("style.css", "theme.js", "app.js", "heat.js", "icon.svg")

    assert {"rankscope/py.typed", *(f"rankscope_{package}/py.typed" for package in packages)} <= names
    assert {f"rankscope_view/assets/{name}" for name in assets} <= names
    assert {f"rankscope_view/templates/{path.name}" for path in TEMPLATES.iterdir()} <= names


def test_wheel_contains_the_provisioning_tree_and_provision_writes_it(wheel, tmp_path):
    """The boards come from the files in the wheel: Grafana's library for boards is not imported."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    tree = tmp_path / "site" / "rankscope_dashboards" / "tree"
    committed = ROOT / "dashboards" / "provisioning"
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
from rankscope.commands.dashboards import provision
provision(into=__import__("pathlib").Path({str(tmp_path / "into")!r}))
assert "grafana_foundation_sdk" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)

    def files(folder):
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    assert 0 == done.returncode, done.stderr
    assert files(committed) == files(tree)
    assert files(committed) - {"dashboards/.lint"} == files(tmp_path / "into") - {".rankscope.json"}


def test_base_requirements_are_those_of_a_rank_and_extra_all_has_pandas(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        required = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    names = [re.split(r"[^\w-]", text, maxsplit=1)[0] for text in required if "extra ==" not in text]

    assert ["numpy", "prometheus-client", "pyarrow"] == sorted(names)
    assert any(re.match(r"pandas\b.*extra == .all.", text) for text in required), required


@pytest.fixture(scope="module")
def rank_install(wheel, tmp_path_factory):
    """Return a folder like the site-packages of a rank: the wheel and all its requirements."""
    folder = tmp_path_factory.mktemp("rank")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    link_distributions(distributions_needed_by(RANK_NEEDS), folder)
    return folder


def run_on_rank(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
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
from rankscope_exporter.measure.kernels.compiled import backend_name
print(rankscope.__file__, backend_name())
"""


def test_installed_wheel_monitors_with_base_requirements_only(rank_install):
    """A model is attached and trained without any library of the services, and measured by the compiled kernel."""
    done = run_on_rank(rank_install, TRAINING)

    assert not (rank_install / "duckdb").exists()
    assert 0 == done.returncode, done.stderr
    assert done.stdout.startswith(str(rank_install))
    assert done.stdout.endswith(" C\n" if shutil.which("cc") else " torch\n")


LIBRARY = "rankscope_exporter/measure/kernels/_kernel.so"


def test_wheel_with_the_kernel_runs_where_its_tag_states(wheel, require_server):
    require_server("cc", "g++")
    with zipfile.ZipFile(wheel) as archive:
        needed = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_([\d.]+)", archive.read(LIBRARY))}

    assert re.search(r"-py3-none-manylinux_2_17_\w+\.whl$", wheel.name)
    assert max(needed) <= (2, 17)


def built(tree: Path, target: str, folder: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=120, env={**os.environ, **environment})
    (found,) = folder.iterdir()
    return found


@pytest.mark.thorough
def test_wheel_without_a_compiler_measures_with_torch_operations(tmp_path, wheel):
    plain = built(ROOT, "wheel", tmp_path / "built", CC="/none")
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(wheel) as other:
        assert {LIBRARY} >= set(other.namelist()) ^ set(archive.namelist())
        archive.extractall(tmp_path / "site")
    link_distributions(distributions_needed_by(RANK_NEEDS), tmp_path / "site")
    done = run_on_rank(tmp_path / "site", TRAINING)

    assert plain.name.endswith("-py3-none-any.whl")
    assert done.stdout.endswith(" torch\n")
    assert 1 == done.stderr.count("the C kernel cannot be used (there was no C compiler when Rankscope was built)")


@pytest.mark.thorough
def test_source_distribution_and_editable_installation_compile_the_kernel(tmp_path, require_server):
    require_server("cc", "g++")
    with tarfile.open(built(ROOT, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.glob("rankscope-*")
    library = tree / "exporter" / LIBRARY
    assert not library.exists()
    with zipfile.ZipFile(built(tree, "wheel", tmp_path / "wheel")) as archive:
        assert LIBRARY in archive.namelist()
    assert not library.exists()
    assert built(tree, "wheel:editable", tmp_path / "editable").name.endswith("-py3-none-any.whl")
    assert library.read_bytes().startswith(b"\x7fELF")


def run_command_on(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `rankscope ARGUMENTS` in an interpreter that can import only from `folder`."""
    argv = ["rankscope", *map(str, arguments)]
    return run_on_rank(
        folder, f"sys.argv[:] = {argv!r}; import runpy; runpy.run_module('rankscope', run_name='__main__')"
    )


@pytest.mark.parametrize("arguments", [[], ["-h"]])
def test_help_on_a_rank_names_the_extras_of_each_command(rank_install, arguments):
    done = run_command_on(rank_install, *arguments)

    assert (0, "") == (done.returncode, done.stderr)
    for name in command_files():
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE), name
    assert "Needs cli, store, service, plot." in " ".join(done.stdout.split())
    assert "pip install 'rankscope[cli,store,service,plot,boards]'" in " ".join(done.stdout.split())


def test_version_and_connect_on_a_rank(rank_install):
    """`rankscope.connect` names the extra to install."""
    done = run_command_on(rank_install, "--version")
    connect = run_on_rank(rank_install, "import rankscope; rankscope.connect")

    assert (0, f"rankscope {rankscope.__version__}\n", "") == (done.returncode, done.stdout, done.stderr)
    assert "run pip install '.[store]'" in connect.stderr


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        *(("summary", "cli,store,service"), ("runs --help", "cli,store,service"), ("version", "cli")),
        *(("plot", "cli,store,service,plot"), ("dashboards deploy", "cli,store,service,boards")),
    ],
)
def test_command_on_a_rank_names_the_extras_to_install(rank_install, command, extras):
    done = run_command_on(rank_install, *command.split())

    assert 1 == done.returncode
    assert f"`rankscope {command.split()[0]}` needs typer, which is not installed" in done.stderr
    assert f"pip install 'rankscope[{extras}]'" in done.stderr
    assert 1 == done.stderr.count("\n")


ON_A_STORE = {  # The arguments of commands that end. The others need a server, a training, or another tool's files.
    "anomalies": [],
    "compare": ["a", "b", "-o", "FILE.svg"],
    "diff": ["a", "b"],
    "events": [],
    "export": ["--format", "tensorboard", "-o", "FILE.svg"],
    "import": ["LOG", "--store", "NEW"],
    "plot": ["-o", "FILE.svg"],
    "report": ["-o", "-"],
    "runs": [],
    "sql": ["select 1 as one"],
    "store": ["check"],
    "summary": [],
    "version": [],
    "watch": ["LOG", "--once", "--store", "NEW"],
}


@pytest.fixture(scope="module")
def small_store(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    for number, name in enumerate("ab"):
        rows = [{"step": step, "loss": number + 1 / step} for step in range(1, 9)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run_command("import", folder / "a.jsonl", folder / "b.jsonl", "--store", folder / "history")
    assert 0 == done.returncode, done.stderr
    return folder


@pytest.mark.usual(2)
@pytest.mark.parametrize("name", sorted(ON_A_STORE))
def test_command_needs_only_the_extras_that_it_names(rank_install, small_store, tmp_path, name):
    """The command runs where exactly the requirements of its extras are installed."""
    extras = NEEDED.get(name, USUAL)
    needed = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in importlib.metadata.requires("rankscope") or []
              if any(f"extra == '{extra}'" in text for extra in extras)]  # fmt: skip
    site = shutil.copytree(rank_install, tmp_path / "site", symlinks=True)
    link_distributions(distributions_needed_by(tuple({*needed} - {"rankscope"})), site)
    given = [
        {"LOG": small_store / "a.jsonl", "FILE.svg": tmp_path / "file.svg", "NEW": tmp_path / "new"}.get(each, each)
        for each in ON_A_STORE[name]
    ]
    is_free = name == "version" or "--store" in given
    done = run_command_on(site, name, *given, *([] if is_free else ["--store", small_store / "history"]))

    assert "not installed:" not in done.stderr
    assert done.returncode in {0, 1} if name == "diff" else done.returncode == 0, done.stderr


def test_modules_of_each_extra_are_of_its_requirements():
    providers = importlib.metadata.packages_distributions()
    requires = importlib.metadata.requires("rankscope") or []
    for extra, modules in MODULES.items():
        own = " ".join(text for text in requires if f"extra == '{extra}'" in text).lower()
        for module in modules:
            assert any(name.lower() in own for name in providers[module]), (extra, module)


def imported_by(argument, *libraries):
    """Return the modules that `rankscope ARGUMENT` imports, with names that begin with one of `libraries`."""
    script = f"""
import sys
sys.argv[:] = ["rankscope", {argument!r}]
from rankscope.__main__ import main
try:
    main()
finally:
    print(sorted(name for name in sys.modules if name.startswith({libraries!r})))
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_help_and_version_import_no_library(option):
    assert "[]" == imported_by(option, "typer", "rich", "numpy", "pyarrow", "duckdb", "pydantic")


def test_a_command_imports_no_other_command():
    assert "['rankscope.commands.version']" == imported_by("version", "rankscope.commands.")


def test_names_that_benchmarks_import_exist():
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "benchmarks").rglob("*.py"))]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {
        (node.module, one.name) for node in imports if (node.module or "").startswith("rankscope") for one in node.names
    }
    absent = [pair for pair in names if not hasattr(importlib.import_module(pair[0]), pair[1])]

    assert [] == [pair for pair in absent if importlib.util.find_spec(".".join(pair)) is None]


def test_paths_in_the_makefile_exist():
    paths = re.findall(r"(?:tests|docs|benchmarks)/[\w/.]+", (ROOT / "Makefile").read_text())

    assert [] == [path for path in paths if not (ROOT / path).exists()]
