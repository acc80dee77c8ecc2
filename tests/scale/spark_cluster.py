"""A standalone cluster of Spark on loopback: a master and two workers, without the variables AWS_* of the test."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark

_START_SECONDS = 120
_ENDS_WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "TERM")


@contextlib.contextmanager
def spark_cluster(folder: Path, port: int) -> Iterator[str]:
    """Run the cluster; yield its address. Logs are in `folder`."""
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"}
    address = f"spark://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:

        def start(name: str, *arguments: str) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            command = [*_ENDS_WITH_ITS_PARENT, str(program), *arguments, "--host", "127.0.0.1", "--webui-port", "0"]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        start("master", "org.apache.spark.deploy.master.Master", "--port", str(port))
        _wait(port, folder / "master.log")
        for name in ("worker-1", "worker-2"):
            limits = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / name))
            start(name, "org.apache.spark.deploy.worker.Worker", *limits, address)
        yield address


def _wait(port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.2)
    raise TimeoutError(f"Spark's master did not answer within {_START_SECONDS} s: {log.read_text()[-1000:]}")
