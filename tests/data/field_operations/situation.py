"""What the situations share: a service, a rank, and the verdict of a case."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

BIN = pathlib.Path(os.environ.get("RANKSCOPE_BIN") or sys.exit("set RANKSCOPE_BIN to the environment's bin folder"))
TOOL, PYTHON = str(BIN / "rankscope"), str(BIN / "python")
FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="field-"))
STARTED = []
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
RANK = """
import os, select, torch, rankscope
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
steps, pause, bad = int(os.environ["STEPS"]), float(os.environ["PAUSE"]), int(os.environ["BAD"])
monitor = rankscope.Monitor(total_steps=steps).attach(model, optimizer)
with monitor:
    for step in range(steps):
        loss = model(torch.randn(4, 8)).pow(2).mean() * (float("nan") if step == bad else 1.0)
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        monitor.log(loss=loss, tokens=32)
        select.select([], [], [], pause)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(url, timeout=5, **more):
    try:
        with DIRECT.open(urllib.request.Request(url, **more), timeout=timeout) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)
    except (OSError, ValueError) as error:
        return 0, repr(error).encode(), {}


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.2)
    return None


def environment(more):
    merged = {**os.environ, **(more or {})}
    return {name: value for name, value in merged.items() if value is not None}


class Service:
    def __init__(self, store, text="", env=None, prefix=()):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = FOLDER / f"service-{self.port}.log"
        config = FOLDER / f"service-{self.port}.toml"
        config.write_text(
            f'[service]\nlisten = "127.0.0.1:{self.port}"\n[store]\npath = {json.dumps(str(store))}\n{text}\n'
        )
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [*prefix, TOOL, "serve", str(config)], env=environment(env), stdout=log, stderr=log, cwd=FOLDER
            )
        STARTED.append(self.process)
        if (
            not until(lambda: ask(self.url + "/healthz")[0] or self.process.poll() is not None, 100)
            or self.process.poll() is not None
        ):
            skip("the service did not start: " + self.log()[-300:])

    def log(self):
        return self.log_path.read_text(errors="replace")

    def api(self, name):
        return json.loads(ask(f"{self.url}/api/v1/{name}")[1])

    def stop(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.poll()


def start_rank(url, run, steps=20, pause=0.05, bad=-1, env=None, code=RANK):
    settings = {
        "RANKSCOPE_INGEST_URL": url,
        "RANKSCOPE_RUN": run,
        "STEPS": str(steps),
        "PAUSE": str(pause),
        "BAD": str(bad),
    }
    log = FOLDER / f"rank-{len(STARTED)}.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [PYTHON, "-c", code], env=environment({**settings, **(env or {})}), stdout=out, stderr=out, cwd=FOLDER
        )
    STARTED.append(process)
    return process, log


def train(*args, **more):
    process, log = start_rank(*args, **more)
    if process.wait(300):
        skip("the training itself failed: " + log.read_text(errors="replace")[-300:])
    return log.read_text(errors="replace")


def tool(*args, env=None):
    return subprocess.run(
        [TOOL, *map(str, args)],
        capture_output=True,
        text=True,
        errors="replace",
        env=environment(env),
        cwd=FOLDER,
        timeout=100,
    )


def sql(store, query):
    answer = tool("sql", "--store", store, "--format", "csv", query)
    return answer.stdout.splitlines()[1:], answer.stderr.strip()


def finish(code, text):
    for process in STARTED:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
    shutil.rmtree(FOLDER, ignore_errors=True)
    print(text, flush=True)
    os._exit(code)


signal.signal(signal.SIGTERM, lambda *_: finish(1, "wrong: not done in time"))


def good(text):
    finish(0, "right: " + text)


def wrong(text):
    finish(1, "wrong: " + " ".join(text.split())[:400])


def skip(text):
    finish(77, "not judged: " + " ".join(text.split())[:400])
