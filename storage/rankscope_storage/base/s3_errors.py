"""Errors of S3 servers as one sentence that names the remedy."""

from __future__ import annotations

import re
from typing import Final

NO_CREDENTIALS: Final = (
    "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
)
_REASONS: Final = (
    ("NoSuchBucket", "the bucket does not exist: create it, or correct its name"),
    (
        "ExpiredToken|TokenRefreshRequired|RequestExpired",
        "the credentials have expired: renew them, for example in the environment variables AWS_*",
    ),
    (
        "InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken",
        "the server does not accept the credentials: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    (
        "RequestTimeTooSkewed",
        "the clock of this machine differs from that of the server by too much: set the clock, for example with NTP",
    ),
    ("[Rr]edirect|AuthorizationHeaderMalformed", "the bucket is in another region: set AWS_REGION"),
    (r"[Cc]redential|169\.254\.1(?:69\.254|70\.2)", NO_CREDENTIALS),
    (
        "AccessDenied|Forbidden",
        "the credentials lack a permission: allow s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject",
    ),
    (
        "NotImplemented|501 Not Implemented",
        "the server lacks a function of S3, such as If-None-Match: use Amazon S3, MinIO or Ceph",
    ),
    (
        r"SlowDown|ServiceUnavailable|InternalError|\b50[0-4] [A-Z]",
        "the server is overloaded or fails: try again later",
    ),
    (
        r"\b[Tt]imed? ?out|error sending request|[Cc]onnect",  # not retry_timeout, which obstore prints always
        "the server does not answer: check the network and AWS_ENDPOINT_URL, then try again",
    ),
)


def known_reason(text: str) -> str | None:
    """Return the sentence for the text of an error of S3; None for an unknown error."""
    message = text.partition("\n\nDebug source")[0]
    return next((sentence for words, sentence in _REASONS if re.search(words, message)), None)


def reason(text: str) -> str:
    """Return the sentence for the text of an error of a request."""
    return known_reason(text) or text.splitlines()[0][:300]
