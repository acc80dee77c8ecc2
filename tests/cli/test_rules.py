"""The commands `rules` and `why`. A replay of a real training is compared with the scores of its ranks."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from tests.cli.conftest import common, table
from tests.programs import run_command, run_program

from rankscope.rules.replay import FACTORS, Replay
from rankscope_contract.rules.expression import WORDS
from rankscope_contract.rules.score import SCORE_RULES
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.connection import connect

STEPS, WRITTEN, SPIKE, LOADED = 170, 120, 130, 140
TRAINING = f"""
import os, time
import torch
import rankscope

torch.manual_seed(int(os.environ["RANK"]))
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
with rankscope.Monitor().attach(net, optimizer) as monitor:
    for step in range(1, {STEPS} + 1):
        x = torch.randn(32, 8)
        y = x.sum(1, keepdim=True) * (100 if step == {SPIKE} else 1)
        if step == {WRITTEN} and os.environ["RANK"] == "1":
            with torch.no_grad():
                net[2].weight[:, :4] = 0
        if step == {LOADED}:
            net.load_state_dict({{name: 1.01 * value for name, value in net.state_dict().items()}})
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        monitor.log(loss=loss, **({{"eval_loss": loss}} if step % 20 == 0 else {{}}))
        time.sleep(0.005)  # a step is not measured while too many steps wait for the publisher
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of the records of two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    for rank in ("0", "1"):
        place = {"RANK": rank, "WORLD_SIZE": "2", "RANKSCOPE_RUN": "replayed", "TORCHELASTIC_RUN_ID": "one"}
        done = run_program(TRAINING, folder=folder, RANKSCOPE_SPOOL_DIR=str(folder / "records"), **place)
        assert 0 == done.returncode, done.stderr
    return folder / "records"


@pytest.fixture(scope="module")
def stored(trained, tmp_path_factory):
    """Return a store with the same records."""
    store = tmp_path_factory.mktemp("stored") / "history"
    done = run_command("import", trained, "--store", store)
    assert 0 == done.returncode, done.stderr
    return store


def answer(run, *arguments, code=0):
    done = run(*arguments)
    assert code == done.returncode, done.stderr
    return json.loads(done.stdout)


def test_replayed_scores_and_firings_equal_those_of_the_ranks_and_of_sql(in_process, stored):
    found = answer(in_process, "rules", "replay", "--store", stored, "--json", "--top", 100)
    judged = {row["rule"]: row["judged"] for row in found["limits"]}
    with connect(stored) as connection:
        query = "SELECT count(*) AS n FROM scalars WHERE name = 'rule_score'"
        scores = connection.query(query).to_pylist()[0]["n"]
        names = "rank, step, rule, tensor, value, threshold"
        told = connection.query(f"SELECT {names} FROM events WHERE type = 'anomaly' AND op = ANY($ops)",
                                {"ops": [rule.subject for rule in SCORE_RULES]}).to_pylist()  # fmt: skip
        told = {tuple(row.values()) for row in told if row["rule"] in judged}
        for rule in SCORE_RULES:
            sql = answer(in_process, "rules", "show", rule.name, "--json")["sql"]
            above = {(row["rank"], row["step"]) for row in connection.query(sql).to_pylist()}
            assert {one[:2] for one in told if one[2] == rule.name} <= above

    assert (scores, 0) == (found["compared"], found["different"])
    assert {rule.name for rule in SCORE_RULES} == {name for name, count in judged.items() if count > 5}
    assert told == {tuple(list(row.values())[1:]) for row in map(in_order, found["firings"])}
    assert (1, WRITTEN, "ParamMovedBetween", "2.weight") in {one[:4] for one in told}
    assert not [one for one in told if one[1] == LOADED]


def in_order(row):
    return {name: row[name] for name in ("attempt", "rank", "step", "rule", "tensor", "score", "limit")}


def test_counts_at_other_limits_are_those_of_rules_with_these_limits(stored):
    with connect(stored) as connection:
        runs = []
        for factor, block_rows in ((1.0, 2_000), *((factor, 10**6) for factor in FACTORS)):
            rules = [replace(rule, above=rule.above * factor) for rule in SCORE_RULES]
            one = Replay(connection, "replayed", rules, block_rows=block_rows)
            fired = Counter((firing["rule"], firing["limit"]) for firing in one.firings(lambda *_: None))
            runs.append((one.outcome, fired))
    in_blocks, *others = runs

    assert 0 == in_blocks[0].different
    assert in_blocks[0].counts == others[FACTORS.index(1.0)][0].counts
    for _, fired in others:
        assert fired == {key: count for key, count in in_blocks[0].counts.items() if key in fired}
    assert sum(map(len, (fired for _, fired in others))) == len(in_blocks[0].counts)


def test_replay_of_a_log_has_the_firings_of_its_import(in_process, tmp_path):
    losses = [2 + 0.01 * (step * 7919 % 13) + (0.15 if step > 100 else 0) for step in range(160)]
    log = tmp_path / "train.jsonl"
    log.write_text("\n".join(json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)))
    found = answer(in_process, "rules", "replay", log, "--json")
    events = answer(in_process, "anomalies", log, "--format", "json", "--top", "50")

    assert 1 == len(found["firings"])
    assert [(one["step"], one["rule"], one["value"]) for one in events if one["rule"] == "LossShift"] == [
        (one["step"], one["rule"], one["score"]) for one in found["firings"]
    ]
    assert 0 == found["compared"]


def test_rule_of_a_file_is_replayed_with_its_limit(in_process, stored, tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text('rules = [{rule_name = "ScoreRule", args = {name = "Big", above = 0.001, summary = "large",'
                    ' score = "abs(param_after.norm / param_before.norm - 1)"}}]')  # fmt: skip
    done = in_process("rules", "replay", "--store", stored, "--rules", path, "--top", 1)
    checked = in_process("rules", "check", path)

    assert (0, 0) == (done.returncode, checked.returncode)
    assert "Big" in done.stdout
    assert checked.stdout.endswith("1 rules: Big\n")


def test_rules_are_listed_and_explained_with_every_word_of_their_score(in_process):
    listed = answer(in_process, "rules", "list", "--json")
    text = in_process("rules", "list").stdout
    for rule in SCORE_RULES:
        facts = answer(in_process, "rules", "show", rule.name, "--json")
        words = {one.partition("(")[0] for one in facts["words"]}
        assert words == {node.name for node in rule.tree.walk() if node.name in WORDS or "." in node.name}
        assert facts["promql"].startswith(f'rankscope_rule_score{{rule="{rule.name}"}} > on (run, rank, rule) ')

    assert {"AnomalyNan", "LossSpike", "SlowSteps", *(rule.name for rule in SCORE_RULES)} == {
        *(row["rule"] for row in listed if not row["rule"].startswith(("AnomalyT", "Learn", "GradN")))
    }
    assert all(row["meaning"] and row["rule"] in text for row in listed)
    assert "Did you mean 'AdamBooks'?" in in_process("rules", "show", "AdamBook").stderr


BAD = [
    ('"defaul"', "rules[0]: expected a table"),
    ('{rule_name = "LossShift", arg = {}}', "rules[0]: 'arg' is no key of a rule. Did you mean 'args'?"),
    ('"default", {rule_name = "LossShit"}', "rules[1]: unknown rule 'LossShit'"),
    ('{rule_name = "LossShift", args = {above = "a"}}', "LossShift: threshold must be a number, not 'a'"),
    ('{rule_name = "LossShift", args = {score = "lo(3)"}}', "'lo' is no word, did you mean 'log'?, at position 1"),
    ('{rule_name = "LossShift", args = {score = 5}}', "LossShift: score must be a text, not 5"),
    ('{rule_name = "LossShift", args = {latch = -1}}', "latch must be an integer of at least 0, not -1"),
    ('{rule_name = "LossShift", args = {holds_for = 5}}', "holds_for must be a list of names"),
    ('{rule_name = "LossShift", args = {severity = "bad"}}', "severity must be one of info, warning, critical"),
    ('{rule_name = "LossShift", args = {name = 7}}', "name of a rule must be a text, not 7"),
    ('{rule_name = "LossShift"}, {rule_name = "LossShift"}', "several rules are named 'LossShift'"),
    ("", "0 rules"),
]


@pytest.mark.parametrize(("entries", "message"), BAD)
def test_error_in_a_rule_file_is_one_line_with_its_position(in_process, tmp_path, entries, message):
    path = tmp_path / "rules.toml"
    path.write_text(f"rules = [{entries}]")
    done = in_process("rules", "check", path)

    assert int(bool(entries)) == done.returncode
    assert message in (done.stderr if entries else done.stdout)
    assert done.stderr.count("\n") == int(bool(entries))


@pytest.mark.parametrize("text", ["rules = [", "[1", '"rules"', "other = 1"])
def test_file_without_rules_is_an_error(in_process, tmp_path, text):
    path = tmp_path / ("rules.json" if text.startswith(("[", '"')) else "rules.toml")
    path.write_text(text)

    assert 1 == in_process("rules", "check", path).returncode


def test_why_names_rank_tensor_and_step_with_statements_that_return_rows(in_process, stored):
    found = answer(in_process, "why", "--store", stored, "--json", code=1)
    shown = in_process("why", "--store", stored)
    with connect(stored) as connection:
        rows = [connection.query(cause["evidence"]).num_rows for cause in found["causes"]]
        view = connection.query("SELECT rule, step FROM first_causes ORDER BY cause").to_pylist()

    written = next(one for one in found["causes"] if one["rule"] == "ParamMovedBetween")
    assert (1, "2.weight", WRITTEN) == (written["rank"], written["tensor"], written["step"])
    assert all(rows)
    assert view == [{name: cause[name] for name in ("rule", "step")} for cause in found["causes"]]
    assert f"step {WRITTEN}, rank 1, param_before of 2.weight" in shown.stdout
    assert 1 == shown.returncode


def test_why_knows_faulty_healthy_and_unmeasured_runs(in_process, sample_store, tmp_path):
    nan = answer(in_process, "why", "my-run", "--store", sample_store, "--json", code=1)
    (tmp_path / "train.jsonl").write_text("\n".join(f'{{"step": {step}, "loss": 2.5}}' for step in range(1, 50)))
    healthy = answer(in_process, "why", tmp_path / "train.jsonl", "--json")
    with Store.open(tmp_path / "empty", create=True).claim(owner="test") as writer:
        rows = [common(None, 0, 0, run="begun") | {"state": "running", "source_kind": "live", "ts_origin": "ingest"}]
        rows.append(rows[0] | {"run": "ended", "state": "failed", "last_step": 7, "reason": "rank 0 vanished"})
        tables = {"runs": table("runs", rows), "attempts": table("attempts", rows)}
        writer.append(Batch(tables=tables, watermarks={}))
    failed = answer(in_process, "why", "ended", "--store", tmp_path / "empty", "--json", code=1)
    nothing = answer(in_process, "why", "begun", "--store", tmp_path / "empty", "--json", code=3)

    assert ["AnomalyNan"] == [one["rule"] for one in nan["causes"]]
    assert (1, "grad_unreduced", 10) == tuple(nan["causes"][0][name] for name in ("rank", "kind", "step"))
    assert (["RunFailed"], 7) == ([one["rule"] for one in failed["causes"]], failed["causes"][0]["step"])
    assert ("healthy", []) == (healthy["verdict"], healthy["causes"])
    assert "not judged" == nothing["verdict"]
    assert "rules on tensors: the run has no tensor statistics" in nothing["not_run"]
