"""`make test-scale`: run the parts of this suite that have not passed yet, one after the other, and record each result.

The parts that have passed are in the file `.test-scale/passed.json`, which `make clean` deletes. The variable
RANKSCOPE_SCALE names parts, separated by commas, that run in any case, and no other ones. `make test-scale-edits` runs
the part crashes-s3-edits in this way.
"""

import datetime as dt
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / ".test-scale"
RADOSGW: Final = {"RANKSCOPE_RADOSGW": str(FOLDER / "radosgw")}
"""Environment in which the S3 server of the tests is radosgw; its programs are kept there."""
_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_SPARK_SETTINGS: Final = (
    "spark.driver.memory=3g",
    "spark.driver.host=127.0.0.1",
    "spark.driver.bindAddress=127.0.0.1",
    f"spark.driver.extraJavaOptions={_JAVA}",
    f"spark.executor.extraJavaOptions={_JAVA}",
    "spark.sql.shuffle.partitions=2",
    "spark.sql.codegen.wholeStage=false",
    "spark.sql.adaptive.enabled=false",
    "spark.ui.enabled=false",
)
SPARK: Final = {
    "TZ": "America/New_York",  # results do not depend on the time zone of the process
    "PYSPARK_SUBMIT_ARGS": shlex.join([*(f"--conf={one}" for one in _SPARK_SETTINGS), "pyspark-shell"]),
}
"""Environment of Spark: only loopback addresses, and no tasks and no compiled code that only large tables need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Arguments of one call of pytest, the variables that it needs, and the folder of its environment in ROOT."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    venv: str | None = None
    is_named: bool = False  # runs only if RANKSCOPE_SCALE names it

    def command(self) -> list[str]:
        python = sys.executable if self.venv is None else str(ROOT / self.venv / "bin" / "python")
        return [python, "-m", "pytest", "--timeout", "3000", *self.arguments]


_AT_EACH_REQUEST: Final = ("-n", "2", "-rP", "tests/object_store/test_requests.py")
_EDITS: Final = "rename or remove or join or copy or repair or import or upgrade"
"""The operations that a person calls. With them, the parts would take longer than an hour."""

PARTS: Final = {
    "radosgw": Part(arguments=("-s", "tests/object_store"), environment=RADOSGW),
    "writers": Part(arguments=("-s", "tests/scale/test_writers.py"), environment=RADOSGW),
    "crashes-s3": Part(arguments=(*_AT_EACH_REQUEST, "-k", f"not ({_EDITS})"), environment={}),
    "services": Part(arguments=("-s", "tests/scale/test_services.py"), environment={}),
    "spark": Part(arguments=("tests/scale/test_spark.py",), environment=SPARK | RADOSGW, venv=".venv-spark"),
    "crashes-s3-edits": Part(arguments=(*_AT_EACH_REQUEST, "-k", _EDITS), environment={}, is_named=True),
}


def chosen(names: str, passed: dict[str, str]) -> list[str]:
    """Return the parts to run. Raise SystemExit for an unknown name."""
    named = [name for name in names.split(",") if name]
    if unknown := [name for name in named if name not in PARTS]:
        raise SystemExit(f"RANKSCOPE_SCALE names {unknown[0]!r}, which is no part: choose from {', '.join(PARTS)}")
    return named or [name for name, part in PARTS.items() if name not in passed and not part.is_named]


def main() -> None:
    """Run the parts, and exit with 1 if one of them failed."""
    FOLDER.mkdir(exist_ok=True)
    state = FOLDER / "passed.json"
    passed: dict[str, str] = json.loads(state.read_text()) if state.exists() else {}
    failed = []
    for name in chosen(os.environ.get("RANKSCOPE_SCALE", ""), passed):
        started = time.monotonic()
        environment = {"RANKSCOPE_REQUIRE_SERVERS": "1", "OMP_NUM_THREADS": "1"} | PARTS[name].environment
        print(f"== part {name}", flush=True)
        done = subprocess.run(
            PARTS[name].command(), env=os.environ | environment | {"RANKSCOPE_SCALE": name}, cwd=ROOT, check=False
        )
        if done.returncode:
            failed.append(name)
            passed.pop(name, None)
        else:
            passed[name] = f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC in {time.monotonic() - started:.0f} s"
        state.write_text(json.dumps(passed, indent=1) + "\n")
    for name in PARTS:
        print(
            f"part {name}: {'FAILED' if name in failed else 'passed ' + passed[name] if name in passed else 'not run'}"
        )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
