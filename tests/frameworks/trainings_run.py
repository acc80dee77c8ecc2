"""Write FOLDER/<process>.pickle for each process of all trainings, forked from one that has imported the trainers."""

import atexit
import logging
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path

import torch
import torch._dynamo  # each process would import it with its first optimizer
import trainings
from trainings import MICROS, SKIPPED, Seeing, TrainingResults, Watch, results_of

LONGEST_SECONDS = 400  # tens are usual

EVERYWHERE: dict[str, Callable[..., None]] = {
    "accelerate": trainings.accelerate,
    "fabric": trainings.fabric,
    "hugging face": trainings.hugging_face,
    "lightning": trainings.lightning,
}
ALONE: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "accelerate, gradient scaler": (trainings.accelerate, {"scaled": True, "at": (SKIPPED - 1) * MICROS}),
    "hugging face, bfloat16": (trainings.hugging_face, {"bf16": True}),
    "hugging face, evaluating and saving": (
        trainings.hugging_face,
        {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    ),
    "lightning, bfloat16": (trainings.lightning, {"precision": "bf16-mixed"}),
    "lightning, gradient scaler": (trainings.lightning, {"scaled": True, "at": (SKIPPED - 1) * MICROS}),
    "lightning, by hand": (trainings.lightning, {"by_hand": True}),
}
RESUMED: dict[str, tuple[Callable[..., None], str]] = {
    "hugging face": (trainings.hugging_face, "hugging face, evaluating and saving/watched/checkpoint-2"),
    "lightning": (trainings.lightning, "lightning/watched/saved.ckpt"),
}
FAILING: dict[str, tuple[Callable[..., None], BaseException]] = {
    f"{name}, {type(error).__name__}": (EVERYWHERE[name], error)
    for name in ("hugging face", "lightning")
    for error in (ValueError("no such token"), KeyboardInterrupt())
}


def train_alone(folder: Path) -> None:
    results = {name: results_of(train, folder / name) for name, train in EVERYWHERE.items()}
    for name, (train, options) in ALONE.items():
        results[name] = results_of(train, folder / name, **options)
    for name, (train, path) in RESUMED.items():
        results[f"{name}, resumed"] = results_of(train, folder / "again" / name, resume=str(folder / path), max_steps=5)
    write(folder / "alone", results)


def train_as_rank(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {name: results_of(train, folder / name / str(rank)) for name, train in EVERYWHERE.items()}
    write(folder / str(rank), results)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train_in_vain(name: str, folder: Path) -> None:
    """Exit as the trainer does when the third forward pass fails; the results are written at exit."""
    train, error = FAILING[name]
    watch = Watch()
    atexit.register(lambda: write(folder / name, {name: watch.results()}))  # before the monitor's: it runs after it
    train(watch, folder / name, Seeing(MICROS, error))


def write(path: Path, results: dict[str, TrainingResults]) -> None:
    path.with_suffix(".pickle").write_bytes(pickle.dumps(results))


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import accelerate  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import transformers.trainer  # noqa: F401

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    works: list[Callable[[], None]] = [
        *(lambda rank=rank: train_as_rank(rank, folder) for rank in range(2)),
        lambda: train_alone(folder),
        *(lambda name=name: train_in_vain(name, folder) for name in FAILING),
    ]
    children = []
    for work in works:
        child = os.fork()
        if child == 0:
            signal.alarm(LONGEST_SECONDS)  # ends a rank that waits for an exited rank
            work()
            return  # the interpreter ends as that of any script
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
