"""A person's hour, shortened: trainings, the service, a browser with pages, and the time of each look at them."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from tests.hour.truth import Training
from tests.view.browser import Browser, browser

from rankscope.demo.receiver import AlertReceiver

SCRIPT: Final = Path(__file__).with_name("training.py")
TENSORS: Final = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight")
PAGES: Final = ("", "/tensors", "/ranks", "/incidents", "/events")
ROUND_SECONDS: Final = 30.0
REMEMBER_CHARTS: Final = """
let original;
Object.defineProperty(window, "uPlot", {
  get: () => original,
  set: (made) => original = new Proxy(made, {construct: (target, given) => {
    const plot = new target(...given);
    (window.drawn ??= []).push(plot);
    return plot;
  }}),
});
"""
READ: Final = """
document.readyState === "complete" && document.body && {
text: document.body.innerText,
title: document.title,
charts: Object.fromEntries((window.drawn ?? []).filter((plot) => plot.root.isConnected).map((plot) => [
  plot.root.closest("[id]").id,
  Object.fromEntries(plot.series.slice(1).map((series, at) => [
    `${at} ${series.label}`,
    plot.data[0].map((x, place) => [x, plot.data[at + 1][place]]).filter(([, y]) => y != null),
  ])),
]))}
"""
"""Text, title, and points of all lines of each chart by id, in one call. A wrapped uPlot collects the points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The text of a page or command. `before` and `after` are the times of reading, in seconds since the epoch."""

    of: str
    run: str | None
    text: str
    title: str = ""
    before: float
    after: float
    problems: tuple[str, ...] = ()
    charts: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)


def usual_environment() -> dict[str, str]:
    """Return the environment of a user. Other tests set variables of Rankscope, such as the folder for records."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RANKSCOPE_", "TRITON_"))}


def plans(folder: Path, chance: random.Random) -> dict[str, dict[str, Any]]:
    """Return the plan of each training by a short name. Steps, ranks and tensors of the faults are drawn."""

    def plan(name: str, steps: int, seconds: float, **faults: Any) -> dict[str, Any]:
        run = f"hour-{name}-{chance.randrange(1000):03}"
        (folder / run).mkdir()
        made = {
            "run": run,
            "folder": str(folder / run),
            "steps": steps,
            "seconds": seconds,
            "seed": chance.randrange(10**6),
        }
        (folder / run / "plan.json").write_text(json.dumps(made | faults))
        return made | faults

    return {
        "slow": plan("slow", 60, 4.0, own=True),
        "fast": plan("fast", 1500, 0.05, own=True),
        "nan": plan("nan", 200, 0.3, nan=[chance.randrange(40, 120), chance.randrange(2), chance.choice(TENSORS)]),
        "crash": plan("crash", 160, 0.5, crash=[chance.randrange(40, 120), chance.randrange(2)]),
        "spike": plan("spike", 200, 0.4, spike=[chance.randrange(60, 180), round(chance.uniform(8, 16), 1)]),
        "offline": plan("offline", 100, 0.1, own=True),
        "loader": plan("loader", 250, 0.15, loader=[chance.randrange(2), round(chance.uniform(0.1, 0.2), 2)]),
    }


@dataclass
class Hour:
    """All processes of the hour, in `folder`. `looks` has all texts that were read, in the order of time."""

    folder: Path
    seed: int
    port: int
    chromium: str
    looks: list[Look] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.began = time.time()
        self.receiver = self.stack.enter_context(AlertReceiver())
        self.trainings = {name: Training(plan) for name, plan in plans(self.folder, random.Random(self.seed)).items()}
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.service: subprocess.Popen[bytes] | None = None
        self.appeared: dict[str, float] = {}  # Times at which the open list showed the runs

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def store(self) -> Path:
        return self.folder / "history"

    def command(self, *arguments: object, run: str | None = None, folder: Path | None = None) -> Look:
        """Run a `rankscope` command in `folder`, and keep its output as a look."""
        before = time.time()
        words = [str(argument) for argument in arguments]
        done = subprocess.run(
            [sys.executable, "-m", "rankscope", *words],
            cwd=folder or self.folder,
            env=usual_environment() | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        problems = (f"exit code {done.returncode}: {done.stderr[-500:]}",) if done.returncode else ()
        return self._keep(
            Look(of=" ".join(words), run=run, text=done.stdout, before=before, after=time.time(), problems=problems)
        )

    def page(self, window: Browser, path: str | None, *, of: str, run: str | None = None) -> Look:
        """Read a page, which is loaded first if `path` is given."""
        before = time.time()
        if path is not None:
            window.open(self.url + path)
            window.drain(1.5)  # scripts fill it
        else:
            window.drain(0.1)
        shown = window.wait(READ)
        problems = tuple(window.problems)
        window.problems.clear()
        look = Look(of=of, run=run, problems=problems, before=before, after=time.time(), **shown)
        return self._keep(look, window.picture())

    def _keep(self, look: Look, picture: bytes = b"") -> Look:
        name = f"{len(self.looks):04}-{quote(look.of, safe='')[:80]}-{look.run or ''}"
        (self.folder / "looks").mkdir(exist_ok=True)
        (self.folder / "looks" / f"{name}.txt").write_text("\n".join((*look.problems, look.title, look.text)))
        if picture:
            (self.folder / "looks" / f"{name}.png").write_bytes(picture)
        self.looks.append(look)
        return look

    def offline(self) -> None:
        """Train without a service, and read the records in the working directory with commands without options."""
        self.start("offline", ranks=1, service=False)
        self.until(lambda: self.are_ended(["offline"]), "the training without a service ends")
        training = self.trainings["offline"]
        del self.jobs["offline"]
        for command in ("runs", "summary", "anomalies"):
            self.command(command, run=training.run, folder=training.folder)

    def afterwards(self) -> None:
        """Ask the commands about the ended runs, and close the incident of the ruined run."""
        for name in self.jobs:
            run = self.trainings[name].run
            self.command("incidents", run, "--store", self.store, run=run)
            self.command("summary", run, "--store", self.store, "--format", "json", run=run)
            self.command("report", run, "--store", self.store, "--output", self.folder / f"report-{name}.html", run=run)
        for scalar in ("reward", "my/accuracy"):
            figure = self.folder / f"{scalar.rpartition('/')[2]}.png"
            self.command(
                "plot", self.trainings["fast"].run, "--store", self.store, "--scalar", scalar, "--output", figure
            )
        run = self.trainings["nan"].run
        self.command("incidents", "close", run, "--note", "restarted by hand", "--store", self.store, run=run)
        closed = self.command("incidents", run, "--store", self.store, run=run)
        self.looks[-1] = dataclasses.replace(closed, of=f"{closed.of}, after it was closed")

    def start_service(self) -> None:
        command = [
            *(sys.executable, "-m", "rankscope", "serve", "--store", str(self.store), "--listen"),
            f"127.0.0.1:{self.port}",
        ]
        log = self.stack.enter_context((self.folder / "service.log").open("ab"))
        self.service = subprocess.Popen(
            [*command, "--notify", self.receiver.notify_url], stdout=log, stderr=log, env=usual_environment()
        )
        self.stack.callback(self.end, self.service)
        self.until(self._answers, "the service answers")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/healthz", timeout=2):
                return True
        except OSError:
            return False

    def start(self, name: str, *, ranks: int = 2, service: bool = True) -> None:
        """Start a training under torchrun. It restarts once after a failure."""
        training = self.trainings[name]
        training.ranks, training.started = ranks, time.time()
        environment = usual_environment() | {
            "OMP_NUM_THREADS": "1",
            "RANKSCOPE_RUN": training.run,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        if service:
            environment["RANKSCOPE_INGEST_URL"] = self.url
        log = self.stack.enter_context((training.folder / "training.log").open("ab"))
        launcher = [
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1"),
        ]
        self.jobs[name] = subprocess.Popen(
            [sys.executable, *launcher, str(SCRIPT), str(training.folder / "plan.json")],
            cwd=training.folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self.stack.callback(self.end, self.jobs[name])

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    @staticmethod
    def until(condition: Any, what: str, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            time.sleep(0.2)

    def are_ended(self, names: Sequence[str]) -> bool:
        return all(self.jobs[name].poll() is not None for name in names)

    def window(self, name: str) -> Browser:
        profile = self.folder / f"chromium-{name}"
        profile.mkdir()
        window = self.stack.enter_context(browser(self.chromium, profile))
        window.look(1440, 1000)
        window.call("Page.addScriptToEvaluateOnNewDocument", source=REMEMBER_CHARTS)
        return window

    def live(self) -> None:
        """Let the trainings run in three waves, and look at everything in each round until they have ended."""
        listing, following, visiting = self.window("list"), self.window("run"), self.window("visit")
        self.page(listing, "/", of="list")
        waves = iter((("slow", "fast", "nan"), ("crash", "spike"), ("loader",)))
        running: tuple[str, ...] = next(waves)
        self.start_all(running, listing)
        slow = self.trainings["slow"]
        self.until(lambda: slow.step_at(time.time()) >= 1, "the first step of the slow training")
        self.page(following, f"/runs/{slow.run}", of="run, open", run=slow.run)
        while running:
            began = time.monotonic()
            self.look_at_all(listing, following, visiting)
            while time.monotonic() < began + ROUND_SECONDS and not self.are_ended(running):
                time.sleep(0.5)
            waiting = [name for name in running if name != "slow"] or running
            if self.are_ended(waiting):
                running = tuple(next(waves, ())) + tuple(name for name in running if not self.are_ended([name]))
                self.start_all([name for name in running if name not in self.jobs], listing)
        self.until(lambda: all(state in {"completed", "failed"} for state in self.states()), "all runs have ended")
        time.sleep(8)  # the pages that are left open are loaded again
        self.page(listing, None, of="list, open, at the end")
        self.page(following, None, of="run, open, at the end", run=slow.run)
        self.look_at_all(listing, following, visiting)

    def start_all(self, names: Sequence[str], listing: Browser) -> None:
        for name in names:
            self.start(name)
        waiting = set(names)
        deadline = time.monotonic() + 180
        trained = [self.trainings[name] for name in names]
        while waiting and time.monotonic() < deadline and not all(one.step_at(time.time() - 20) for one in trained):
            text = listing.wait(READ)["text"]
            for name in [name for name in waiting if self.trainings[name].run in text]:
                self.appeared[name] = time.time()
                waiting.remove(name)
            listing.drain(0.2)

    def states(self) -> Iterator[str]:
        with urllib.request.urlopen(self.url + "/api/v1/runs", timeout=10) as answer:
            document = json.load(answer)
        for run in document if isinstance(document, list) else document["runs"]:
            yield run["state"]

    def look_at_all(self, listing: Browser, following: Browser, visiting: Browser) -> None:
        """Read the open windows, then every page of each run that has begun, and the commands."""
        self.page(listing, None, of="list, open")
        self.page(following, None, of="run, open", run=self.trainings["slow"].run)
        self.page(visiting, "/", of="list")
        self.command("runs", "--store", self.store)
        for name in self.jobs:
            training = self.trainings[name]
            if training.step_at(time.time() - 10) < 1:
                continue
            for page in PAGES:
                self.page(visiting, f"/runs/{training.run}{page}", of=page or "run", run=training.run)
            self.command("summary", training.run, "--store", self.store, run=training.run)
