"""Texts about an address contain none of its secrets."""

from __future__ import annotations

import pytest

from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.notify.notifiers import make_notifiers, receiver_names
from rankscope_ingest.notify.notifiers.apprise_notifier import MAX_CHARACTERS, Secrets

SECRETS = Secrets(["json://bob:p%40ss%2Fword@hooks.example:8080/path1/tok3n?+X-Key=abc%20def&tls=no"])


@pytest.mark.parametrize(
    "secret",
    [
        *("bob", "p%40ss%2Fword", "p@ss/word", "P@SS/WORD", "Ym9iOnBAc3Mvd29yZA=="),
        *("path1", "tok3n", "abc def", "abc+def", "abc%20def"),
    ],
)
def test_a_secret_is_masked_in_every_form(secret):
    assert "bad value …, no more" == SECRETS.removed_from(f"bad value {secret}, no more")


def test_short_secrets_are_masked_only_as_words():
    assert "… in abcd" == Secrets(["json://a@host/"]).removed_from("a in abcd")


def test_urls_are_shown_without_user_path_and_query():
    text = "no route to https://x:y@chat.example:443/services/T0/B0?key=1, and http://[::1]:8/z"

    assert "no route to https://chat.example:443/… and http://[::1]:8/…" == SECRETS.removed_from(text)


def test_a_text_becomes_one_short_line():
    shown = SECRETS.removed_from("first\n\tsecond\x1b[31m" + "x" * 1000)

    assert shown.startswith("first second [31mxxx")
    assert MAX_CHARACTERS == len(shown)


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("json://bob:pw@hooks.example:8080/token?key=1", "json://hooks.example:8080"),
        ("mailto://me:pw@mail.example?to=a@b.example", "mailto://mail.example"),
        ("feishu://0123456789abcdef", "feishu://…"),
        ("ntfy://my-secret-topic", "ntfy://…"),
        ("ntfys://tk_login@my-secret-topic", "ntfys://…"),
        ("ntfy://ntfy.example:8080/my-secret-topic", "ntfy://ntfy.example:8080"),
        ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", "slack://…"),
        ("discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js", "discord://…"),
    ],
)
def test_label_shows_the_host_only_if_it_is_no_secret(url, label):
    (notifier,) = make_notifiers([url], timeout_seconds=1)

    assert label == notifier.label


def test_several_addresses_in_one_text_are_separate_receivers():
    """As in apprise: separated by spaces or commas. A list within one address remains."""
    text = "json://a.example/tok3n, mailto://me:pw@mail.example?to=a@b.example, c@d.example\njson://a.example/other"
    notifiers = make_notifiers([text, "ntfy://topic1", "ntfy://topic2"], timeout_seconds=1)

    assert [
        *("json://a.example, address 1", "mailto://mail.example", "json://a.example, address 2"),
        *("ntfy://…, address 1", "ntfy://…, address 2"),
    ] == receiver_names(notifiers)


def test_one_invalid_address_of_several_is_refused():
    with pytest.raises(ConfigError, match=r"notify.urls\[0\] \(nosuch://…\) is not a supported"):
        make_notifiers(["json://a.example/tok3n nosuch://user:s3cret@host"], timeout_seconds=1)


@pytest.mark.parametrize("proxy", ["http://proxy.example:3128", "environment"])
def test_receivers_that_the_proxy_of_the_settings_does_not_reach_are_logged(caplog, proxy):
    make_notifiers(["json://a.example/x", "mailto://me:pw@mail.example"], timeout_seconds=1, proxy=proxy)

    expected = ["notify.proxy does not apply to mailto://mail.example, which is not reached by HTTP"]
    found = [record.getMessage() for record in caplog.records if record.name.startswith("rankscope")]
    assert (expected if "proxy.example" in proxy else []) == found
