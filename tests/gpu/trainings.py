"""Small trainings with equal bits with and without a monitor. RANKSCOPE_GPU_STAND_IN=cpu only shows that tests run."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.measure.quantities import quantity_classes
from rankscope_exporter.records.plan import VALUE_OPS

QUIET: Final = {"console": False, "exit_wait_seconds": 0}
CONFIGURATIONS: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "everything": {
        "quantities": list(quantity_classes()),
        "ops": [*VALUE_OPS, "nans", "infs", "zeros"],
        "options": {"parameters": {"updates": True}, "gradients": {"sum_micro_batches": True}},
    },
}
"""The default configuration, and one that measures all quantities and all statistics at each step."""


def configured(name: str, **settings: Any) -> MonitorConfig:
    return MonitorConfig.from_mapping({**QUIET, **CONFIGURATIONS[name], **settings})


@dataclass(frozen=True, slots=True)
class Device:
    name: torch.device

    @property
    def is_cuda(self) -> bool:
        return self.name.type == "cuda"

    def sleep(self, seconds: float) -> None:
        """Queue work that takes `seconds` to the current stream."""
        if self.is_cuda:
            torch.cuda._sleep(int(seconds * _cycles_per_second()))
        else:
            time.sleep(seconds)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.name)

    def timed(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        if not self.is_cuda:
            work()
            return time.perf_counter() - began
        self.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        work()
        events[1].record()
        self.synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Raise an error in the thread that waits for the device, except in an explicit `synchronize`."""
        if not self.is_cuda:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@functools.cache
def _cycles_per_second() -> float:
    cycles = 200_000_000
    device = Device(torch.device("cuda", torch.cuda.current_device()))
    for _ in range(4):
        torch.cuda._sleep(cycles)  # the clock of the device rises under load
    return cycles / device.timed(lambda: torch.cuda._sleep(cycles))


STEPS, WIDTH = 6, 64


class Block(nn.Module):
    """An embedding, a transformer block with dropout, and a head."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 128)
        self.reentrant = checkpointed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        if self.reentrant is None:
            hidden = self.block(hidden)
        else:
            hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


class Images(nn.Module):
    """Convolutions with batch norm, and the buffers of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).mean((2, 3)))


class Small(nn.Module):
    """Two layers with dropout, which are compiled within seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def ids(device: torch.device) -> torch.Tensor:
    return torch.randint(0, 128, (4, 16), device=device)


def vectors(device: torch.device) -> torch.Tensor:
    return torch.randn(8, 16, device=device)


def images(device: torch.device) -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, device=device).to(memory_format=torch.channels_last)


def adamw(parameters: Iterable[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training: its model, its precision, its optimizer, and how it runs."""

    model: Callable[[], nn.Module] = Block
    batch: Callable[[torch.device], torch.Tensor] = ids
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    optimizer: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    scale: float | None = None
    """Initial scale of a GradScaler; large scales overflow, so that steps are skipped."""
    micro_batches: int = 1
    clips: bool = False

    def build(self, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.wrap(self.model().to(device).to(memory_format=torch.channels_last))
        is_cuda = device.type == "cuda"  # a CPU has no optimizer for captures
        settings = {key: value for key, value in self.optimizer.items() if is_cuda or key != "capturable"}
        return model, adamw(model.parameters(), **settings)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        cast = torch.autocast(batch.device.type, self.autocast) if self.autocast else contextlib.nullcontext()
        with cast:
            return model(batch).float().square().mean()

    def run(self, device: Device, monitor: Monitor, model: nn.Module, optimizer: Any, steps: int) -> list[torch.Tensor]:
        """Train and return the losses on the device. Without a scaler, nothing in the loop waits for the device."""
        scaler = None if self.scale is None else torch.amp.GradScaler(device.name.type, init_scale=self.scale)
        losses = []
        for _ in range(steps):
            for _ in range(self.micro_batches):
                loss = self.loss(model, self.batch(device.name))
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if self.clips else None
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
            monitor.log(loss=loss, grad_norm=norm, tokens=64)
        return losses


SCALE = 2.0**26
"""With this initial scale, some steps of a training overflow and are skipped, and some are not."""

CASES = {
    "fp32": Case(),
    "fp32 foreach": Case(optimizer={"foreach": True}),
    "fp32 fused": Case(optimizer={"fused": True}),
    "bf16 autocast": Case(autocast=torch.bfloat16, optimizer={"fused": True}),
    "fp16 with skipped steps": Case(autocast=torch.float16, scale=SCALE),
    "fp16, fused, with skipped steps": Case(autocast=torch.float16, scale=SCALE, optimizer={"fused": True}),
    "channels last": Case(model=Images, batch=images),
    "channels last, bf16": Case(model=Images, batch=images, autocast=torch.bfloat16),
    "accumulation and clipping": Case(micro_batches=3, clips=True),
    "checkpointing": Case(model=lambda: Block(checkpointed=False)),
    "reentrant checkpointing": Case(model=lambda: Block(checkpointed=True)),
    "amsgrad, capturable": Case(optimizer={"amsgrad": True, "capturable": True}),
}


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Select algorithms with equal results in each run; an operation without one is not an error."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def attached(config: MonitorConfig | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> Monitor:
    """Return a monitor; without a configuration, one that is not attached."""
    return Monitor(config) if config is None else Monitor(config).attach(model, optimizer)


def state_of(
    device: Device, model: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterable[torch.Tensor]
) -> dict[str, bytes]:
    """Return the bits of all that a training has changed."""
    found = {f"model: {name}": tensor for name, tensor in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer: {number}.{key}": value for key, value in state.items() if torch.is_tensor(value)}
    found |= {f"loss {step}": loss for step, loss in enumerate(losses)}
    found["CPU RNG"] = torch.get_rng_state()
    if device.is_cuda:
        found["CUDA RNG"] = torch.cuda.get_rng_state(device.name)
    return {name: _bits(tensor) for name, tensor in found.items()}


def _bits(tensor: torch.Tensor) -> bytes:
    local = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differences(expected: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    return [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
