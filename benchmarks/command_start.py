"""Start of `rankscope`: version, help and one command, against an empty application of typer and an empty Python."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from _rows import Row

ROUNDS = 9
EMPTY = """
import sys, typer
app = typer.Typer()
@app.callback()
def main(): "Empty."
@app.command()
def one(): "Empty."
sys.argv[:] = ["empty", "--help"]
app()
"""
COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "empty application of typer --help": ("-c", EMPTY),
    "rankscope --version": ("-m", "rankscope", "--version"),
    "rankscope --help": ("-m", "rankscope", "--help"),
    "rankscope runs --help": ("-m", "rankscope", "runs", "--help"),
}


def run() -> list[Row]:
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):  # alternately, so that all meet the same load
        for name, arguments in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - began)
    return [Row(name, statistics.median(found), "s") for name, found in seconds.items()]
