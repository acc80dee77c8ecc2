"""The total gradient norm of sharded trainings that log none is the one by which torch clips."""

import json

import pytest
from tests.programs import AFTER_TWO_RANKS, BEFORE_TWO_RANKS, run_command, run_program
from tests.view.test_site import read

from rankscope_view.site import Site

STEPS = 6

TRAINING = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from rankscope_exporter import Monitor

class Block(nn.Sequential):
    pass

def net():  # shards of unequal size, none of one bias on rank 1, and frozen parameters
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5).requires_grad_(False), Block(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 1))
    return model

def fsdp2():
    model = net()
    for part in (model[1], model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    return model, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()

def fsdp1():
    model = FullyShardedDataParallel(
        net(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )
    return model, lambda: model.clip_grad_norm_(0.1)

def main():
    clipped = {}
    for wrap in fsdp2, fsdp1:
        dist.barrier()  # a rank that ends its group early breaks the connections that the other one still makes
        dist.destroy_process_group()  # a process group is one launch, with one run
        place = f"file://{folder}/{wrap.__name__}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
        model, clip = wrap()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms = clipped[wrap.__name__] = []
        with Monitor({"run": wrap.__name__, "console": False}).attach(model, optimizer) as monitor:
            for step in range(6):
                for micro in range(2):
                    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro))
                    model(inputs * (step + 1)).square().mean().backward()
                norms.append(clip().item())
                optimizer.step()
                optimizer.zero_grad()
                monitor.log(loss=1.0)
    return clipped
"""


def test_total_gradient_norm_of_sharded_trainings_is_that_of_clip_grad_norm(tmp_path):
    program = f"{BEFORE_TWO_RANKS}{TRAINING}{AFTER_TWO_RANKS}"
    done = run_program(program, folder=tmp_path, RANKSCOPE_INGEST_URL="", RANKSCOPE_SPOOL_DIR="")
    assert 0 == done.returncode, done.stderr
    stored = run_command("import", tmp_path / "rankscope-records", "--store", tmp_path / "history")
    assert 0 == stored.returncode, stored.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == second
    site = Site(tmp_path / "history")

    for run, norms in first.items():
        curve = json.loads(site.respond(("data", "curve"), {"run": run, "name": "grad_norm"}).body)["lines"][0]
        page = read(site, "runs", run).text

        assert (list(range(1, STEPS + 1)), pytest.approx(norms, rel=1e-5)) == (curve["step"], curve["value"])
        assert f"Gradient norm {norms[-1]:.4g}" in page
