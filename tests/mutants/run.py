"""Change the code in 120 drawn places, one at a time, and see whether a test notices each.

    python -m tests.mutants.run draw LIST            draw the changes with a fixed seed
    python -m tests.mutants.run map LIST             run all tests once; record which of them execute each line
    python -m tests.mutants.run test LIST RESULT     try each change; go on where an earlier call was interrupted
    python -m tests.mutants.run compare ONE OTHER    print what the first result killed and the other did not

A change is tried on the tests that execute its line, those of its own folder first and short ones first, until one
fails. It is killed if this test passes without the change, or if the tests do not end in four times their time.
"""

import argparse
import csv
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from tests.mutants.changes import Change, changes

ROOT: Final = Path(__file__).parents[2]
SEED: Final = 20_261_129
PER_AREA: Final = 12
AREAS: Final = {
    "rules": ("exporter/rankscope_contract/rules/*.py", "ingest/rankscope_ingest/importers/common/rules.py"),
    "writer and watermarks": (
        "storage/rankscope_storage/writer/*.py",
        "storage/rankscope_storage/log/*.py",
        "ingest/rankscope_ingest/pipeline/flusher.py",
    ),
    "ring and spool": (
        "exporter/rankscope_exporter/publish/ring.py",
        "exporter/rankscope_exporter/publish/spool.py",
        "exporter/rankscope_contract/wire/spool/*.py",
    ),
    "step model": (
        "exporter/rankscope_exporter/training/*.py",
        "exporter/rankscope_exporter/monitors/step_timing/*.py",
    ),
    "statistics": ("exporter/rankscope_exporter/measure/kernels/**/[!nk]*.py",),
    "record validation": ("ingest/rankscope_ingest/record_channel/*.py",),
    "line grammar": (
        "ingest/rankscope_ingest/importers/*.py",
        "ingest/rankscope_ingest/importers/megatron/*.py",
        "ingest/rankscope_ingest/importers/common/[dklpsv]*.py",
    ),
    "SQL views": ("storage/rankscope_storage/sql/*.py",),
    "incident states": (
        "ingest/rankscope_ingest/detect/*.py",
        "ingest/rankscope_ingest/runs/incident.py",
        "storage/rankscope_storage/runs/incidents.py",
    ),
    "notify": ("ingest/rankscope_ingest/notify/**/*.py",),
}
COVERAGE: Final = ROOT / ".mutants"  # Folder of the recorded lines and durations. It is not committed.

FIRST_SECONDS: Final = 90.0
"""The tests that a change is tried on first have about this duration together. The others follow if none fails."""

MOST_SECONDS: Final = 600.0


@dataclass(frozen=True)
class Mutant:
    """A drawn change. Its number and its place in the code of the day on which it was drawn."""

    number: int
    area: str
    file: str
    function: str
    line: str
    place: int
    before: str
    after: str

    @property
    def change(self) -> Change:
        return Change(self.function, self.line, self.place, self.before, self.after)


@dataclass(frozen=True)
class Result:
    """The fate of a mutant: killed, survived, or gone if its line does not exist any more."""

    number: int
    area: str
    file: str
    line: str
    before: str
    after: str
    verdict: str
    by: str
    tests: int
    seconds: float


def draw() -> list[Mutant]:
    """Return the mutants of all areas. The choice depends on the code and SEED only."""
    found = []
    for area, patterns in AREAS.items():
        files = sorted({path for pattern in patterns for path in ROOT.glob(pattern) if "triton" not in path.name})
        possible = [
            (path.relative_to(ROOT).as_posix(), change)
            for path in files
            for _, _, change in changes(path.read_text(encoding="utf-8"))
        ]
        drawn = random.Random(f"{SEED} {area}").sample(possible, PER_AREA)
        found += [
            Mutant(len(found) + index, area, file, **asdict(change)) for index, (file, change) in enumerate(drawn, 1)
        ]
    return found


def write(path: Path, rows: Iterable[Mutant | Result], *, append: bool = False) -> None:
    """Write one line per row; texts are in JSON, so that each has one line."""
    with path.open("a" if append else "w", encoding="utf-8", newline="") as out:
        table = csv.writer(out, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_NONE, quotechar=None)
        for index, row in enumerate(rows):
            if not index and not append:
                table.writerow(asdict(row))
            table.writerow(json.dumps(value, ensure_ascii=False) for value in asdict(row).values())


def read(path: Path, kind: type[Mutant | Result]) -> list[Mutant | Result]:
    _, *lines = path.read_text(encoding="utf-8").splitlines()
    return [kind(*map(json.loads, line.split("\t"))) for line in lines]


def located(mutant: Mutant) -> tuple[set[int], bytes] | None:
    """Return the numbers of the lines that a mutant changes, and the changed file; None if the line is gone."""
    path = ROOT / mutant.file
    if not path.exists():
        return None
    source = path.read_text(encoding="utf-8")
    for number, place, change in changes(source):
        if change == mutant.change:
            data = source.encode()
            lines = set(range(number, number + mutant.before.count("\n") + 1))
            return lines, data[: place.begin] + place.text.encode() + data[place.end :]
    return None


def record(mutants: list[Mutant]) -> int:
    """Run all tests, and record the lines of the files of `mutants` that each executes, and the duration of each."""
    COVERAGE.mkdir(exist_ok=True)
    files = sorted({str(ROOT / mutant.file) for mutant in mutants})
    settings = COVERAGE / "coverage.ini"
    settings.write_text(
        f"[run]\nparallel = true\npatch = subprocess, _exit\ncontext = ${{PYTEST_CURRENT_TEST}}\n"
        f"data_file = {COVERAGE}/data\ninclude =\n" + "".join(f"    {file}\n" for file in files),
        encoding="utf-8",
    )
    # Python starts the recorder in each process of a test.
    (COVERAGE / "site" / "sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n", "utf-8")
    options = [f"--cov-config={settings}", "--cov", "--cov-context=test", "--cov-report=", "--durations=0", "-vv"]
    options += ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    variables = {**os.environ, "PYTHONPATH": str(COVERAGE / "site")}
    with (COVERAGE / "tests.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False, stdout=log, env=variables
        )
    return done.returncode


DURATION: Final = re.compile(r"^([0-9.]+)s (?:call|setup|teardown) +(tests/.*)$", re.MULTILINE)
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)


@functools.cache
def durations() -> dict[str, float]:
    printed = (COVERAGE / "tests.log").read_text(encoding="utf-8")
    found: dict[str, float] = defaultdict(float)
    for seconds, test in DURATION.findall(printed):
        found[test.rstrip()] += float(seconds)
    for test in FAILED.findall(printed):
        found.pop(test, None)
    return found


@functools.cache
def tests_of_lines(file: str) -> dict[int, set[str]]:
    """Return the tests that execute each line of a file."""
    sys.path.append(str(COVERAGE / "site"))  # where `make test-mutants` installs it
    from coverage import CoverageData

    data = CoverageData(str(COVERAGE / "data"))
    data.read()
    found: dict[int, set[str]] = {}
    for line, contexts in data.contexts_by_lineno(str(ROOT / file)).items():
        names = chain.from_iterable(context.split("|") for context in contexts)
        tests = {re.sub(r" \((?:call|setup|teardown)\)$", "", name) for name in names}
        found[line] = {test for test in tests if test in durations()}
    return found


def covering(file: str, lines: set[int]) -> list[str]:
    """Return the tests that execute one of these lines: those of the same folder first, then the short ones.

    The other tests of their files follow. Code of a shared set-up is recorded for the first test that uses it.
    """
    by_line = tests_of_lines(file)
    tests = set().union(*(by_line.get(line, set()) for line in lines))
    package, *rooms = Path(file.replace("exporter/rankscope_contract", "contract/-")).parent.parts
    folder = "/".join(("tests", package, *rooms[1:], ""))
    if not tests:  # a line that is executed at the import, or in processes that are not recorded
        tests = set().union(*by_line.values(), {test for test in durations() if test.startswith(folder)})
    stem = Path(file).stem
    files = {test.partition("::")[0] for test in tests}
    found = {test for test in durations() if test.partition("::")[0] in files}
    return sorted(
        found,
        key=lambda test: (test not in tests, stem not in test, not test.startswith(folder), durations()[test], test),
    )


def environment(mutant: Mutant | None, copy: Path) -> dict[str, str]:
    """Return the environment of a process that imports the changed file."""
    found = {**os.environ, "OMP_NUM_THREADS": "1"}
    if mutant is not None:
        found |= {
            "PYTHONPATH": str(Path(__file__).with_name("hook")),
            "MUTANT_OF": os.path.realpath(ROOT / mutant.file),
            "MUTANT_COPY": str(copy),
        }
    return found


def failed(tests: list[str], variables: dict[str, str], seconds: float) -> str | None:
    """Run tests until one fails. Return its name, "time" if they do not end in `seconds`, None if all pass."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as names:
        names.write("\n".join(tests))
        names.flush()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", "--tb=no", f"@{names.name}"]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return "time"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            out.seek(0)
            found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", out.read(), re.MULTILINE)
            return None if not status else found[1] if found else "start"


def tried(mutant: Mutant) -> Result:
    began = time.monotonic()

    def result(verdict: str, by: str, tests: int) -> Result:
        seconds = round(time.monotonic() - began, 1)
        where = f"{mutant.function}: {mutant.line}"
        return Result(
            mutant.number, mutant.area, mutant.file, where, mutant.before, mutant.after, verdict, by, tests, seconds
        )

    found = located(mutant)
    if found is None:
        return result("gone", "", 0)
    lines, changed = found
    tests = covering(mutant.file, lines)
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "changed.py")
        copy.write_bytes(changed)
        for part in parts(tests):
            count += len(part)
            limit = 120 + 4 * sum(durations()[test] for test in part)
            by = failed(part, environment(mutant, copy), limit)
            if by == "time" and not failed(part, environment(None, copy), limit):
                return result("killed", by, count)
            if by and by != "time" and (by == "start" or not failed([by.strip()], environment(None, copy), 600)):
                return result("killed", by, count)
    return result("survived", "", count)


def parts(tests: list[str]) -> Iterator[list[str]]:
    """Yield the first tests of FIRST_SECONDS, then the others up to MOST_SECONDS."""
    first: list[str] = []
    others: list[str] = []
    total = 0.0
    for test in tests:
        total += durations()[test]
        if total <= FIRST_SECONDS or not first:
            first.append(test)
        elif total <= MOST_SECONDS:
            others.append(test)
    yield from filter(None, (first, others))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["draw", "map", "test", "compare"])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path, nargs="?")
    chosen = parser.parse_args()
    if chosen.command == "draw":
        write(chosen.first, draw())
        return 0
    if chosen.command == "compare":
        earlier = {result.number for result in read(chosen.first, Result) if result.verdict == "killed"}
        lost = [result for result in read(chosen.second, Result) if result.verdict == "survived"]
        print(*(result for result in lost if result.number in earlier), sep="\n")
        return int(any(result.number in earlier for result in lost))
    mutants = read(chosen.first, Mutant)
    if chosen.command == "map":
        return record(mutants)
    known = {result.number for result in read(chosen.second, Result)} if chosen.second.exists() else set()
    left = [mutant for mutant in mutants if mutant.number not in known]
    with ThreadPoolExecutor(2) as pool:
        for done in as_completed([pool.submit(tried, mutant) for mutant in left]):
            result = done.result()
            write(chosen.second, [result], append=chosen.second.exists())
            print(f"{result.number}\t{result.verdict}\t{result.seconds:.0f} s\t{result.by}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
