"""Import of logs of lines on one core, stored: µs of CPU per line and rate, without the start of the command.

python benchmarks/log_lines.py [LINES]
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from _rows import Row, print_rows
from importers import _row as megatron_row

LINES = 100_000

_MEASURED = """
import json, os, sys, time
os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))})  # one core for everything, Arrow's threads included
from pathlib import Path
path, store = Path(sys.argv[1]), Path(sys.argv[2])
from rankscope_ingest.importers import find_importer, import_records
from rankscope_storage.api.store import Store
importer = find_importer(path)
with Store.open(store, create=True).claim(owner="bench") as writer:
    began = time.process_time()
    report = import_records(path, writer, importer, run="bench")
    print(json.dumps([time.process_time() - began, report.rows_stored]))
"""


def run(lines: int = LINES) -> list[Row]:
    forms = {
        "short lines": _short,
        "long lines": _long,
        "Megatron": megatron_row,
        "Megatron with timers": _with_timers,
        "Megatron with other lines": _with_other_line,
        "Megatron without a last bar": _without_bar,
        "dictionaries": _dictionary,
    }
    return [row for name, line in forms.items() for row in _rows(name, line, lines)]


def _rows(name: str, line: Callable[[int], str], lines: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        text = "".join(line(step) for step in range(1, lines + 1))
        lines = text.count("\n")
        path.write_text(text)
        size = path.stat().st_size
        command = [sys.executable, "-c", _MEASURED, str(path), f"{folder}/store"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, rows = json.loads(done.stdout)
    note = f"{size / lines:.0f} bytes a line, {rows:,} rows"
    return [
        Row(f"{name}: a line", 1e6 * seconds / lines, "µs CPU", note),
        Row(f"{name}: rate", size / seconds / 1e6, "MB/s", ""),
    ]


def _values(step: int) -> tuple[float, float, float, int]:
    wave = math.sin(step) / 20
    return (
        2 + 8 * math.exp(-step / 20_000) + wave,
        1e-3 * (0.6 + math.cos(step / 1e5) / 2),
        0.5 + wave,
        50_000 + step % 900,
    )


def _clock(step: int) -> str:
    return f"2026-01-{1 + step // 86_400:02d} {step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d}"


def _short(step: int) -> str:
    loss, rate, norm, speed = _values(step)
    return f"{_clock(step)} [INFO] step {step} | loss {loss:.4f} | lr {rate:.3e} | grad_norm {norm:.3f} | tps {speed}\n"


def _long(step: int) -> str:
    loss, rate, norm, speed = _values(step)
    return (
        f"[{_clock(step)},{step % 1000:03d}] [INFO] [trainer.py:412:log] step: {step}/200000 | loss: {loss:.4f} | "
        f"lr: {rate:.3e} | grad_norm: {norm:.3f} | tps: {speed} | mfu: {speed / 1300:.2f}% | "
        f"step_time: {5000 / speed:.3f}s | data_time: {0.01 + norm / 1000:.4f}s | memory: {50 + norm:.2f}GiB | "
        f"aux_loss: {loss / 10:.5f} | tokens: {step * 4096}\n"
    )


def _with_timers(step: int) -> str:
    forward, backward = 265 + step % 97 / 10, 520 + step % 89 / 10
    return f"{megatron_row(step)}time (ms) | forward-compute: {forward:.2f} | backward-compute: {backward:.2f}\n"


def _with_other_line(step: int) -> str:
    return f"{megatron_row(step)}worker {step % 8} has read shard {step} from the cache in {step % 97 / 10:.1f} s\n"


def _without_bar(step: int) -> str:
    return megatron_row(step).rstrip(" |\n") + "\n"


def _dictionary(step: int) -> str:
    loss, rate, norm, _ = _values(step)
    return f"{ {'loss': round(loss, 4), 'grad_norm': norm, 'learning_rate': rate, 'epoch': round(step / 1e4, 2)} }\n"


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run(*map(int, sys.argv[1:])))
