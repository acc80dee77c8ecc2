"""Output that msprobe 26.2.0 wrote, and its rows as Python's csv module reads them."""

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path

OUTPUT = Path(__file__).parents[2] / "data" / "msprobe"
SINGLE, TWO_RANKS = OUTPUT / "single_rank", OUTPUT / "two_ranks_nan"
TENSOR_TYPES = (
    "actv", "actv_grad", "exp_avg", "exp_avg_sq", "grad_unreduced", "grad_reduced", "param_origin", "param_updated",
)  # fmt: skip
STATISTICS = ("norm", "min", "max", "zeros", "nans", "mean")


def csv_rows(output: Path, types: tuple[str, ...]) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Yield rank, data type and cells of each row in the files of msprobe below `output`."""
    for path in sorted(output.glob("*-rank*/*.csv")):
        data_type, rank = path.name.rpartition("_")[0], int(re.search(r"-rank(\d+)-", str(path))[1])
        if data_type in types:
            with path.open(newline="") as file:
                yield from ((rank, data_type, row) for row in csv.DictReader(file))


def numbers(row: dict[str, str]) -> dict[str, float]:
    return {name: float(row[name]) for name in STATISTICS if name in row}


def without_nan(row: dict[str, str]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in numbers(row).items()}
