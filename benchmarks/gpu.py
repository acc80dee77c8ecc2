"""Cost of the monitor on a GPU: step times, bandwidth of the statistics, kernels, memory, reading of the state.

    python benchmarks/gpu.py [FOLDER]

Writes gpu.json and gpu.md to FOLDER. All configurations of a model run in one process and take turns, in an order that
changes from round to round. A time of a step includes a wait for the device after each block of steps. Without a GPU
there are no rows; RANKSCOPE_GPU_STAND_IN=cpu runs the code with tiny models, whose figures have no meaning.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from _rows import Row, machine, print_rows
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from rankscope_contract.model.kinds import VALUE_OPS
from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.measure.kernels.compiled import backend_name, kernel_of
from rankscope_exporter.measure.kernels.measure_group import MeasureGroup
from rankscope_exporter.measure.kernels.statistics_table import StatisticsTable
from rankscope_exporter.measure.quantities import quantity_classes
from rankscope_exporter.monitors.hardware import READINGS, Gpu, load_nvml, uuid_of

STAND_IN: Final = os.environ.get("RANKSCOPE_GPU_STAND_IN")
DEVICE: Final = torch.device(STAND_IN or "cuda")
ALL_OPS: Final = [*VALUE_OPS, "nans", "infs", "zeros"]
EVERYTHING: Final = {"quantities": list(quantity_classes()), "ops": ALL_OPS}
NO_NORMS: Final = {"quantities": [name for name in quantity_classes() if name != "linear"], "ops": ALL_OPS}
"""All quantities but `linear`, which computes the spectral norms of all weights and needs most of the time."""
NEVER: Final = 1_000_000_000
CONFIGURATIONS: Final[dict[str, dict[str, Any] | None]] = {
    "no monitor": None,
    "no monitor again": None,
    "no step sampled": {"every": NEVER},
    "default, every 10": {"every": 10},
    "default, every step": {},
    "all but linear, every step": NO_NORMS,
    "everything, every step": EVERYTHING,
}
COSTLY: Final = ("all but linear, every step", "everything, every step")
"""Configurations that take part in the first two rounds only, with short blocks."""
BLOCK: Final = 10 if not STAND_IN else 2
"""Steps of a block. With `every: 10`, a block has one sampled step."""
SHORT_BLOCK: Final = 3 if not STAND_IN else 1
"""Steps of a block of a costly configuration."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT and its batch."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    context: int
    seconds: float
    """Limit for all rounds of step times; at least two rounds run."""


SHAPES: Final = (
    (Shape("tiny", 2, 32, 4, 100, 2, 16, 4), Shape("host-bound", 2, 32, 4, 100, 2, 16, 4))
    if STAND_IN
    else (
        Shape("GPT 124M, 8x1024, bf16", 12, 768, 12, 50_304, 8, 1024, 60),
        Shape("12 layers of 256, 2x64, host-bound", 12, 256, 8, 1024, 2, 64, 45),
    )
)


class Layer(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2: 148 parameters in 12 layers, with a head that shares the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Training:
    """One model with its optimizer and batch, trained with one configuration after another."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.model = GPT(shape).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.context), device=DEVICE)

    def step(self, monitor: Monitor | None) -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = self.model(self.ids)
            loss = cross_entropy(logits.flatten(0, 1), self.ids.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if monitor is not None:
            monitor.log(loss=loss, tokens=self.ids.numel())

    @contextlib.contextmanager
    def monitored(self, settings: dict[str, Any] | None) -> Iterator[Monitor | None]:
        if settings is None:
            yield None
            return
        config = MonitorConfig.from_mapping({"console": False, "exit_wait_seconds": 0, **settings})
        with Monitor(config).attach(self.model, self.optimizer) as monitor:
            yield monitor
        if monitor.faults:
            print(f"{monitor.faults} faults with {settings}", file=sys.stderr)


def run(folder: Path | None = None) -> list[Row]:
    """Return all rows; none without a GPU. Rewrite the files in `folder` after each part."""
    logging.getLogger("rankscope").setLevel(logging.ERROR)
    if not STAND_IN and not torch.cuda.is_available():
        print("no GPU: nothing is measured", file=sys.stderr)
        return []
    parts: list[Callable[[], list[Row]]] = [
        passes,
        hardware,
        *(lambda shape=shape: sampled_step(shape) for shape in SHAPES),
        lambda: memory(SHAPES[0]),
        *(lambda shape=shape: steps(shape) for shape in SHAPES),  # last: they take longest
    ]
    rows: list[Row] = []
    for extra_sums in ((), ("sum_of_fourth_powers",)):
        if (compiling := kernel_of(DEVICE, extra_sums).warm_up()) is not None:
            compiling.join()
    print(f"statistics by {backend_name(DEVICE)}", file=sys.stderr)
    for part in parts:
        try:
            rows += part()
        except Exception as error:  # noqa: BLE001 - the other parts are measured after an error of one
            rows.append(Row("failed", 0.0, "", repr(error)[:300]))
        if folder is not None:
            _write(folder, rows)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return rows


# (a) Bandwidth of the statistics.


def passes() -> list[Row]:
    """Return the bytes per second of one pass over large tensors and over the parameters of GPT-2."""
    gibibyte = 1 << (20 if STAND_IN else 30)
    shapes = [parameter.shape for parameter in GPT(SHAPES[0]).parameters()]
    cases = {
        "1 GiB float32": [torch.randn(gibibyte // 4, device=DEVICE)],
        "1 GiB bfloat16": [torch.randn(gibibyte // 2, device=DEVICE, dtype=torch.bfloat16)],
        f"{len(shapes)} tensors of GPT-2, float32": [torch.randn(shape, device=DEVICE) for shape in shapes],
        f"{len(shapes)} tensors of GPT-2, bfloat16": [
            torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes
        ],
    }
    return [row for name, tensors in cases.items() for row in _pass(name, tensors)]


def _pass(name: str, tensors: list[torch.Tensor]) -> list[Row]:
    size = sum(tensor.nbytes for tensor in tensors)
    table = StatisticsTable(len(tensors), DEVICE)
    group = MeasureGroup(range(len(tensors)))
    copies = [torch.empty_like(tensor) for tensor in tensors]
    ways: dict[str, Callable[[], object]] = {
        "a copy, which also writes": lambda: torch._foreach_copy_(copies, tensors),
        "torch._foreach_norm": lambda: torch._foreach_norm(tensors),  # noqa: SLF001 - as torch's clipping does
        "norm, min, max, mean and three counts, one call each": lambda: naive(tensors),
        "statistics": lambda: group.measure(tensors, table),
    }
    rows = []
    for way, work in ways.items():
        seconds, host = _seconds(work)
        note = f"{1e3 * seconds:.3g} ms on the device, {1e3 * host:.3g} ms until the host is done"
        rows.append(Row(f"{name}: {way}", size / seconds / 1e9, "GB/s read", note))
    return rows


def naive(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the default statistics of each tensor by one torch call each, without a wait for the device."""
    found = []
    for tensor in tensors:
        norm, mean = torch.linalg.vector_norm(tensor, dtype=torch.float32), tensor.mean(dtype=torch.float32)
        least, most = torch.aminmax(tensor)
        counts = (tensor.isnan().sum(), tensor.isinf().sum(), torch.count_nonzero(tensor))
        found.append(torch.stack([norm, mean, least.float(), most.float(), *(count.float() for count in counts)]))
    return found


def _seconds(work: Callable[[], object], repeats: int = 2 if STAND_IN else 7) -> tuple[float, float]:
    """Return the medians of the seconds until the device is done, and until the host has queued all work."""
    work()
    whole, host = [], []
    for _ in range(repeats):
        synchronize()
        began = time.perf_counter()
        work()
        host.append(time.perf_counter() - began)
        synchronize()
        whole.append(time.perf_counter() - began)
    return statistics.median(whole), statistics.median(host)


# (b) Reading of the GPU's state.


def hardware() -> list[Row]:
    """Return the microseconds of one reading of the GPU through NVML, on the thread that reads it."""
    nvml, uuid = load_nvml(), uuid_of(DEVICE)
    gpu = None if nvml is None or uuid is None else Gpu.open(nvml, uuid)
    if gpu is None:
        return []
    metrics = gpu.read(_raised)
    taken, used = [], []
    for _ in range(50):
        began, began_cpu = time.perf_counter(), time.thread_time()
        gpu.read(_raised)
        gpu.xids(_raised)
        taken.append(time.perf_counter() - began)
        used.append(time.thread_time() - began_cpu)
    note = f"{1e6 * statistics.median(used):.3g} us of CPU time; {len(metrics)} metrics"
    rows = [Row("one reading through NVML", 1e6 * statistics.median(taken), "us", note), *_slowest_readings(nvml, gpu)]
    gpu.close()
    return rows


def _slowest_readings(nvml: Any, gpu: Gpu) -> list[Row]:
    handle, rows = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid), []
    for name, read in READINGS.items():
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            list(read(nvml, handle))
            began = time.perf_counter()
            for _ in range(5):
                list(read(nvml, handle))
            rows.append(Row(f"NVML: {name}", 2e5 * (time.perf_counter() - began), "us", "mean of 5"))
    return sorted(rows, key=lambda row: -row.value)[:5]


def _raised(_operation: str, error: BaseException) -> None:
    raise error


# (c) One sampled step.


def sampled_step(shape: Shape) -> list[Row]:
    """Return the additional time of a sampled step on the host and on the device, and its kernels."""
    training = Training(shape)
    found: dict[str, tuple[float, float, int]] = {}
    for name in (name for name in CONFIGURATIONS if name not in ("no monitor again", "default, every 10")):
        with training.monitored(CONFIGURATIONS[name]) as monitor:
            for _ in range(4):
                training.step(monitor)
            whole, host = _seconds(lambda monitor=monitor: training.step(monitor))
            found[name] = (host, whole, _kernels(lambda monitor=monitor: training.step(monitor)))
    rows = []
    for name, (host, whole, kernels) in found.items():
        rows += [
            Row(f"{shape.name}, {name}: host", 1e3 * host, "ms", "until the step is queued"),
            Row(f"{shape.name}, {name}: step", 1e3 * whole, "ms", "until the device is done"),
            Row(f"{shape.name}, {name}: kernels", float(kernels), "kernels and copies", "by torch's profiler"),
        ]
    return rows


def _kernels(work: Callable[[], object]) -> int:
    if DEVICE.type != "cuda":
        return 0
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


# (d) Memory.


def memory(shape: Shape) -> list[Row]:
    """Return the peak of the allocated device memory that a monitor adds."""
    training = Training(shape)
    peaks = {name: _peak(training, settings) for name, settings in CONFIGURATIONS.items()}
    plain = peaks["no monitor"]
    return [
        Row(f"{shape.name}, {name}: peak memory", peak / 2**20, "MiB", f"{(peak - plain) / 2**20:+.1f} MiB")
        for name, peak in peaks.items()
    ]


def _peak(training: Training, settings: dict[str, Any] | None) -> int:
    if DEVICE.type != "cuda":
        return 0
    with training.monitored(settings) as monitor:
        training.step(monitor)
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            training.step(monitor)
        synchronize()
        return torch.cuda.max_memory_allocated()


# (e) Time of a step.


def steps(shape: Shape) -> list[Row]:
    """Return the milliseconds of a step for each configuration, and the ratios to a step without a monitor."""
    training = Training(shape)
    _block(training, None)
    taken: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
    began, order = time.monotonic(), list(CONFIGURATIONS)
    shuffle = random.Random(1)  # noqa: S311 - an order, no secret
    while len(taken["no monitor"]) < 2 or time.monotonic() - began < shape.seconds:
        if len(taken["no monitor"]) == 2:
            order = [name for name in order if name not in COSTLY]
        shuffle.shuffle(order)
        for name in order:
            with training.monitored(CONFIGURATIONS[name]) as monitor:
                for _ in range(1 if name in COSTLY else 3):  # the first steps of a monitor allocate its buffers
                    training.step(monitor)
                taken[name].append(_block(training, monitor, SHORT_BLOCK if name in COSTLY else BLOCK))
    plain = taken["no monitor"]
    return [
        Row(f"{shape.name}: {name}", 1e3 * statistics.median(values), "ms", _ratios(values, plain))
        for name, values in taken.items()
    ]


def _ratios(values: Sequence[float], plain: Sequence[float]) -> str:
    """Return the median and the quartiles of the ratios of each round, and the fastest step's ratio."""
    ratios = [value / reference for value, reference in zip(values, plain, strict=False)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    quickest = min(values) / min(plain)
    return (
        f"{middle:.3f} x no monitor (quartiles {low:.3f} to {high:.3f} of {len(ratios)} rounds); "
        f"fastest block {1e3 * min(values):.3g} ms, {quickest:.3f} x"
    )


def _block(training: Training, monitor: Monitor | None, steps: int = BLOCK) -> float:
    """Return the seconds of one step, of a block that ends when the device is done."""
    synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        training.step(monitor)
    synchronize()
    return (time.perf_counter() - began) / steps


def synchronize() -> None:
    """Wait until the device has done all queued work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _write(folder: Path, rows: Sequence[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no device"
    about = {"machine": machine(), "device": name, "torch": torch.__version__}
    (folder / "gpu.json").write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    with (folder / "gpu.md").open("w") as page, contextlib.redirect_stdout(page):
        print(", ".join(about.values()))
        print_rows((__doc__ or "").splitlines()[0], rows)


if __name__ == "__main__":
    os.environ.setdefault("RANKSCOPE_SPOOL_DIR", "off")
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    print_rows((__doc__ or "").splitlines()[0], run(target))
