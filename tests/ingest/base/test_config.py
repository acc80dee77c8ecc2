"""The configuration file, periodic jobs, reported faults and the read budget."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from rankscope_ingest.base.background import RECENT_SECONDS, BackgroundFaults, Job, ReadBudget, run_jobs
from rankscope_ingest.base.config_file import load_config
from rankscope_ingest.base.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "rankscope.toml"
    path.write_text(text)
    return path


def test_store_path_is_the_only_required_key(tmp_path):
    config = load_config(write(tmp_path, '[store]\npath = "data"'))

    assert str(tmp_path / "data") == config.store.path
    assert (2.0, 10.0, 1_000_000) == (
        config.ingest.poll_seconds,
        config.ingest.flush_after_seconds,
        config.ingest.flush_rows,
    )
    assert ["127.0.0.0/8", "::1/128"] == list(map(str, config.service.allowed_networks))


def test_overrides_take_precedence_and_work_without_a_file(tmp_path):
    path = write(tmp_path, '[store]\npath = "data"\n[ingest]\npoll_seconds = 7')

    assert 0.5 == load_config(path, {"ingest.poll_seconds": 0.5}).ingest.poll_seconds
    assert ["/x", "/x"] == [load_config(None, {"store.path": given}).store.path for given in ("/x", Path("/x"))]


def test_token_of_the_environment_is_used_if_the_file_has_none(tmp_path):
    (tmp_path / "token").write_text("of-a-file\n")
    of_file = {"RANKSCOPE_TOKEN_FILE": str(tmp_path / "token")}
    plain = write(tmp_path, "[store]\npath='x'\n[service]\nlisten='0.0.0.0:9470'")

    assert "given" == load_config(plain, environment={"RANKSCOPE_TOKEN": "given"}).token
    assert "of-a-file" == load_config(plain, environment=of_file).token
    assert "of-a-file" == load_config(None, {"store.path": "x"}, environment=of_file).token
    assert load_config(None, {"store.path": "x"}, environment={"RANKSCOPE_TOKEN": ""}).token is None
    named = write(tmp_path, "[store]\npath='x'\n[service]\ntoken='own'")
    assert "own" == load_config(named, environment=of_file).token


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANKSCOPE_TOKEN_FILE": "/no/such"}, "RANKSCOPE_TOKEN_FILE /no/such: No such file"),
        ({"RANKSCOPE_TOKEN_FILE": "/no/such", "RANKSCOPE_TOKEN": "x"}, "both set: remove one of them"),
        ({"RANKSCOPE_TOKEN": "two words"}, "without spaces"),
    ],
)
def test_invalid_token_of_the_environment_is_reported(environment, complaint):
    with pytest.raises(ConfigError, match=complaint) as refused:
        load_config(None, {"store.path": "x"}, environment=environment)
    assert "two words" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("", ["store: is missing"]),
        ("[store]\npath='x'\nshrad='0/1'", ["store.shrad: unknown key", "did you mean shard?", "allowed: path, shard"]),
        ("[stoer]\npath='x'", ["stoer: unknown key", "did you mean store?", "store: is missing"]),
        ("[store]\npath='x'\n[ingest]\npoll_secs=1", ["ingest.poll_secs", "did you mean poll_seconds?"]),
        ("[store]\npath='x'\n[ingest]\npoll_seconds=-1", ["ingest.poll_seconds", "greater than 0", "given: -1"]),
        (
            "[store]\npath='x'\n[ingest]\npoll_seconds='soon'\nflush_rows=0\ntimeout=3",
            ["\n  ingest.poll_seconds", "number", "'soon'", "\n  ingest.flush_rows", "\n  ingest.timeout"],
        ),
        ("[store]\npath='x'\n[ingest]\nmax_pending_rows=5", ["max_pending_rows (5) is below flush_rows"]),
        ("[store]\npath='gs://bucket/x'", ["store.path", "unknown scheme gs: a store is a local folder, or s3://"]),
        ("[store]\npath='x'\nshard='1'", ["store.shard"]),
        ("[store]\npath='x'\n[notify]\nmode='mail'", ["notify.mode", "'embedded', 'alertmanager', 'grafana' or 'off'"]),
        ("[store]\npath='x'\n[service]\nlisten='here'", ["service.listen", "host:port"]),
        ("[store]\npath='x'\n[service]\nlisten='0.0.0.0:9470'", ["can be reached from other machines", "set token"]),
        ("[store]\npath='x'\n[service]\nallowed_networks=['nowhere']", ["service.allowed_networks[0]"]),
        ("[store]\npath='x'\n[[targets]]\nrun='a'\nurl='127.0.0.1:1'", ["targets[0].url", "http://127.0.0.1:9400"]),
        ("[store]\npath='x'\n[[targets]]\nurl='http://h:1'\nrnu='a'", ["targets[0].rnu", "did you mean run?"]),
        ("[store]\npath='x'\n[runs]\nfailed_after_seconds=6", ["failed_after_seconds (6) must be at least twice"]),
        ("store = 1", ["store"]),
        ("[store", ["not valid TOML"]),
        ("store = " + "[" * 100_000, ["not valid TOML: maximum recursion depth"]),
    ],
)
def test_error_names_the_key_and_the_allowed_values(tmp_path, text, complaints):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(path)

    assert str(path) in str(error.value)
    assert [] == [complaint for complaint in complaints if complaint not in str(error.value)]


def test_secrets_appear_neither_in_errors_nor_in_the_printed_config(tmp_path):
    config = load_config(
        write(tmp_path, "[store]\npath='x'\n[service]\ntoken='s3cret'\n[notify]\nurls=['json://u:s3cret@h']")
    )

    assert "s3cret" == config.token
    assert "s3cret" not in repr(config)
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, "[store]\npath='x'\n[service]\ntoken=['s3cret']\n[notify]\nurls='s3cret'"))
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("proxy", ["environment", "none", "http://u:s3cret@proxy:3128", "socks5h://proxy"])
def test_proxy_of_notifications_is_a_word_or_an_address(tmp_path, proxy):
    config = load_config(write(tmp_path, f"[store]\npath='x'\n[notify]\nproxy='{proxy}'"))

    assert proxy == config.notify.proxy.get_secret_value()
    assert "s3cret" not in repr(config)


@pytest.mark.parametrize("proxy", ["", "s3cret", "ftp://s3cret", "http://[s3cret"])
def test_wrong_proxy_of_notifications_is_rejected_without_its_text(tmp_path, proxy):
    with pytest.raises(ConfigError, match=r"notify\.proxy: .*proxy") as error:
        load_config(write(tmp_path, f"[store]\npath='x'\n[notify]\nproxy='{proxy}'"))

    assert "s3cret" not in str(error.value)


def test_missing_file_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "absent.toml")


@pytest.mark.parametrize("section", ["[[watch]]\nlog='a.log'", "[[targets]]\nurl='http://127.0.0.1:9400'"])
def test_run_name_that_ranks_could_not_have_is_rejected_in_one_sentence(tmp_path, section):
    with pytest.raises(ConfigError, match=r"run: the name of the run has 1,001 characters; the maximum is 1,000"):
        load_config(write(tmp_path, f"[store]\npath='x'\n{section}\nrun='{'x' * 1001}'"))


# Periodic jobs, reported faults and the read budget.


@contextlib.asynccontextmanager
async def running(*jobs: Job, faults: BackgroundFaults | None = None):
    task = asyncio.create_task(run_jobs(jobs, faults or BackgroundFaults()))
    async with asyncio.timeout(10):
        yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_failing_job_is_called_again_and_each_fault_is_logged_once(caplog):
    errors = [ValueError("a"), ValueError("a"), KeyError("b"), ValueError("a")]
    done = asyncio.Event()

    async def work():
        if errors:
            raise errors.pop(0)
        done.set()

    async with running(Job("the work", 0.0, work)):
        await done.wait()

    assert [] == errors
    assert ["ValueError", "KeyError"] == [record.exc_info[0].__name__ for record in caplog.records]
    assert ["unexpected error in the work, retrying"] * 2 == [record.getMessage() for record in caplog.records]


def test_fault_is_reported_for_half_a_minute():
    now = [0.0]
    faults = BackgroundFaults(clock=lambda: now[0])
    faults.report("updating runs", ValueError("no luck"))

    assert "background tasks failed, see the service's log: updating runs: ValueError('no luck')" == faults.recent()
    now[0] = RECENT_SECONDS
    assert faults.recent() is None


def test_failed_attempt_does_not_stop_the_next_one_and_is_logged_once(caplog):
    faults, done = BackgroundFaults(), []

    def fail():
        raise ValueError("no luck")

    for _ in range(3):
        faults.attempt("updating runs", fail)
        faults.attempt("checking for stalls", lambda: done.append("checked"))

    assert ["checked"] * 3 == done
    assert ["unexpected error in updating runs, retrying"] == [item.getMessage() for item in caplog.records]


def test_read_budget_limits_reads_to_two_percent_of_the_time():
    now = [0.0]
    budget = ReadBudget(30.0, clock=lambda: now[0], max_intervals=2)
    due = []
    assert budget.is_due
    with budget.reading():
        now[0] = 6.0
    for now[0] in (31.0, 299.0, 301.0):
        due.append(budget.is_due)

    assert [False, False, True] == due  # 6 s are 2 % of 300 s


def test_failed_read_is_retried_after_one_interval():
    now = [0.0]
    budget = ReadBudget(30.0, clock=lambda: now[0], max_intervals=2)
    for _ in range(3):
        with budget.reading():
            pass
    with pytest.raises(OSError), budget.reading():
        raise OSError

    now[0] = 30.0
    assert budget.is_due
