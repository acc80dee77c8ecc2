"""Texts about an address contain none of its secrets."""

from __future__ import annotations

import pytest

from rankscope_ingest.notify.notifiers import make_notifiers
from rankscope_ingest.notify.notifiers.secrets import MAX_CHARACTERS, Secrets

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
        ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", "slack://…"),
        ("discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js", "discord://…"),
    ],
)
def test_label_shows_the_host_only_if_it_is_no_secret(url, label):
    (notifier,) = make_notifiers([url], timeout_seconds=1)

    assert label == notifier.label
