"""The structure of a model and the call stacks of its modules: rows, text, and the file of msprobe."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exporter.measure.quantities.trainings import Composed
from tests.exporter.parts import config_of, ended, published
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankscope_exporter import Monitor
from rankscope_exporter.measure.quantities.structure import call_stack

RECORDED = Path(__file__).parents[3] / "data/msprobe/print_struct/module_struct.json"


class Core(nn.Module):
    """Attention over (sequence, batch, head, width), without weights."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.core = Core()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(8, 4, 2, 8) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.proj(self.core(q, k, v))
        return x + self.fc2(torch.relu(self.fc1(self.ln2(x))))


class Transformer(nn.Module):
    """The model whose structure is in the recorded file of msprobe."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.transpose(0, 1))


def run(
    model: nn.Module, batch: torch.Tensor, steps: int = 2, quantities: tuple[str, ...] = ("structure",), **options: Any
) -> tuple[list[dict[str, Any]], str, list[str]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(config_of(*quantities, options={"structure": options})).attach(model, optimizer)
    assert not monitor.structure()
    for _ in range(steps):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    published(monitor)
    text = monitor.structure()
    found = ended(monitor)  # a notice about the file may follow its rows
    rows = found.of("modules")
    assert 0 == monitor.faults
    assert not monitor.structure()
    assert {1} == {row["step"] for row in rows}
    return rows, text, found.notices


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    folder = tmp_path_factory.mktemp("structure")
    rows, text, notices = run(Transformer(), torch.arange(32).view(4, 8), print_struct=True, output_dir=str(folder))

    assert [] == notices
    return folder / "module_struct/rank0/module_struct.json", rows, text


def test_file_equals_the_file_of_msprobe_for_this_model(written):
    assert json.loads(RECORDED.read_text()) == json.loads(written[0].read_text())
    assert ["module_struct.json"] == [path.name for path in written[0].parent.iterdir()]


def test_rows_and_text_contain_class_shapes_dtypes_and_placement(written):
    rows = {row["module"]: row for row in written[1]}

    assert len(rows) == len(written[1]) == 19
    head = rows["head"]
    assert ("Linear", "full") == (head["class"], head["placement"])
    assert [{"shape": [4, 8, 16], "dtype": "float32", "grad": "float32"}] == json.loads(head["inputs"])
    assert [{"shape": [4, 8, 32], "dtype": "float32", "grad": "float32"}] == json.loads(head["outputs"])
    core = rows["layers.1.core"]
    assert core["placement"] is None
    assert [0, 1, 2] == [item["index"] for item in json.loads(core["inputs"])]
    assert [{"shape": [4, 8], "dtype": "int64"}] == json.loads(rows[""]["inputs"])
    lines = written[2].splitlines()
    assert "(the model): Transformer(int64[4, 8]) -> float32[4, 8, 32]" == lines[0]
    assert "layers.0.fc1: Linear(float32[8, 4, 16]) -> float32[8, 4, 32]" in lines
    assert 19 == len(lines)


def test_libraries_next_to_torch_are_user_code():
    """Their folder names begin with the name of torch's folder."""
    beside = Path(torch.__file__).parent.with_name("torchvision") / "resnet.py"
    found: dict[str, Any] = {"sys": sys, "call_stack": call_stack}
    exec(compile("def forward():\n    return call_stack(sys._getframe())\n", str(beside), "exec"), found)

    assert f"{beside}:2 forward" == found["forward"]()[-1]


def test_stacks_contain_user_calls_outermost_first(written):
    stacks = {row["module"]: row["stack"].splitlines() for row in written[1]}
    files = {module: [Path(call.rsplit(":", 1)[0]) for call in stack] for module, stack in stacks.items()}
    calls = {module: [call.rsplit(" ", 1)[1] for call in stack] for module, stack in stacks.items()}

    assert Path(__file__).name == files["layers.1.fc2"][-1].name
    assert ["run", "Transformer.forward", "Layer.forward"] == calls["layers.1.fc2"][-3:]
    assert "run" == calls[""][-1]
    assert all(len(stack) <= 24 for stack in stacks.values())
    assert not any("torch" in path.parts for paths in files.values() for path in paths)


def forms() -> nn.Module:
    """Return a model with a module that is never called, one that is called twice, and arguments of other forms."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = net.twice(net.twice(x)[:1])
        return checkpoint(net.twice, net.pair(y, mask=y > 0)["y"], use_reentrant=True)

    pair = Composed(lambda _net, y, mask: {"y": y, "count": 3, "both": (mask, y)})
    return Composed(forward, twice=nn.Linear(4, 4), never=nn.Linear(2, 2), pair=pair)


def test_other_argument_forms_first_calls_and_uncalled_modules(tmp_path):
    rows, text, notices = run(
        forms(), torch.ones(3, 4), stacks=False, print_struct=True, output_dir=str(tmp_path), targets=["re:.+"]
    )
    by_name = {row["module"]: row for row in rows}
    document = json.loads((tmp_path / "module_struct/rank0/module_struct.json").read_text())

    assert [] == notices
    assert {"twice", "never", "pair"} == by_name.keys()
    assert [3, 4] == json.loads(by_name["twice"]["inputs"])[0]["shape"]
    never = by_name["never"]
    assert ("Linear", None, None, None) == (never["class"], never["inputs"], never["outputs"], never["stack"])
    assert "never: Linear, not called" in text.splitlines()
    assert ["", ".mask"] == [item["path"].replace("[0]", "") for item in json.loads(by_name["pair"]["inputs"])]
    types = {"count": "<class 'int'>", "both": "<class 'tuple'>"}
    assert {"config": "dict[3]", "y": "size=(1, 4), dtype=torch.float32", **types} == document["0:pair"]["output"]
    assert {"0:twice", "0:pair"} == document.keys()


def test_rows_are_published_with_bfloat16_as_default_type():
    torch.set_default_dtype(torch.bfloat16)
    try:
        rows, _, notices = run(nn.Sequential(nn.Linear(4, 2)), torch.ones(3, 4), steps=1)
    finally:
        torch.set_default_dtype(torch.float32)

    assert ["", "0"] == [row["module"] for row in rows]
    assert [] == notices


def test_unwritable_folder_is_reported_and_rows_are_still_published(tmp_path):
    (tmp_path / "file").write_text("")
    rows, _, notices = run(forms(), torch.ones(3, 4), print_struct=True, output_dir=str(tmp_path / "file"))

    assert 4 == len(rows)
    assert [True] == ["cannot be written: Not a directory" in message for message in notices]


def test_default_folder_of_the_structure_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "there"))
    monkeypatch.setenv("RANK", "3")
    run(forms(), torch.ones(3, 4), print_struct=True)

    assert (tmp_path / "there/module_struct/rank3/module_struct.json").exists()
