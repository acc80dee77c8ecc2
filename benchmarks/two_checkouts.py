"""The time that two checkouts add to a training step: one step of each worker in turn, paired with a plain one.

    python benchmarks/two_checkouts.py OTHER_CHECKOUT [OTHER_PACKAGES] [--batch 2 --seq 64] [--threads 1] [--rounds 40]

OTHER_PACKAGES is a folder with packages that only the other checkout needs, such as numba. Each worker trains the same
GPT (12 layers, width 256, 149 parameters, 10.5 million elements) with AdamW and logs its loss. The order of the workers
is shuffled in each round, and a worker is asked for its step once the one before has become idle. `naive` calls
`.item()` five times for each gradient. "added" is the median of the paired differences to `none` in ms, with a
bootstrap interval of 95 %. "of other" is the ratio of the medians of added time of both checkouts, with its bootstrap
interval, and "of naive" that to naive hooks. "same" means that all parameters are bit for bit those of `none`. Needs
Linux.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

FOLDERS = ("exporter", "ingest", "storage", "view", "dashboards", "cli")
EVERYTHING = ["parameters", "gradients", "optimizer_state", "activations", "direction"]
SETTINGS: dict[str, dict[str, Any]] = {
    "gradients": {"quantities": ["gradients"]},
    "default": {},
    "everything": {"quantities": EVERYTHING},
    "unsampled": {"every": 100_000},
}


def build(sequence: int) -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int = 256) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = (
                part.view(batch, length, 4, width // 4).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self, width: int = 256) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(2048, width), nn.Embedding(sequence, width)
            self.blocks = nn.ModuleList(Block() for _ in range(12))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2048, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return Gpt()


def work(kind: str, batch: int, sequence: int, threads: int) -> None:
    """Train as one worker: a step for each line on standard input, and a line of JSON for each step."""
    import torch

    torch.set_num_threads(threads)
    model = build(sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = None
    if kind in SETTINGS:
        import rankscope

        settings = {"console": False, **SETTINGS[kind]}
        monitor = rankscope.Monitor(settings, total_steps=100_000).attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        tokens = torch.randint(0, 2048, (batch, sequence + 1), generator=generator)
        began = time.perf_counter()
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        if kind == "naive":
            for one in (parameter.grad for parameter in model.parameters()):
                assert one is not None
                one.norm().item(), one.isnan().any().item(), one.min().item(), one.max().item(), one.mean().item()
        optimizer.step()
        if monitor is not None:
            monitor.log(loss=loss, tokens=tokens.numel())
        wall, cpu = time.perf_counter() - began, time.process_time()
        for _ in range(50):
            time.sleep(0.02)
            before, cpu = cpu, time.process_time()
            if cpu - before < 0.001:
                break
        print(json.dumps(wall * 1e3), flush=True)
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
    high = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"digest": digest, "peak": int(high.split()[1]) / 1024}), flush=True)
    if monitor is not None:
        monitor.detach()


class Worker:
    def __init__(self, name: str, checkout: Path, packages: str, options: argparse.Namespace, folder: str) -> None:
        self.name = name
        self.times: list[float] = []
        paths = [str(checkout / one) for one in FOLDERS] + ([packages] if packages else [])
        own = {key: value for key, value in os.environ.items() if not key.startswith("RANKSCOPE_")}
        own |= {"PYTHONPATH": os.pathsep.join(paths), "NUMBA_CACHE_DIR": folder}
        kind = name.split(" ", maxsplit=1)[0]
        numbers = [str(number) for number in (options.batch, options.seq, options.threads)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", kind, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=own,
            cwd=folder,
        )

    def ask(self, line: str = "step") -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("end")
        self._process.wait(60)
        return found


def interval(figure: Callable[[list[int]], float], count: int) -> str:
    """Return the bootstrap interval of 95 % of a figure of some rounds, by their numbers."""
    draw = random.Random(1)  # noqa: S311 - no secret
    found = sorted(figure(draw.choices(range(count), k=count)) for _ in range(2000))
    return f"{found[50]:.2f} to {found[1949]:.2f}"


def table(workers: list[Worker], ends: dict[str, dict[str, Any]]) -> None:
    plain, rounds = workers[0].times, len(workers[0].times)
    added = {w.name: [own - base for own, base in zip(w.times, plain, strict=True)] for w in workers}

    def median_of(name: str, chosen: Sequence[int]) -> float:
        return statistics.median(added[name][number] for number in chosen)

    def ratio_of(name: str, other: str, chosen: Sequence[int]) -> float:
        return median_of(name, chosen) / (median_of(other, chosen) or math.nan)

    print("| worker | ratio | added ms | interval | of other | interval | of naive | peak MiB | same |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in list(added)[1:]:
        times = next(w.times for w in workers if w.name == name)
        texts = [f"{statistics.median(mine / base for mine, base in zip(times, plain, strict=True)):.3f}"]
        texts += [f"{median_of(name, range(rounds)):.2f}", interval(partial(median_of, name), rounds)]
        if (other := f"{name} of other") in added:
            texts += [f"{ratio_of(name, other, range(rounds)):.2f}", interval(partial(ratio_of, name, other), rounds)]
        else:
            texts += ["", ""]
        texts += [f"{ratio_of(name, 'naive', range(rounds)):.2f}", f"{ends[name]['peak']:.0f}"]
        print("|", " | ".join([name, *texts, str(ends[name]["digest"] == ends["none"]["digest"])]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("packages", nargs="?", default="")
    for name, default in (("batch", 2), ("seq", 64), ("threads", 1), ("rounds", 40), ("warmup", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kinds", default=",".join(SETTINGS))
    options = parser.parse_args()
    here, kinds = Path(__file__).resolve().parents[1], options.kinds.split(",")
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(name, here, "", options, folder) for name in ("none", "none again", "naive")]
        for kind in kinds:
            workers.append(Worker(kind, here, "", options, folder))
            workers.append(Worker(f"{kind} of other", options.other, options.packages, options, folder))
        shuffle = random.Random(0)  # noqa: S311 - no secret
        for round_number in range(options.warmup + options.rounds):
            for worker in shuffle.sample(workers, len(workers)):
                took = worker.ask()
                if round_number >= options.warmup:
                    worker.times.append(took)
        ends = {worker.name: worker.end() for worker in workers}
    print(f"batch {options.batch} x {options.seq}, {options.threads} thread(s), {options.rounds} rounds; ", end="")
    print(f"none: {statistics.median(workers[0].times):.1f} ms; load {os.getloadavg()[0]:.1f}")
    table(workers, ends)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], *map(int, sys.argv[3:6]))
    else:
        main()
