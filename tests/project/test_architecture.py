"""The import rules hold, and the training side loads no package of the services."""

import ast
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
    "exporter/rankscope_exporter/process/discovery.py": 1,  # the lazy import
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


STORAGE = ROOT / "storage" / "rankscope_storage"
USES_FILES = (
    *("files/local.py", "files/bucket.py", "files/filesystem.py"),  # the file systems of a store
    *("base/fsync.py", "log/shard_lock.py"),  # what only local folders have
    *("formats/", "tensorboard/"),  # exports to files of users
    "connection/spark.py",  # jars and Java
)
CLIENTS = {"shutil", "tempfile", "glob", "fcntl", "obstore", "boto3", "botocore", "s3fs", "fsspec", "mmap"}
METHODS = {
    *("exists", "glob", "rglob", "iterdir", "is_dir", "is_file", "stat", "lstat", "touch", "mkdir", "rmdir", "unlink"),
    *("read_bytes", "read_text", "write_bytes", "write_text", "samefile", "symlink_to", "hardlink_to"),
}
OF_OS = {"open", "listdir", "scandir", "remove", "link", "replace", "makedirs", "walk", "path", "truncate"}


def accesses_to_files(source: str) -> set[str]:
    """Return the functions, methods and modules with which `source` accesses files or S3."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names} & CLIENTS
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in CLIENTS:
                found.add(module)
            case ast.Call(func=ast.Name(id="open")):
                found.add("open")
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in OF_OS | METHODS:
                found.add(f"os.{name}")
            case ast.Call(func=ast.Attribute(attr=name)) if name in METHODS:
                found.add(name)
    return found


def test_storage_accesses_files_only_through_the_interface_of_file_systems():
    files = {path.relative_to(STORAGE).as_posix(): path.read_text() for path in STORAGE.rglob("*.py")}
    found = {name: accesses_to_files(text) for name, text in files.items()}

    assert {} == {name: used for name, used in found.items() if used and not name.startswith(USES_FILES)}
    assert [] == [name for name in USES_FILES[:2] if not found[name]]


READERS_OF_PRIVATE_NAMES = {"torch_private", "deepspeed", "megatron"}
"""Modules that read private names: of torch, and of the framework that an adapter is for."""
OF_PYTHON = {"_current_frames", "_fields", "_getframe", "_replace"}


def private_names(source: str) -> set[str]:
    """Return the private names of other modules that `source` reads or writes, as attribute, import or text."""
    found, own = set(), set(OF_PYTHON)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                own.add(node.attr)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
                found.add(name)
            case ast.ImportFrom(module=str(path)):
                found |= {*path.split("."), *(alias.name for alias in node.names)}
            case ast.Call():
                found |= {text.value for text in node.args if isinstance(text, ast.Constant)}
            case ast.Constant(value=str(text)) | ast.alias(name=text) if text.startswith("torch."):
                found |= set(text.split("."))
    return {name for name in found - own if re.fullmatch(r"_[a-zA-Z]\w*", str(name))}


def test_one_module_alone_reads_private_names_of_torch():
    """A new release of torch may change them."""
    files = [path for package in ("exporter", "msprobe") for path in (ROOT / "exporter").glob(f"*_{package}/**/*.py")]
    found = {path.stem: names for path in files if (names := private_names(path.read_text()))}

    assert found.keys() == READERS_OF_PRIVATE_NAMES, found


@pytest.mark.parametrize(
    "source",
    [
        *("t._version", "t._grad = 1", "getattr(t, '_cdata', 0)", "vars(unit)['_handle']", "NAME = 'torch._C.now'"),
        *("from torch._C import now", "from torch.nn import _reduction", "import torch._dynamo"),
    ],
)
def test_private_name_is_found(source):
    assert private_names(source)


def test_unknown_name_lists_the_known_ones():
    import rankscope

    with pytest.raises(AttributeError, match="Monitor, MonitorConfig, ScoreRule, TrainerMon, connect"):
        _ = rankscope.Montior
