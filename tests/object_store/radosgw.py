"""Ceph's S3 server radosgw on loopback, with one monitor and one object store daemon that keeps all data in memory.

The programs are Debian's. If they are not installed, their packages are fetched and unpacked, without root.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.object_store.servers import S3Server

PACKAGES: Final = ("radosgw", "ceph-mon", "ceph-osd", "ceph-common")
_START_SECONDS: Final = 120
_ENDS_WITH_ITS_PARENT: Final = ("setpriv", "--pdeathsig", "KILL")

CONFIGURATION: Final = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor_port}]
mon initial members = a
public addr = 127.0.0.1
keyring = {folder}/keyring
run dir = {folder}
crash dir = {folder}
admin socket =
log file =
log to stderr = true
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
mon data avail crit = 0
mon allow pool size one = true
mon max pg per osd = 1000
osd objectstore = memstore
memstore device bytes = 4294967296
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd class dir = {libraries}/rados-classes
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
rgw frontends = beast endpoint=127.0.0.1:{port}
"""

KEYS: Final = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
    "client.rgw": {"mon": "allow rw", "osd": "allow rwx"},
}


def installed(cache: Path) -> Path:
    """Return the folder below which usr/bin/radosgw is; fetch and unpack the packages to `cache` if necessary."""
    if shutil.which("radosgw") and shutil.which("ceph-osd") and shutil.which("ceph-mon"):
        return Path("/")
    root = cache.resolve() / "root"
    if not root.exists():
        archives, unpacked = cache / "archives", cache / "unpacked"
        for folder in (archives, unpacked):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        plan = _run(["apt-get", "-s", "install", "--no-install-recommends", *PACKAGES], {}).splitlines()
        _run(["apt-get", "download", *(line.split()[1] for line in plan if line.startswith("Inst "))], {}, archives)
        for archive in archives.iterdir():
            _run(["dpkg-deb", "-x", str(archive), str(unpacked)], {})
        shutil.rmtree(archives)
        unpacked.rename(root)
    return root


@contextlib.contextmanager
def radosgw(root: Path, folder: Path) -> Iterator[S3Server]:
    """Run radosgw, whose programs are below `root`, with its configuration and its logs in the new folder `folder`."""
    libraries = root / "usr/lib/x86_64-linux-gnu"
    environment = {
        "PATH": f"{root}/usr/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": f"{libraries}:{libraries}/ceph:{root}/lib/x86_64-linux-gnu",
        "PYTHONPATH": str(root / "usr/lib/python3/dist-packages"),
    }
    monitor_port, port = _free_ports()
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    fsid, osd, configuration = str(uuid.uuid4()), str(uuid.uuid4()), folder / "ceph.conf"
    configuration.write_text(
        CONFIGURATION.format(fsid=fsid, monitor_port=monitor_port, port=port, folder=folder, libraries=libraries)
    )

    def run(program: str, *arguments: str) -> str:
        return _run([program, "-c", str(configuration), *arguments], environment, folder)

    _run(["ceph-authtool", "--create-keyring", "keyring"], environment, folder)
    for name, capabilities in KEYS.items():
        listed = [word for kind, text in capabilities.items() for word in ("--cap", kind, text)]
        _run(["ceph-authtool", "keyring", "--gen-key", "-n", name, *listed], environment, folder)
    address = f"[v2:127.0.0.1:{monitor_port}]"
    _run(["monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, "monmap"], environment, folder)
    run("ceph-mon", "-i", "a", "--mkfs", "--monmap", "monmap", "--keyring", "keyring")
    server = S3Server(endpoint=f"http://127.0.0.1:{port}")
    with contextlib.ExitStack() as stack:

        def start(program: str, *arguments: str) -> None:
            log = stack.enter_context((folder / f"{program}.log").open("wb"))
            command = [*_ENDS_WITH_ITS_PARENT, program, "-c", str(configuration), "-f", *arguments]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
            stack.callback(process.wait)
            stack.callback(process.kill)

        start("ceph-mon", "-i", "a")
        run("ceph", "osd", "new", osd, "0")
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        start("ceph-osd", "-i", "0")
        start("radosgw", "-n", "client.rgw")
        _wait(server.endpoint, folder / "radosgw.log")
        user = ("--uid", "tests", "--display-name", "tests")
        keys = ("--access-key", server.access_key, "--secret-key", server.secret_key)
        run("radosgw-admin", "-n", "client.rgw", "user", "create", *user, *keys)
        yield server


def _free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as other:
        for listening in (one, other):
            listening.bind(("127.0.0.1", 0))
        return [listening.getsockname()[1] for listening in (one, other)]


def _wait(endpoint: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(endpoint, timeout=5).close()
            return
        time.sleep(0.2)
    raise TimeoutError(f"radosgw did not answer within {_START_SECONDS} s: {log.read_text(errors='replace')[-1000:]}")


def _run(command: list[str], environment: dict[str, str], folder: Path | None = None) -> str:
    """Run a program and return its output; the error of one that fails contains its messages."""
    done = subprocess.run(
        command, env=os.environ | environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout
