"""The trainings of the person's hour, read from the files that they wrote without Rankscope."""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Training:
    """One run: its plan, and the lines of its ranks about each step."""

    plan: dict[str, Any]
    ranks: int = 2
    started: float = math.inf

    @property
    def run(self) -> str:
        name: str = self.plan["run"]
        return name

    @property
    def folder(self) -> Path:
        return Path(self.plan["folder"])

    def rows(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for rank in range(self.ranks):
            path = self.folder / f"truth-{rank}.jsonl"
            text = path.read_text() if path.exists() else ""
            lines += [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return sorted(lines, key=lambda line: (line["attempt"], line["step"], line["rank"]))

    def step_at(self, time: float) -> int:
        """Return the last step that every rank had completed at `time` in seconds since the epoch, 0 for none."""
        newest = [
            max(
                ((row["attempt"], row["step"]) for row in self.rows() if row["rank"] == rank and row["time"] <= time),
                default=(0, 0),
            )
            for rank in range(self.ranks)
        ]
        return min(newest)[1]

    def losses(self) -> dict[int, float]:
        """Return the mean loss of the ranks by step, of the last attempt that made the step."""
        found: dict[int, dict[int, float]] = {}
        for row in self.rows():
            found.setdefault(row["step"], {})[row["rank"]] = row["loss"]
        return {
            step: statistics.fmean(by_rank.values()) for step, by_rank in found.items() if len(by_rank) == self.ranks
        }

    def waited(self, rank: int) -> float:
        """Return the share of its time that a rank waited for data, without its first step."""
        rows = [row for row in self.rows() if row["rank"] == rank][1:]
        return sum(row["waited"] for row in rows) / sum(row["seconds"] for row in rows)
