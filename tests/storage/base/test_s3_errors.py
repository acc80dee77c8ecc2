"""Errors of S3 are explained by their own words, not by numbers and words that are in every error."""

import pytest

from rankscope_storage.base.s3_errors import known_reason

OBSTORE = (
    "Generic S3 error: Error performing PUT http://127.0.0.1:1/b/a in 1s, after 10 retries, max_retries: 10, "
    "retry_timeout: 180s  - Server returned status code: {}\n\nDebug source:\nRetryError {{ retry_timeout: 180s }}"
)
DELTA = "Generic S3 error\n  ↳ Error performing GET http://h/b/a, max_retries\n   ↳ 10, retry_timeout\n    ↳ {}\n"


@pytest.mark.parametrize("form", [OBSTORE, DELTA])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("503 Service Unavailable: <Code>SlowDown</Code>", "is overloaded"),
        ("503 Service Unavailable", "is overloaded"),
        ("403 Forbidden", "lack a permission"),
        ("501 Not Implemented: <Code>NotImplemented</Code>", "lacks a function"),
        ("<Code>AuthorizationHeaderMalformed</Code> the Credential is malformed", "another region"),
        ("error sending request: operation timed out", "does not answer"),
        ("400 Bad Request", None),
        ("400 Bad Request for _delta_log/00000000000000000503.json, part-0403a.parquet, table metadata", None),
    ],
)
def test_sentence_follows_from_the_words_of_the_error(form, text, words):
    found = known_reason(form.format(text))

    assert found is None if words is None else words in found
