"""The parts of `rankscope up` without starting programs: addresses, ports, restarts, files, state folder."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.end_to_end.lives import until

from rankscope.commands.up import exports, overview
from rankscope.shell.errors import CommandError
from rankscope.up.machine import Executable, StateDir, choose, find_required, free_port, is_free
from rankscope.up.plan import Program, ServiceOptions, UpOptions, files, make_plan, programs, receivers
from rankscope.up.supervisor import StopSignals, Supervisor
from rankscope_contract.model.events import Severity
from rankscope_dashboards.deploy.alertmanager import Mail, Slack, Webhook

FOLDER = StateDir(Path("/state"))
SERVICE = ServiceOptions(config=None, store="/data/history", host="127.0.0.1")
CHAT, CHAT_URL = "https://chat.example/hook?a=b", "https://chat.example/services/T0/B0/x"
PORTS = {"service": 9470, "prometheus": 9090, "alertmanager": 9093}
OPTIONS = UpOptions(
    service=SERVICE, ports=PORTS, prometheus=Path("/bin/prometheus"), alertmanager=Path("/bin/alertmanager")
)


@pytest.mark.parametrize(
    ("address", "severities", "integration"),
    [
        (CHAT, (), Webhook(url=CHAT)),
        ("slack+http://127.0.0.1:8080/x", (), Slack(url="http://127.0.0.1:8080/x")),
        (f"critical={CHAT_URL}", (Severity.CRITICAL,), Slack(url=CHAT_URL)),
        (
            "critical=smtp://u:p%40ss@mail:587?to=me@x&from=r@x",
            (Severity.CRITICAL,),
            Mail(to="me@x", sender="r@x", smarthost="mail:587", username="u", password="p@ss"),
        ),
        (
            "smtp://[::1]?to=a@x&to=b@x&tls=no",
            (),
            Mail(to="a@x, b@x", sender="rankscope@localhost", smarthost="[::1]:25", require_tls=False),
        ),
    ],
)
def test_notify_address_becomes_a_receiver_with_the_fields_of_its_kind(address, severities, integration):
    ((receiver,), others) = receivers([address])

    assert [] == others
    assert ((integration,), severities) == (receiver.integrations, receiver.severities)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        *(("nothing://secret@x", "any apprise URL, .*smtp://"), ("nonsense", "smtp://")),
        *(("smtp://secret@host:25", "to=ADDRESS"), ("smtp://host:25?to=secret", "mail address")),
        *(("smtp://host:25?to=a@b&secret=1x", "unknown key"), ("smtp://host:secretport?to=a@b", "smtp")),
        ("https://", "webhook"),
    ],
)
def test_unsupported_address_error_lists_the_forms(address, message):
    with pytest.raises(CommandError, match=message) as refused:
        receivers(["https://fine.example", address])

    assert "nothing:" in str(refused.value) or "nonsense" in str(refused.value) or "address 2" in str(refused.value)
    assert "secret@" not in str(refused.value)
    assert 2 == refused.value.code


def chosen(ports, previous, taken=()):
    free = iter(range(50_000, 60_000))
    return choose(
        ("service", "prometheus"), ports, previous, is_free=lambda port: port not in taken, free_port=free.__next__
    )


def test_ports_are_the_defaults_the_previous_ones_or_free_ones():
    """Running trainings still use the previous address of the service."""
    previous = {"service": 41, "prometheus": 42}

    assert ({"service": 9470, "prometheus": 9090}, []) == chosen("fixed", {"service": 1})
    assert (previous, []) == chosen("free", previous)
    assert {"service": 50_000, "prometheus": 42} == chosen("free", previous, taken=(41,))[0]
    assert 41 == chosen("fixed", {"service": 41}, taken=(9470,))[0]["service"]
    assert (
        {"service": 9470, "prometheus": 50_000},
        ["port 9090 is in use: prometheus listens on 50000 instead"],
    ) == chosen("fixed", {}, taken=(9090,))


def test_ports_in_use_are_not_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free(server.getsockname()[1])

    assert is_free(free_port())


@pytest.fixture
def supervise(tmp_path):
    """Return a function that starts a Python script, which listens on a port, under a supervisor."""
    folder, started = StateDir(tmp_path / "50% of %(x)s ; # it's"), []
    folder.create()

    def start(script, *arguments, **fields):
        lines, port = [], free_port()
        (path := tmp_path / "script.py").write_text(script)
        command = (sys.executable, str(path), str(port), *arguments)
        program = Program(name="one", command=command, url=f"http://127.0.0.1:{port}", ready_path="/", **fields)
        started.append(Supervisor([program], folder, print_line=lines.append, stop_signals=StopSignals()))
        started[-1].start()
        return started[-1], lines, folder.log("one")

    yield start
    for supervisor in started:
        supervisor.stop()


SERVER = "import http.server, sys; print(sys.argv[2:], flush=True)\n"
SERVER += "server = http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)\n"


EXITS_AFTER_ITS_FIRST_START = f"""{SERVER}
import pathlib
if "again" in sys.argv and pathlib.Path(sys.argv[2]).exists():
    sys.exit(3)
pathlib.Path(sys.argv[2]).touch()
server.handle_request()
sys.exit(3)
"""
"""It exits after the request for its readiness, and with `again` at each later start."""


def test_program_that_exits_is_restarted(supervise, tmp_path):
    supervisor, lines, _ = supervise(EXITS_AFTER_ITS_FIRST_START, str(tmp_path / "started"), is_essential=True)

    assert until(lambda: supervisor.look() and lines, 30, lambda: str(lines))
    assert "one exited (exit status 3; not expected); restarting. Last lines of" in lines[0]
    until(lambda: supervisor._is_ready(supervisor._programs["one"]), 30, lambda: str(lines))


@pytest.mark.thorough
def test_program_that_always_exits_is_given_up(supervise, tmp_path):
    supervisor, lines, _ = supervise(EXITS_AFTER_ITS_FIRST_START, str(tmp_path / "started"), "again", is_essential=True)

    assert until(lambda: not supervisor.look(), 60, lambda: str(lines))
    assert ["one"] == supervisor.given_up
    assert [6, "one: giving up after 5 restarts"] == [len(lines) - 1, lines[-1]]


def test_programs_are_killed_if_supervisord_is(supervise):
    supervisor, _, _ = supervise(f"{SERVER}server.serve_forever()")
    supervisor._process.kill()
    supervisor._process.wait(10)

    with pytest.raises(CommandError, match=r"supervisord has exited. Last lines of"):
        supervisor.look()
    assert until(lambda: not supervisor._is_ready(supervisor._programs["one"]), 10, lambda: "")


def test_arguments_reach_a_program_unchanged(supervise):
    arguments = ["a %(b)s %d", "c ; d", "e #f", "; g", "#", "it's ;'# #h", '"', ""]
    supervisor, _, log = supervise(f"{SERVER}server.serve_forever()", *arguments)
    supervisor.stop()

    assert f"{arguments}\n" == log.read_text().splitlines(keepends=True)[0]
    assert {"one": "(terminated by SIGTERM)"} == supervisor.ends


def test_all_programs_listen_on_localhost_and_notify_within_12_seconds():
    for program in programs(OPTIONS, FOLDER):
        assert program.url.startswith("http://127.0.0.1:")
        assert any("127.0.0.1:" in part for part in program.command)
    assert "--cluster.listen-address=" in programs(OPTIONS, FOLDER)[1].command
    assert 12.0 == OPTIONS.delay_seconds


def test_omitted_programs_are_not_configured_or_started():
    alone = UpOptions(service=SERVICE, ports=PORTS)
    silent = UpOptions(service=SERVICE, ports=PORTS, prometheus=Path("/bin/prometheus"))

    given = ServiceOptions(config=Path("/etc/service.toml"), store="/x", host="127.0.0.1")
    (service,) = programs(UpOptions(service=given, ports=PORTS), FOLDER)

    assert "/etc/service.toml" in service.command
    assert "--store" not in service.command
    assert {} == files(alone, FOLDER)
    assert ["service"] == [program.name for program in programs(alone, FOLDER)]
    assert "alerting" not in files(silent, FOLDER)["prometheus.yml"]


def test_service_on_all_addresses_is_reached_on_loopback():
    everywhere = ServiceOptions(config=None, store="s", host="0.0.0.0", token="secret")
    options = UpOptions(service=everywhere, ports=PORTS, prometheus=Path("/bin/prometheus"))
    made = files(options, FOLDER)

    assert "http://127.0.0.1:9470/sd" in made["prometheus.yml"]
    assert "secret" == made["token"]
    assert "secret" not in made["prometheus.yml"]
    assert "credentials_file: /state/config/token" in made["prometheus.yml"]
    assert "0.0.0.0:9470" in programs(options, FOLDER)[0].command


def test_overview_lists_programs_and_exports_name_the_token_file():
    program = Program(name="service", command=(), url="http://127.0.0.1:9470", ready_path="/")
    lines = overview([program], ["prometheus"], FOLDER)

    assert [
        "program     address                state     log",
        "service     http://127.0.0.1:9470  ready     /state/logs/service.log",
        "prometheus  -                      left out  -",
    ] == lines
    assert ["export RANKSCOPE_INGEST_URL=http://h:1", "export RANKSCOPE_TOKEN_FILE=/state/config/token"] == exports(
        "http://h:1", Path("/state/config/token")
    )


def test_state_folder_is_locked_and_readable_by_the_owner_only(tmp_path):
    folder = StateDir.next_to(tmp_path / "history")
    folder.create()
    folder.create()
    folder.write({"token": "secret"})

    imports = "import sys; from pathlib import Path; from rankscope.up.machine import StateDir"
    other = f"{imports}\nwith StateDir(Path(sys.argv[1])).locked(): pass"
    with folder.locked():
        done = subprocess.run([sys.executable, "-c", other, folder.path], capture_output=True, text=True, check=False)

    assert f"in use by process {os.getpid()}" in done.stderr
    assert tmp_path / "rankscope-live" == folder.path
    assert 0o700 == stat.S_IMODE(folder.config("token").parent.stat().st_mode)
    assert 0o600 == stat.S_IMODE(folder.config("token").stat().st_mode)
    for text in (
        "[1]",
        "{",
        "\x00",
        '{"ports": {"service": 99999}}',
        '{"ports": {"service": "9470"}}',
        '{"urls": "x"}',
    ):
        (folder.path / "live.json").write_text(text)
        assert {} == folder.load_notes()


def test_folder_with_other_files_is_rejected_unchanged(tmp_path):
    (tmp_path / "precious").write_text("mine")
    mode = tmp_path.stat().st_mode

    with pytest.raises(CommandError, match="not created by rankscope up"):
        StateDir(tmp_path).create()
    assert mode == tmp_path.stat().st_mode
    assert ["precious"] == [path.name for path in tmp_path.iterdir()]


def test_missing_executables_error_names_packages_and_option():
    one, other = (
        Executable("One", ("no-such",), "one-package"),
        Executable("Other", ("no-such-either",), "other-package"),
    )

    with pytest.raises(CommandError, match=r"^Other is not on PATH: apt install other-package, or.*--without-other$"):
        find_required({other: "--without-other"})
    with pytest.raises(CommandError, match=r"^One and Other are not .* install one-package other-package, .*-one$"):
        find_required({one: "--without-one", other: "--without-other"})


@pytest.fixture
def executables(require_server):
    require_server("prometheus")
    require_server("prometheus-alertmanager")


@pytest.fixture
def service_toml(tmp_path, executables):
    def write(text):
        path = tmp_path / "service.toml"
        path.write_text(f'[store]\npath = "history"\n[service]\nlisten = "127.0.0.1:0"\n{text}')
        return path

    return write


def test_alertmanager_mode_passes_configured_addresses_to_it(service_toml):
    alertmanager = make_plan(config=service_toml('[notify]\nmode = "alertmanager"\nurls = ["http://h/x"]\n'))
    embedded = make_plan(config=service_toml('[notify]\nurls = ["json://h/x"]\n'), notify=("http://h/y",))

    assert ["http://h/x"] == [receiver.integrations[0].url for receiver in alertmanager.options.receivers]
    assert ["http://h/y"] == [receiver.integrations[0].url for receiver in embedded.options.receivers]
    assert [] == [line for line in alertmanager.notification_lines if line.startswith("service notifies")]
    assert "service notifies       1 address" == embedded.notification_lines[0]
    assert alertmanager.folder.path == service_toml("").parent / "rankscope-live"


def test_print_config_hides_secrets_and_starts_nothing(service_toml):
    path = service_toml('token = "open-sesame"\n')
    notify = ("--notify", "smtp://me:pass%27word@mail:25?to=me@x", "--notify", "https://chat.example/hook/T01/key?k=1")
    command = [sys.executable, "-m", "rankscope", "up", str(path), "--print-config", *notify]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert 0 == done.returncode, done.stderr
    assert "auth_password: <secret>" in done.stdout
    assert "open-sesame" not in done.stdout
    assert "url: https://chat.example/<secret>" in done.stdout
    for secret in ("pass'word", "pass''word", "T01", "k=1"):
        assert secret not in done.stdout
    for part in (
        "http_sd_configs:",
        "AnomalyNan",
        "smarthost: mail:25",
        "--web.listen-address=127.0.0.1:",
        "-m rankscope serve",
    ):
        assert part in done.stdout
    assert ["service.toml"] == [found.name for found in path.parent.iterdir()]


def test_token_from_the_environment_reaches_the_service(tmp_path, executables, monkeypatch):
    """All other RANKSCOPE_ variables of the shell are removed from the environment of the programs."""
    monkeypatch.setenv("RANKSCOPE_TOKEN", "open-sesame")
    plan = make_plan(store=tmp_path / "h", listen="0.0.0.0:0")

    assert {"RANKSCOPE_TOKEN_FILE": str(tmp_path / "rankscope-live/config/token")} == plan.environment
    assert "open-sesame" == plan.files["token"]
    assert not any("open-sesame" in word for program in plan.programs for word in program.command)


def test_longer_scrape_interval_has_longer_windows(tmp_path, executables):
    """An event raises an alert only while several scrapes contain it."""
    options = make_plan(store=tmp_path / "h", ports="free", scrape_seconds=60.0).options

    assert ("4m", "2m") == (options.event_window, options.keep_firing_for)


def test_service_notifies_the_addresses_that_alertmanager_does_not(service_toml):
    of_both = ("https://h/y", "json://h/x")
    with_both = make_plan(config=service_toml('[notify]\nurls = ["json://h/z"]\n'), notify=of_both)
    alone = make_plan(config=service_toml(""), notify=of_both, with_alertmanager=False)

    assert ["https://h/y"] == [receiver.integrations[0].url for receiver in with_both.options.receivers]
    assert "json://h/z json://h/x" == with_both.environment["RANKSCOPE_NOTIFY"]
    assert "service notifies       2 addresses" == with_both.notification_lines[0]
    assert "https://h/y json://h/x" == alone.environment["RANKSCOPE_NOTIFY"]
    with pytest.raises(CommandError, match=r'1 addresses are for the service, but .* mode is "alertmanager"'):
        make_plan(config=service_toml('[notify]\nmode = "alertmanager"\n'), notify=("json://h/y",))


def test_requested_port_in_use_and_invalid_retention_fail(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(CommandError, match=rf"{listen} is in use by \S+ \(process {os.getpid()}\): name another"):
            make_plan(store=tmp_path / "h", listen=listen, with_prometheus=False, with_alertmanager=False)
    with pytest.raises(CommandError, match="--retention a fortnight: write numbers with units, such as 15d"):
        make_plan(store=tmp_path / "h", retention="a fortnight")


def test_closed_terminal_requests_one_orderly_stop_and_under_nohup_none():
    signals = StopSignals()
    with signals.caught():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert 1 == signals.count
        signal.raise_signal(signal.SIGTERM)
        assert 2 == signals.count
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with (under_nohup := StopSignals()).caught():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert 0 == under_nohup.count
