"""Import the records of `train.py` into a store, and compare each stored value with the value that the formulas gave.

`python compare.py FOLDER` runs with all of Rankscope. It prints one line for each training, and exits with 1 if a value
differs or is missing.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import rankscope

TOLERANCE = 2e-5
"""Relative difference of float32, in which torch trains, from the formulas in float64."""

STORED = """
    select step, rank, kind, tensor, norm from tensor_stats where run = $run
    union all select step, rank, 'scalar', name, value from scalars where run = $run and name = 'loss'
"""


def main() -> int:
    folder = Path(sys.argv[1]).absolute()
    store = folder / "history"
    command = [sys.executable, "-m", "rankscope", "import", str(folder / "rankscope-records"), "--store", str(store)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    differences = 0
    with rankscope.connect(store) as history:
        for path in sorted(folder.glob("*.json")):
            document = json.loads(path.read_text())
            found = history.sql(STORED, {"run": path.stem}).fetchall()
            stored = {tuple(key): value for *key, value in found}
            wrong = [
                (one, value)
                for one in document["rows"]
                for value in [stored.get((one["step"], one["rank"], one["kind"], one["tensor"]))]
                if value is None or not math.isclose(value, one["value"], rel_tol=TOLERANCE, abs_tol=1e-12)
            ]
            equal = len(document["rows"]) - len(wrong)
            print(f"torch {document['torch']}, {path.stem}: {equal} of {len(document['rows'])} numbers, bits equal")
            for one, value in wrong[:5]:
                print(f"  {one}: stored {value}")
            differences += len(wrong)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
