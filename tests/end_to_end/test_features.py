"""Features of a training, through the service and the store, into files in the layout of msprobe."""

import csv
import math
from typing import Any

import torch
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_storage.connection import connect
from rankscope_storage.formats import ExportOptions, export_formats

HEADS, MICRO_BATCHES = 2, 2


class Core(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.core = Core()
        self.gate = nn.Linear(6, 3)

    def forward(self, x):
        x = self.fc(x)
        return self.gate(self.core(x, x, x))


OPTIONS: dict[str, dict[str, Any]] = {
    "attention": {"targets": ["core"], "order": "b,h,s,d", "causal": True},
    "linear": {"targets": ["fc"]},
    "router": {"targets": ["gate"], "top_k": 1},
}


def batch(micro):
    return torch.randn(3, HEADS, 5, 6, generator=torch.Generator().manual_seed(micro))


def expected():
    """Return the rows of the files by family: name, micro-batch if present, numbers."""
    torch.manual_seed(0)
    model = Net().double()
    values = torch.linalg.svdvals(model.fc.weight.detach())
    vectors = nn.functional.normalize(model.gate.weight.detach(), dim=1)
    cosines = (vectors @ vectors.t())[*torch.triu_indices(3, 3, 1)]
    families = {"attention_hook": [], "moe_router_logit_hook": []}
    families["linear_hook"] = [("fc.linear", values.norm() / values[0], values[0])]
    families["moe_router_weight_hook"] = [("gate.moe_router", cosines.mean())]
    for micro in range(MICRO_BATCHES):
        x = model.fc(batch(micro).double()).detach()
        scores = (x @ x.transpose(2, 3) / math.sqrt(6)).masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
        weights = scores.softmax(-1)
        for head in range(HEADS):
            own = weights[:, head]
            numbers = -torch.special.xlogy(own, own).sum(-1).mean(), own.amax(-1).mean()
            families["attention_hook"].append((f"core.attention_{head}", str(micro), *numbers))
        routed = model(batch(micro).double()).detach().softmax(-1)
        entropy = -torch.special.xlogy(routed, routed).sum(-1).mean()
        families["moe_router_logit_hook"].append(("gate.moe_router", str(micro), entropy))
    return {
        family: [tuple(v if isinstance(v, str) else f"{float(v):.3g}" for v in row) for row in rows]
        for family, rows in families.items()
    }


def test_features_of_a_run_are_in_the_msprobe_files(service, tmp_path, monkeypatch):
    service.start()
    monkeypatch.setenv("RANKSCOPE_INGEST_URL", service.url)
    monkeypatch.setenv("RANKSCOPE_RUN", "features")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = MonitorConfig(quantities=tuple(OPTIONS), options=OPTIONS, console=False, exit_wait_seconds=30)
    with Monitor(config).attach(model, optimizer):
        for micro in range(MICRO_BATCHES):
            model(batch(micro)).sum().backward()
        optimizer.step()
    assert 0 == service.stop(), service.log()

    with connect(service.store) as connection:
        report = export_formats()["csv"].export(connection, "features", tmp_path / "csv", ExportOptions())
        loads = connection.sql("select distinct micro_step, index from features where kind = 'router_load'").fetchall()
    found = {}
    for path in report.files:
        if path.name.startswith("scalars_"):
            continue
        with path.open(newline="") as file:
            rows = [{**row} for row in csv.DictReader(file)]
        assert {"0"} == {row.pop("step") for row in rows}
        assert {"0"} == {row.pop("vpp_stage") for row in rows}
        found[path.name.removesuffix("_0-0.csv")] = [
            tuple(text if key in ("name", "micro_step") else f"{float(text):.3g}" for key, text in row.items())
            for row in rows
        ]
    assert expected() == {family: sorted(rows, key=lambda row: row[1::-1]) for family, rows in found.items()}
    assert 6 == report.omitted["features that msprobe does not have"]
    assert 6 == len(loads)
