"""`rankscope notify test` sends a notification to a real HTTP receiver."""

import pytest

from rankscope.demo.receiver import AlertReceiver


@pytest.fixture
def receiver():
    with AlertReceiver() as receiver:
        yield receiver


def test_a_notification_is_sent_to_each_address_of_the_option(rankscope, receiver):
    done = rankscope("notify", "test", "--notify", receiver.notify_url)

    assert 0 == done.returncode, done.stderr
    assert done.stdout.endswith(": sent\n")
    assert ["[test] Rankscope notification"] == [alert.title for alert in receiver.alerts]


def test_addresses_of_alertmanager_have_the_same_form_here(rankscope, receiver):
    """Each command accepts the addresses of `rankscope up`. A message of another severity is not sent."""
    web = receiver.webhook_url
    done = rankscope("notify", "test", "--notify", web, "--notify", f"info={web}", "--notify", f"critical={web}")

    assert 0 == done.returncode, done.stderr
    assert 2 == len(receiver.alerts)


def test_addresses_are_read_from_the_configuration_file(rankscope, receiver, tmp_path):
    (tmp_path / "service.toml").write_text(f"[store]\npath = 'h'\n[notify]\nurls = ['{receiver.notify_url}']\n")
    done = rankscope("notify", "test", tmp_path / "service.toml")

    assert 0 == done.returncode, done.stderr
    assert 1 == len(receiver.alerts)


def test_a_failure_is_printed_with_its_address_and_exits_with_1(rankscope, receiver, free_port):
    done = rankscope("notify", "test", "--notify", receiver.notify_url, "--notify", f"json://127.0.0.1:{free_port}/")

    assert 1 == done.returncode
    assert 1 == done.stdout.count(": failed: ")
    assert "rankscope: 1 of 2 notifications failed\n" == done.stderr
    assert 1 == len(receiver.alerts)
