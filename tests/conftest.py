"""Fixtures for the tests of all packages: real servers or a skip, a folder for a store, a free port, certificates."""

import contextlib
import gc
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import hatch_build
import pytest
from hypothesis import HealthCheck, settings
from tests.object_store.fixtures import _proxy_of_session, bucket, s3_proxy, s3_server  # noqa: F401
from tests.properties import THOROUGH, USUAL, examples

# Tests have no time limits, because a machine can be busy for seconds. Each usual run has the same examples, so that a
# failure depends on the change under test; `make test-thorough` has other examples in each run.
settings.register_profile(
    "rankscope",
    max_examples=examples(USUAL),
    deadline=None,
    derandomize=not THOROUGH,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("rankscope")

# A background job of a shell ignores SIGINT, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A monitor would write its records to the working directory, which for most tests is the root of the repository.
os.environ["RANKSCOPE_SPOOL_DIR"] = "off"

# A test must not send its records to a service of the user.
for name in ("INGEST_URL", "RUN", "TOKEN", "TOKEN_FILE", "STORE", "LISTEN", "STOP_SIGNALS", "SWITCH_FILE"):
    os.environ.pop(f"RANKSCOPE_{name}", None)

# An interpreter executes the kernels for CUDA devices on CPU tensors. Triton reads this variable when it is imported.
if not os.environ.get("RANKSCOPE_GPU"):
    os.environ["TRITON_INTERPRET"] = "1"

# The threads of two ranks would compete on a machine with two cores. torch reads this variable when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernel for statistics, if it was changed since the installation."""
    if not hasattr(config, "workerinput"):
        with contextlib.suppress(OSError):  # without a compiler, its tests are skipped
            hatch_build.compile_if_needed()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect thorough cases: `make test-thorough` runs them; a shorter case tests the same behaviour."""
    if not THOROUGH:
        left = {item for item in items if item.get_closest_marker("thorough")} | set(_unusual(items))
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    if hasattr(config, "workerinput"):
        # Files of one folder wait for the same things, or need the processor: the processes take them from all folders.
        places = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: (places[item.path] % 16, places[item.path]))


def _unusual(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases of tests with a mark `usual(count)` that are not among the `count` cases of a usual run."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("usual") and not item.get_closest_marker("thorough"):
            cases[item.path, item.originalname].append(item)
    for found in cases.values():
        (count,) = found[0].get_closest_marker("usual").args
        kept = {len(found) * number // count for number in range(count)}  # spread over all combinations
        yield from (item for place, item in enumerate(found) if place not in kept)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude all objects of this moment from garbage collection, which a service runs at its start and its end."""
    gc.collect()
    gc.freeze()


OTHER_COMMAND: Final = "make "
"""Prefix of a skip reason that names the command which runs the test."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of skipped tests by reason."""
    for reason, count in sorted(skips_by_reason(terminalreporter.stats.get("skipped", [])).items()):
        terminalreporter.write_line(f"{count} skipped: {reason}")


FILES_AT_THE_START: Final = pytest.StashKey[set[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the files of the checkout that are not committed."""
    session.config.stash[FILES_AT_THE_START] = _uncommitted(session.config.rootpath)


def _uncommitted(root: Path) -> set[str]:
    """Return the untracked files and folders below `root`, also ignored ones, except for caches of tools."""
    command = ["git", "-C", str(root), "status", "--porcelain", "--ignored=matching", "--untracked-files=all", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\0")
    except OSError:  # the tests also run without git
        return set()
    names = {line[3:] for line in listed if line.startswith(("?? ", "!! "))}
    return {name for name in names if not any(part == "__pycache__" or part[0] == "." for part in Path(name).parts)}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if tests wrote into the checkout, or if servers are required and a test was skipped that nothing runs."""
    if not hasattr(session.config, "workerinput"):
        written = _uncommitted(session.config.rootpath) - session.config.stash[FILES_AT_THE_START]
        if written:
            print(f"\nwritten into the checkout while the tests ran: {', '.join(sorted(written))}")
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("RANKSCOPE_REQUIRE_SERVERS"):
        return
    reasons = skips_by_reason(reporter.stats.get("skipped", []))
    if any(not reason.startswith(OTHER_COMMAND) for reason in reasons) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def skips_by_reason(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> Counter[str]:
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)  # type: ignore[index]


def _require_server(program: str, package: str | None = None) -> str:
    path = shutil.which(program)
    if path is not None:
        return path
    reason = f"{program} is not installed: apt-get install {package or program}"
    if os.environ.get("RANKSCOPE_REQUIRE_SERVERS"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def require_server() -> Callable[..., str]:
    """Return a function `(program, package=program)` that returns its path, and skips or fails the test without it."""
    return _require_server


_PORTS: Final = range(10_000, 32_768, 32)
"""First ports of ranges that Linux does not use for outgoing connections."""


def _free_port() -> int:
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture
def free_port() -> int:
    """Return a loopback port that was free just now, as most likely are the 31 ports after it."""
    return _free_port()


@pytest.fixture
def another_port() -> int:
    return _free_port()


@dataclass(frozen=True, slots=True)
class Certificates:
    """A CA and its certificates: valid for this machine, expired, for another machine, and signed by another CA."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def other_ca(self) -> Path:
        return self.folder / "other_ca.pem"

    def cert(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def web_config(self, path: Path, name: str = "server", **settings: str) -> Path:
        """Write a web configuration with the certificate `name`; return `path`."""
        shown = {"cert_file": str(self.cert(name)), "key_file": str(self.key(name))}
        path.write_text(json.dumps({"tls_server_config": shown | settings}))
        return path

    def make_ca(self, name: str) -> None:
        self._openssl("req", "-x509", *self._new(name), "-out", f"{name}.pem", "-days", "2")

    def sign(self, name: str, ca: str, names: str, days: int = 2) -> None:
        (self.folder / "extensions").write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        self._openssl("req", *self._new(name), "-out", f"{name}.csr")
        signer = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", str(days))
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signer, "-extfile", "extensions", "-out", f"{name}.pem")

    def _new(self, name: str) -> tuple[str, ...]:
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")
        return (*key, "-subj", f"/CN={name}")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: Any) -> Certificates:
    """Return certificates of each kind that a rank or a service can receive."""
    _require_server("openssl")
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    here = f"DNS:localhost,DNS:{socket.gethostname()},IP:127.0.0.1,IP:127.0.0.2,IP:0:0:0:0:0:0:0:1"
    for ca in ("ca", "other_ca"):
        made.make_ca(ca)
    for name, signer, names, days in (
        *(("server", "ca", here, 2), ("client", "ca", here, 2), ("expired", "ca", here, -1)),
        *(("elsewhere", "ca", "DNS:elsewhere.test", 2), ("stranger", "other_ca", here, 2)),
    ):
        made.sign(name, signer, names, days)
    return made
