"""Pages and commands about a training that became NaN state the same facts as its script."""

import json
import math
import re

import pytest
from tests.programs import run_command, run_program
from tests.view.test_site import Reader, read

from rankscope_view.site import Site

NAN_FROM, LAST = 40, 60

TRAINING = """
import json, torch
from torch import nn
from rankscope_exporter import Monitor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 2)
    def forward(self, batch, broken):
        output = self.b(torch.relu(self.a(batch)))
        return output * float("nan") if broken else output

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
facts = {"loss": {}, "norm": {}, "total": {}}
with Monitor({"run": "ruined", "quantities": ["gradients", "activations"]}).attach(model, optimizer) as monitor:
    for step in range(1, 61):
        loss = model(torch.randn(4, 8), 20 <= step < 24).square().mean()
        if step >= 40:
            loss = loss * float("nan")
        loss.backward()
        facts["loss"][step] = loss.item()
        facts["norm"][step] = model.a.weight.grad.norm().item()
        facts["total"][step] = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        if not 20 <= step < 24:  # training continues as before
            optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss, **({"eval_loss": loss * 2} if step % 20 == 0 else {}))
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def ruined(tmp_path_factory):
    """Return the folder of a store with the training, and the facts that the script printed."""
    folder = tmp_path_factory.mktemp("ruined")
    done = run_program(TRAINING, folder=folder, RANKSCOPE_INGEST_URL="", RANKSCOPE_SPOOL_DIR="")
    assert 0 == done.returncode, done.stderr
    stored = run_command("import", folder / "rankscope-records", "--store", folder / "history")
    assert 0 == stored.returncode, stored.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    return folder / "history", {name: {int(step): value for step, value in one.items()} for name, one in facts.items()}


@pytest.fixture(scope="module")
def site(ruined):
    return Site(ruined[0])


def significant(value):
    return f"{value:#.4g}"


def test_tensor_that_is_nan_at_the_end_has_no_finite_newest_value(site, ruined):
    found = read(site, "runs", "ruined", "tensors", kind="grad_unreduced", tensor="a.weight").text

    assert f"newest norm, step {LAST} NaN" in found
    assert f"last finite norm, step {NAN_FROM - 1} {significant(ruined[1]['norm'][NAN_FROM - 1])}" in found
    assert f"not finite since step {NAN_FROM}" in found


def test_counts_of_elements_are_shown_as_they_are(site):
    found = read(site, "runs", "ruined", "tensors", kind="grad_unreduced", op="nans", tensor="a.weight").text

    assert f"newest nans, step {LAST} 128.0" in found


def test_first_firings_name_each_tensor_once_with_kind_and_rank_causes_first(site):
    found = read(site, "runs", "ruined", "tensors").text
    listed = re.findall(r"(\(model\)|a\.weight|a\.bias|\ba|\bb\.weight|b\.bias|\bb) (\d+) ([a-z ]+), rank (\d)", found)

    assert ("(model)", "20", "output of module", "0") == listed[0]
    assert len({name for name, *_ in listed}) == len(listed) > 4


def test_tensor_without_a_firing_refers_to_the_firings_elsewhere(site):
    found = read(site, "runs", "ruined", "tensors", kind="act_in", tensor="a").text

    assert re.search(r"No rule fired for input of module of this tensor\. [\d,]+ firings elsewhere in this run", found)


def test_root_module_has_a_name_on_every_page(site):
    links = [attributes.get("href") or "" for _, attributes in read(site, "runs", "ruined", "incidents").elements]
    (key,) = {link.rsplit("/", 1)[1] for link in links if "/incidents/" in link}
    incident = read(site, "runs", "ruined", "incidents", key).text

    assert "activation of (model) became NaN at step 20" in incident
    assert "(model)" in read(site, "runs", "ruined", "tensors", kind="act_out", tensor="").text
    asked = {"run": "ruined", "kind": "act_out", "tensor": "", "name": "norm"}
    line = json.loads(site.respond(("data", "curve"), asked).body)["lines"][0]
    assert NAN_FROM - 4 == sum(value is not None for value in line["value"])  # the loss is NaN first, then the weights


def test_summary_page_and_report_state_the_last_finite_loss(site, ruined):
    store, facts = ruined
    last = facts["loss"][NAN_FROM - 1]
    summary = run_command("summary", "ruined", "--store", store).stdout
    page = read(site, "runs", "ruined")
    report = Reader(site.respond(("runs", "ruined", "report"), {}).body.decode()).text

    assert f"  current: NaN at step {LAST}; last finite {last:.6f} at step {NAN_FROM - 1}" in summary.splitlines()
    assert "  trend: not finite" in summary.splitlines()
    assert f"last finite {significant(last)} at step {NAN_FROM - 1}" in page.text
    assert "rows" not in re.search(r"Loss (.*?) Learning rate", page.text).group(1)
    assert f"Loss NaN; the last finite loss is {significant(last)} at step {NAN_FROM - 1}." in report
    assert not [text for text in (summary, page.text, report) if re.search("No reason to stop|early stopping", text)]


def test_gradient_norm_that_is_not_logged_is_that_of_all_gradients(site, ruined):
    """A model without tokens has no perplexity."""
    store, facts = ruined
    asked = {"run": "ruined", "name": "grad_norm"}
    line = json.loads(site.respond(("data", "curve"), asked).body)["lines"][0]
    drawn = {int(step): value for step, value in zip(line["step"], line["value"], strict=True) if value is not None}
    words = run_command("summary", "ruined", "--store", store).stdout
    page = read(site, "runs", "ruined").text

    finite = {step: value for step, value in facts["total"].items() if math.isfinite(value)}
    assert pytest.approx(finite, rel=1e-6) == drawn
    assert "gradient norm: NaN, 25 rows NaN or infinite" in words
    assert "Gradient norm NaN" in page
    assert "erplexity" not in page + words
