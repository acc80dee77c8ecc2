"""Run names, events, the schemas of records, and the removal of secrets from texts."""

import dataclasses
import json
import pathlib
import random
import time

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.model.events import causal_key
from rankscope_contract.model.identity import LONGEST_NAME, check_run_name
from rankscope_contract.model.kinds import BASELINE_OPS, CAUSAL_STAGE, COUNT_OPS, JUDGED_OPS, VALUE_OPS, Kind
from rankscope_contract.model.redaction import (
    MAX_NAME,
    MAX_TEXT,
    is_secret_name,
    redacted,
    redacted_arguments,
    redacted_json,
    redacted_name,
    redacted_text,
)
from rankscope_contract.model.schema import (
    NESTED,
    WIRE_FIELDS,
    Plan,
    PlanEntry,
    arrow_schema,
    canonical_labels,
    plan_hash,
)
from rankscope_exporter.process.identity import new_launch_id, rank_from_environment, run_from_environment
from rankscope_storage.base.datasets import DATASETS, TENSOR_ROW_KEY

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "2", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4711"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        *(({}, (0, 0, 1)), (TORCHRUN, (3, 1, 8)), (SLURM, (5, 2, 16)), (OPEN_MPI, (1, 1, 2))),
        *(({**SLURM, **TORCHRUN}, (3, 1, 8)), ({"RANK": "four"}, (0, 0, 1)), ({"RANK": "7"}, (7, 0, 8))),
    ],
)
def test_rank_local_rank_and_world_size(environment, expected):
    assert expected == rank_from_environment(environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        *(({}, None), (TORCHRUN, None), ({"TORCHELASTIC_RUN_ID": "exp7"}, "exp7"), (SLURM, "4711")),
        *(
            ({**SLURM, "TORCHELASTIC_RUN_ID": "exp7"}, "4711"),
            ({**SLURM, "RANKSCOPE_RUN": "a=b/../学习"}, "a=b/../学习"),
        ),
        *(({"RANKSCOPE_RUN": "", "SLURM_JOB_ID": "1"}, "1"), ({"RANKSCOPE_RUN": "none"}, "none")),
    ],
)
def test_run_name_from_the_environment(environment, expected):
    assert expected == run_from_environment(environment)


def test_launch_ids_of_one_job_differ_and_begin_with_its_id():
    environment = {**SLURM, "TORCHELASTIC_RESTART_COUNT": "2"}
    first, second = new_launch_id(environment), new_launch_id(environment)

    assert first != second
    assert first.startswith("4711.2.")
    assert new_launch_id({}).startswith("none.0.")
    assert new_launch_id({**SLURM, "SLURM_RESTART_COUNT": "1"}).startswith("4711-r1.0.")
    assert new_launch_id({**SLURM, "SLURM_RESTART_COUNT": "0"}).startswith("4711.0.")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x" * (LONGEST_NAME + 1), "1,001 characters"), ("a\udcff", r"'a\\udcff', is not valid Unicode")],
)
def test_only_names_that_the_service_would_reject_are_refused(name, reason):
    for odd in ("x" * LONGEST_NAME, "a/../b", "a\nb\x00\x1b", " ", "ü\U0001f600"):
        check_run_name(odd)
    with pytest.raises(ValueError, match=reason):
        check_run_name(name)


def test_launch_id_of_a_very_long_or_undecodable_job_id_is_valid():
    found = new_launch_id({"TORCHELASTIC_RUN_ID": "\udcff" * 5000})

    assert len(found) < LONGEST_NAME
    assert found.startswith("???")


RECORDED = json.loads((pathlib.Path(__file__).parent / "data" / "msprobe_anomalies.json").read_text())

KIND_OF_TASK = {
    "param_origin": "param_before",
    "actv": "act_out",
    "actv_grad": "act_grad_out",
    "acc_grad": "grad_unreduced",
    "post_grad": "grad_reduced",
    "param_updated": "param_after",
}

# The first five anomalies in msprobe's own analysis of this file.
FIRST_CAUSES = [
    "0:.input:0/rank0/actv_grad",
    "0:embedding.input:0/rank0/actv_grad",
    "0:.input:1/rank0/actv_grad",
    "0:embedding.input:1/rank0/actv_grad",
    "0:layers.0.ln1.bias/rank0/param_origin",
]


def key(**parts):
    whole = {"step": 1, "micro_step": None, "kind": "act_out", "vpp_stage": 0, "pp_stage": 0, "call_id": 0}
    return causal_key(**{**whole, **parts})


def recorded_key(record):
    return causal_key(
        step=record["step"],
        micro_step=record["micro_step"],
        kind=KIND_OF_TASK[record["tag_name"].rsplit("/", 1)[-1]],
        vpp_stage=record["vpp_stage"],
        pp_stage=record["pp_stage"],
        call_id=None if record["call_id"] < 0 else record["call_id"],
    )


def test_recorded_anomalies_have_the_order_of_msprobe():
    """A deliberate difference: msprobe sorts parameters after the update before the forward pass of the same step."""
    tags = [record["tag_name"] for record in sorted(RECORDED.values(), key=recorded_key)]

    assert FIRST_CAUSES == tags[:5]
    assert all(tag.endswith("/param_updated") for tag in tags[-4:])


def test_causal_stages_follow_the_flow_of_a_step():
    flow = ["param_before", "act_in", "act_grad_in", "grad_unreduced", "comm_in", "comm_out"]
    flow += ["grad_reduced", None, "grad_clipped", "exp_avg", "param_after"]
    shuffled = random.Random(0).sample(flow, len(flow))

    assert flow == sorted(shuffled, key=lambda kind: key(kind=kind))
    assert key(kind="param_after") < key(kind=None, op="val/loss") < key(step=2, kind="param_before")


def test_pipeline_stages_ascend_in_forward_and_descend_in_backward():
    assert key(kind="act_out", pp_stage=0) < key(kind="act_out", pp_stage=1)
    assert key(kind="act_grad_out", pp_stage=1) < key(kind="act_grad_out", pp_stage=0)
    assert key(kind="grad_reduced", vpp_stage=1, pp_stage=0) < key(kind="grad_reduced", vpp_stage=0, pp_stage=1)
    assert key(kind="act_out", vpp_stage=0, pp_stage=1) < key(kind="act_out", vpp_stage=1, pp_stage=0)


def test_step_and_micro_step_come_first_and_unknown_values_last():
    assert key(step=1, kind="param_after") < key(step=2, kind="param_before")
    assert key(micro_step=0, kind="grad_reduced") < key(micro_step=1, kind="act_in")
    assert key(step=10**12) < key(step=None)
    assert key(call_id=10**12) < key(call_id=None)
    assert key(kind=None) == key(kind="attention_entropy")  # of a newer rank


def test_events_of_the_whole_step_enclose_those_of_its_micro_batches():
    """A NaN that occurs first in an activation is in every gradient of the step."""
    parameters, activations, gradients = (key(kind=kind) for kind in ("param_before", "act_in", "grad_unreduced"))

    assert parameters < key(kind="act_in", micro_step=0) < key(kind="act_grad_in", micro_step=0)
    assert key(kind="act_grad_in", micro_step=0) < key(kind="act_in", micro_step=1) < activations < gradients
    assert key(kind="grad_unreduced", micro_step=3) < gradients


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
number = st.none() | st.integers(0, 1 << 40)
entries = st.builds(
    PlanEntry,
    kind=st.sampled_from(list(Kind)).map(str),
    tensor=text,
    index=number,
    vpp_stage=number,
    call_seq=number,
    placement=st.sampled_from(["full", "shard", "partial", "replica"]),
    shard_group=st.none() | text,
    dtype=text,
    shape=st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
    module=st.none() | text,
    aliases=st.lists(text, max_size=3).map(tuple),
)


@given(st.lists(entries, max_size=6).map(tuple).map(Plan))
def test_plan_is_unchanged_after_a_json_round_trip(plan):
    read = Plan.from_json(plan.to_json())

    assert plan == read
    assert plan.hash == read.hash == plan_hash(plan.to_json())


@given(st.lists(entries, max_size=4).map(lambda some: Plan((*some, *some))))
def test_text_of_a_plan_has_sorted_keys_and_no_spaces(plan):
    document = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(plan)}

    assert json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False) == plan.to_json()


def test_unknown_keys_of_a_newer_plan_are_ignored():
    document = {"schema_version": 9, "entries": [{"kind": "act_out", "tensor": "a", "colour": "red"}], "more": 1}

    assert Plan((PlanEntry(kind="act_out", tensor="a"),)) == Plan.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"entries": 1}', '{"entries": [1]}', '{"entries": [{}]}'])
def test_invalid_plan_is_rejected(text):
    with pytest.raises(ValueError):
        Plan.from_json(text)


@pytest.mark.parametrize("fields", [*DATASETS.values(), WIRE_FIELDS], ids=[*DATASETS, "wire"])
def test_every_schema_is_valid_in_arrow_and_has_unique_names(fields):
    schema = arrow_schema(pa, fields)

    assert [field.name for field in fields] == schema.names
    assert len(set(schema.names)) == len(schema.names)


def test_columns_keys_and_stages_agree():
    schema = arrow_schema(pa, DATASETS["tensor_stats"])

    assert {pa.float32()} == {schema.field(op).type for op in (*VALUE_OPS, *BASELINE_OPS)}
    assert {pa.int64()} == {schema.field(op).type for op in COUNT_OPS}
    assert BASELINE_OPS == tuple(f"{op}_baseline" for op in JUDGED_OPS)
    assert set(TENSOR_ROW_KEY) <= set(schema.names)
    assert set(Kind) == set(CAUSAL_STAGE)
    for name, fields in NESTED.items():
        assert {field.name for field in fields} <= {field.name for field in DATASETS[name]}


@given(st.dictionaries(text, text, min_size=1, max_size=4))
def test_label_text_does_not_depend_on_the_order_of_labels(labels):
    backwards = dict(reversed(labels.items()))

    assert canonical_labels(labels) == canonical_labels(backwards)
    assert labels == json.loads(canonical_labels(labels))
    assert None is canonical_labels({}) is canonical_labels(None)


SECRET, MIXED = "correct-horse", "kX9mPq2vL8wR"
SECRET_NAMES = [
    *("token", "hf_token", "HF_TOKEN", "wandb.api_key", "apiKey", "api-key", "access_key_secret"),
    *("aws_secret_access_key", "password", "db.passwd", "DB_PASSWORD_PROD", "private_key", "client_secret"),
    *("Authorization", "cookie", "basic_auth", "github-token", "key", "ssh-key", "access_tokens", "credentials"),
    *("sessionKey", "storageAccountKey"),
]
OTHER_NAMES = [
    *("pad_token", "eos_token_id", "tokenizer", "tokenizer.path", "tokens", "tokens_per_second", "max_tokens"),
    *("token_dropping", "num_key_value_heads", "keys", "key_padding", "monkey", "token_file", "password_file"),
    *("ssh_key_path", "secret_name", "author", "cross_attention", "lr", "passes", "compass", "auth_mode", "tensors"),
    *("image_token", "audio_token", "every", "steps", "rule_name"),
]


def test_names_of_secrets_are_recognized_and_similar_names_are_not():
    assert SECRET_NAMES == [name for name in (*SECRET_NAMES, *OTHER_NAMES) if is_secret_name(name)]


@pytest.mark.parametrize(
    ("given_", "shown"),
    [
        (["--token", SECRET], ["--token", "***"]),
        (["--api-key=" + SECRET, "--lr", "3"], ["--api-key=***", "--lr", "3"]),
        (["wandb.api_key=" + SECRET], ["wandb.api_key=***"]),
        (["+trainer.logger.token=" + SECRET], ["+trainer.logger.token=***"]),
        (["--password", "-" + SECRET], ["--password", "***"]),
        (["--use-auth", "--lr", "3"], ["--use-auth", "--lr", "3"]),
        (["--data", f"s3://me:{SECRET}@host/x"], ["--data", "s3://***@host/x"]),
        (["--hook", f"https://host/x?a=1&token={SECRET}&b=2"], ["--hook", "https://host/x?a=1&token=***&b=2"]),
        (["-H", f"Authorization: Bearer {SECRET}"], ["-H", "Authorization: Bearer ***"]),
        (["--json", f'{{"password": "{SECRET}", "lr": 3}}'], ["--json", '{"password": ***, "lr": 3}']),
        (["--tokenizer", "gpt2", "--max-tokens", "4096"], ["--tokenizer", "gpt2", "--max-tokens", "4096"]),
        (["--token-file", "/run/token"], ["--token-file", "/run/token"]),
        (["train.py", "hf_abcdefghijklmnopqrstuv"], ["train.py", "***"]),
        (["mail", f"DB_PASS={SECRET}", f"PGPASSWORD={SECRET}"], ["mail", "DB_PASS=***", "PGPASSWORD=***"]),
        (["curl", "-u", f"bob:{SECRET}", "http://host:80/x"], ["curl", "-u", "***", "http://host:80/x"]),
        (["mysql", f"-p{SECRET}", "-h", "db"], ["mysql", "-p***", "-h", "db"]),
        (["sshpass", "-p", SECRET, "ssh", "-p", "2222", "host"], ["sshpass", "-p", "***", "ssh", "-p", "2222", "host"]),
        (["train.py", "-p", MIXED, "token", MIXED], ["train.py", "-p", "***", "token", "***"]),
        (["train.py", "-p", "bfloat16-mixed", "-u", "http://host:80"],) * 2,
    ],
)
def test_secrets_in_command_lines_are_masked(given_, shown):
    assert shown == redacted_arguments(given_)


@pytest.mark.parametrize(
    "text",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_0123456789abcdefghij0123456789abcdef",
        "github_pat_11AAAAAAA0123456789_abcdef",
        "glpat-0123456789abcdefghij",
        "sk-proj-0123456789abcdefghij",
        "xoxb-0123456789-abcdefghij",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMIIB cut off",
    ],
)
def test_secret_pattern_is_masked_anywhere_in_a_text(text):
    assert "before *** after" == redacted_text(f"before {text} after").replace("***", "*** after", "cut off" in text)


@pytest.mark.parametrize(
    "text",
    [
        *("0123456789abcdef0123456789abcdef01234567", "loss: 3.1", "12:30", "a=b", "https://host:80/x?step=3"),
        *("sk-learn", "/data/user@host/a/very/long/path", "hf_attention_output_projection.weight", "Basic attention"),
        *("git@host:a/b", "ssh://user@host/data/train.log", "write: rankscope runs tag RUN KEY=VALUE…"),
        "export RANKSCOPE_TOKEN=…",
        "the rank requires a token: set [service] token of this service to the token of the ranks",
        *("token 5 of 512", "the token is expired", "1024 tokens, tokens_per_second 5.1e+04", "token embedding_128d"),
        *("srun -p a100-80gb", "ssh -p 2222 host", "docker run -p 80:80 -u 1000:1000", "python -u train.py"),
        *("mkdir -p a1/b2", "token layers.0.self_attn.q_proj", "per token 3.25e-05s", "token 2026-11-29T12:30:45Z"),
        *("-p float8_e4m3fn", "api-key: not set", "x-api-key: missing", "login node042.cluster"),
    ],
)
def test_text_without_secrets_is_unchanged(text):
    assert text == redacted_text(text) == redacted_name(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Command '['curl', '--password', '{SECRET}']' failed", "Command '['curl', '--password', ***]' failed"),
        (f"srun train.py --api-key {SECRET} --lr 3", "srun train.py --api-key *** --lr 3"),
        (f'{{\\"password\\": \\"{SECRET}\\"}}', '{\\"password\\": \\***}'),
        (f"ssh bob:{SECRET}@node7.cluster failed", "ssh ***@node7.cluster failed"),
        (f"login failed: the password is {SECRET}", "login failed: the password is ***"),
        (f"password is: {SECRET}, token {MIXED}.", "password is: ***, token ***"),
        (f"curl -u bob:{SECRET} http://host:80", "curl -u *** http://host:80"),
        (f"['curl', '--user', 'bob:{SECRET}']", "['curl', '--user', '***']"),
        (f"mysql -u root -p{SECRET} -h db | tail -p x", "mysql -u root -p*** -h db | tail -p x"),
        (f"['sshpass', '-p', '{SECRET}', 'ssh']", "['sshpass', '-p', '***', 'ssh']"),
        (f"train.py -p {MIXED} --lr 3", "train.py -p *** --lr 3"),
        ("Authorization: Basic YTpi", "Authorization: Basic ***"),
        ("{'Authorization': 'Basic YTpi'}", "{'Authorization': ***}"),
        ("-H 'X-Api-Key: secretword' -H 'x-auth-token: other word'", "-H 'X-Api-Key: ***' -H 'x-auth-token: *** word'"),
        (f"export AWS_SECRET_ACCESS_KEY={SECRET}; ls", "export AWS_SECRET_ACCESS_KEY=***; ls"),
        (f"GET /v1?api_key={SECRET}&pass={SECRET} failed", "GET /v1?api_key=***&pass=*** failed"),
        (f"/logs/train_hf_{'a1' * 12}.log, /run-password={SECRET}.log", "/logs/train_***.log, /run-password=***"),
        ("password is required; password: not set", "password is required; password: not set"),
        ("eval:recall@10=0.5 of pytorch:24.01@sha256:ab, token=***,lr=3",) * 2,
        (f"https://bob:a/b?{SECRET}@host:80/x at http://h:80/x?a=b@c", "https://***@host:80/x at http://h:80/x?a=b@c"),
    ],
)
def test_secret_in_prose_and_in_a_quoted_command_is_masked(text, shown):
    assert shown == redacted_text(text) == redacted_text(shown)


@pytest.mark.parametrize("text", ["token=bpe/loss", "key=3", '{"key":"queue:3"}', "next_token: 5", "eos-token=2"])
def test_name_that_only_resembles_a_secret_is_unchanged(text):
    """Two names that differ must not become one name."""
    assert text == redacted_name(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"refused: http://a:{SECRET}@host/m?token={SECRET}", "refused: http://***@host/m?token=***"),
        (f"password={SECRET}, hf_token={SECRET}", "password=***, hf_token=***"),
        (f"https://bob:{SECRET}@host/loss", "https://***@host/loss"),
        (f"ssh://bob:{SECRET}@host/x, https:/bob:{SECRET}@host/x", "ssh://***@host/x, https:/***@host/x"),
        (f"https://account.example/x?sv=1&sig={SECRET}", "https://account.example/x?sv=1&sig=***"),
    ],
)
def test_secret_in_a_text_and_in_a_name_is_masked(text, shown):
    assert shown == redacted_text(text) == redacted_name(text)


def test_long_text_is_cut_and_a_secret_across_the_limit_is_masked():
    text = "x" * (MAX_TEXT - 30) + f" https://bob:{SECRET}@host/" + "y" * 10_000

    assert redacted_text(text).endswith(f"… ({len(text):,} characters)")
    assert MAX_TEXT == len(redacted_text(text))
    assert "horse" not in redacted_text(text)
    assert redacted_text(text) == redacted_text(redacted_text(text))


def test_long_names_that_differ_at_their_end_remain_different():
    one, other = ("n" * 5_000_000 + end for end in "ab")

    assert redacted_name(one) != redacted_name(other)
    assert {MAX_NAME} == {len(redacted_name(name)) for name in (one, other)}
    assert redacted_name(one).startswith("nnn")
    assert redacted_name(one) == redacted_name(redacted_name(one))


def test_configuration_is_masked_by_names_and_patterns():
    plain = {"every": 1, "password": None, "use_auth": True}
    pairs = {
        "serve": ({"token": SECRET, "token_file": "/run/token"}, {"token": "***", "token_file": "/run/token"}),
        "wandb": ([{"api_key": SECRET, "entity": "us"}], [{"api_key": "***", "entity": "us"}]),
        "argv": (["train.py", "--token", SECRET], ["train.py", "--token", "***"]),
        "wandb_metadata": ({"args": ["--api-key", SECRET]}, {"args": ["--api-key", "***"]}),
        "auth": ({"user": "me", "pw": SECRET}, "***"),
        "url": (f"https://me:{SECRET}@host/", "https://***@host/"),
    }
    given_, shown = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))

    assert plain | shown == redacted(plain | given_)


NAMES = st.sampled_from(["password", "hf_token", "api_key", "clientSecret", "DB_PASSWD"])
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5))


@settings(max_examples=examples(40))
@given(
    st.recursive(
        PLAIN | NAMES.map(lambda name: {name: SECRET}),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    )
)
def test_masking_removes_all_secrets_and_is_idempotent(given_):
    once = redacted(given_)

    assert SECRET not in json.dumps(once)
    assert once == redacted(once)


def test_text_that_is_not_json_is_masked_by_patterns():
    assert "token=***, lr=3" == redacted_json(f"token={SECRET}, lr=3")
    assert '{"token": "***"}' == redacted_json(json.dumps({"token": SECRET}))
    assert redacted_json(None) is None


@pytest.mark.parametrize("text", ['{"token": "%s", "token": null}', '[{"api_key": "%s", "lr": 3, "api_key": ""}]'])
def test_secret_under_a_repeated_key_is_masked(text):
    """A JSON parser returns only the last value of a repeated key, but the store contains the whole text."""
    assert SECRET not in redacted_json(text % SECRET)


def test_hostile_input_is_masked_in_limited_time():
    """Nesting is deeper than the recursion limit, and a pattern with backtracking would need quadratic time."""
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    redacted({"deep": deep})
    began = time.process_time()
    for text in ("a-" * 50_000, "eyJaaaaaa-" * 5000, "a " * 50_000, "bearer" + " " * 100_000, "-----BEGIN " * 10_000):
        redacted_text(text)

    assert time.process_time() - began < 60  # takes 0.5 s; with backtracking it would take hours
