"""Clean texts before they are stored or leave the process: mask secrets, and cut texts that are too long.

A rank cleans its texts before it sends them. The service and the importers clean them again before they store them,
because a rank may run another release, and a log or an exporter may contain any text. A secret is detected by its name
(`--hf-token`, `password`), its place (`https://user:pw@host`, `curl -u user:pw`, `mysql -ppw`) or its form (`ghp_…`, a
JWT, a private key). In prose, the word after `password is` is a secret. After `token` and `-p`, only a word in which
letters and digits are mixed is one. In the name of a metric, run or tensor, words such as `token=bpe` are no secret:
two names must not become one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

MASK: Final = "***"

MAX_NAME: Final = 256
"""Maximum number of characters of a name: of a metric, scalar, tensor, module, rule or host."""

MAX_LABEL: Final = 1_024
"""Maximum number of characters of the value of a label, such as a URL or a command line."""

MAX_TEXT: Final = 4_096
"""Maximum number of characters of a text, such as the message of an exception."""

MAX_DOCUMENT: Final = 131_072
"""Maximum number of characters of a JSON document, such as the stacks of a process or the configuration of a run."""

log = logging.getLogger(__name__)

_DEEPEST: Final = 100
_words: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+").findall
_SECRET_ENDS: Final = tuple(_words(
    "secret secrets password passwords passwd passphrase passwort pwd credential credentials auth authorization bearer "
    "cookie apikey apitoken accesskey secretkey privatekey authtoken"
))  # fmt: skip
_SECRET_BEFORE_KEY: Final = frozenset(_words(
    "access account admin api auth client db deploy encryption license master mysql private secret service session "
    "shared signing smtp ssh storage subscription wandb write"
))  # fmt: skip
_SECRET_BEFORE_TOKENS: Final = frozenset(_words("access api auth bearer refresh secret"))
_VOCABULARY: Final = frozenset(
    _words("audio bos cls end eos image mask max next pad per sep special start unk video vision")
)
_SHOWN_LAST_WORDS: Final = frozenset(_words("dir file folder mode name path type"))
"""Last words of names such as `token_file`: the named value is the location or type of a secret, not the secret."""

_LOOKS: Final = re.compile(
    r"(?<=://)(?<!ssh://)[^/?#\s]+(?=@)"
    r"|(?:(?<=://)|(?<=[a-z]:/))[^/?#\s:@[]*:(?!\d{1,5}(?:[/?#\s]|\Z))[^\s\"'<>]{1,256}(?=@)"  # ssh: not a user alone
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # also after `_`, as in the name of a file
    r"|(?:github_pat_|glpat-|sk-|[rs]k_live_|nvapi-|pypi-|dckr_pat_|xox[abeoprs]-|AIza|SG\.[\w-]+\.|ya29\.)[\w-]{16,}"
    r"|(?:gh[pousr]|hf|npg|npm)_[A-Za-z0-9]{16,})"  # without `_`: hf_attention_projection is the name of a module
    r"|\beyJ[\w-]{6,2000}\.[\w-]{6,2000}\.[\w-]*"  # a JSON web token
    r"|(?<=hooks\.slack\.com/)\S+|(?<=/api/webhooks/)\S+|(?<=telegram\.org/bot)[^/\s]+"
)
_SCHEME: Final = re.compile(
    r"(?i)\b(authorization['\"]?\s*+[:=]\s*+['\"]?(?:basic|bearer|token|apikey|digest)\s++(?=\w)"
    r"|(?:authorization: \w+|bearer|basic(?=\s++\S*(?-i:[A-Z\d=])))\s++(?=[\w.~+/=:-]{6}))[\w.~+/=:-]+"
)
_CERTAIN: Final = re.compile(
    r"(?i)((?:[?&][\w.-]*(?:token|key|sig|signature|auth|pwd|pass|pw|credential)|(?:hf|access|auth|github)[_-]?token"
    r"|password|passwd|secret|api[_-]?key)=\\*[\"']?)(?!…|\.\.\.)[^\s&,;\"']+"
)
"""Values that are secret also in names: of the query of a URL, and after words without another meaning."""
# Possessive quantifiers: no backtracking. Otherwise 1 MB of text from a rank could block the service.
_NAMED: Final = re.compile(r"""(?<![\w.-])((--)?[\w.-]++)(?:\\*["']?+\s*+[=:]{1,2}>?\s*+\\*|(?(2)["']?+,?\s++|(?!)))""")
_NO_VALUE: Final = (
    r"(?:not|no|required|missing|wrong|incorrect|invalid|empty|unset|unknown|set|needed|expired|too|in|the|an?|never"
    r"|only|see|none|null)\b"
)
# A word and a space after `: ` are prose, except after `X-Api-Key` and `X-Token`: "the rank requires a token: set it
# there". KEY=VALUE explains a form.
_VALUE: Final = re.compile(
    rf"""(?!VALUE\b|…|\.\.\.|--|(?<=: )(?:{_NO_VALUE}|(?<!(?i:-key): )(?<!(?i:-token): )[A-Za-z]++ ))"""
    r"""(?:"[^"]*"|'[^']*'|[^\s,;&"'{}\[\]]+)"""
)
_LOGIN: Final = re.compile(r"(?<![\w/@.:=-])[A-Za-z_][\w.-]{0,63}:[^\s/:@,\"'<>]{1,256}(?=@(?!sha)([A-Za-z]|\d+\.\d))")
_SPOKEN: Final = re.compile(
    r"(?i)\b((?:pass(?:word|wd|phrase|wort)|secret|api[ _-]?key|(?:access|api|auth|hf) token)(?: (?:is|was))?:? )"
    rf"(?:[\"'`]?(?=\S*\d)[^\s\"'`,;]{{6,}}|(?:(?<= is )|(?<= is: ))(?!{_NO_VALUE})[^\s,;]+)"
)
_OF_COMMAND: Final = re.compile(
    r"(?<![\w-])(-[pu](?:[\"'],)? ?[\"']?|--(?:proxy-)?user(?:[\"'],|=)? ?[\"']?"
    r"|(?i:token|login)(?i: is| was)?:? [\"'`]?)((?!-)[^\s\"'`,;|]+)"
)
"""Values in a command line without a name that is secret: of -p, of -u and --user, and the word after `token`."""

_ASKS: Final = re.compile(r"\b((mysql|mariadb|mongo)[\w-]*|sshpass|(docker|az) login)\b(?:(?![ '\"]-p)[^\n;|])*$")
_ORDINARY: Final = re.compile(r"(?:0x)?\d+[A-Za-z]{0,3}|[A-Za-z]+\d{0,4}[A-Za-z]{0,2}|e\dm\d\w*|\d+T\d+Z?").fullmatch
_cut: Final[list[str]] = []  # has an element after the first cut, which is logged
_OPTION: Final = re.compile(r"-{1,2}([A-Za-z][\w.-]*)$")


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a value with this name is a secret, according to the words of the name.

    For example, `hf_token` is the name of a secret and `pad_token` is not.
    """
    words = [word.lower() for word in _words(name)]
    if not words or words[-1] in _SHOWN_LAST_WORDS:
        return False
    before = set(words[:-1])
    if words[-1] == "token":
        return not before & _VOCABULARY
    if words[-1] in ("key", "keys", "pass"):
        return words == ["key"] or bool(before & _SECRET_BEFORE_KEY)
    if words[-1] == "tokens":
        return bool(before & _SECRET_BEFORE_TOKENS)
    return any(word.endswith(_SECRET_ENDS) for word in words)


def redacted_text(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text` with secrets masked, cut to `limit` characters, and without lone surrogates.

    Secrets are credentials in URLs, values of secret names, and text in the form of a secret. A cut text ends with its
    length, also after it is cut again. The first cut to MAX_TEXT characters is logged.
    """
    masked = _masked(text[: 2 * limit])  # twice: a secret across the limit is still recognized
    if len(text) > 2 * limit or len(masked) > limit:
        cut = re.search(r"… \([\d,]+ characters\)\Z", text[-40:])
        end = cut[0] if cut else f"… ({len(text):,} characters)"
        if limit == MAX_TEXT:
            _note_cut(text)
        masked = masked[: limit - len(end)] + end
    return masked.encode("utf-8", "replace").decode()


def redacted_name(name: str, limit: int = MAX_NAME) -> str:
    """Return `name` with secrets masked, cut as `short_name` does, and without lone surrogates."""
    return _short_redacted(name) if len(name) <= limit else short_name(name, limit)


def short_name(name: str, limit: int = MAX_NAME) -> str:
    """Return `name`, cut to `limit` characters.

    A cut name ends with a hash of the whole name, so that two names remain different. Secrets in it are masked.
    """
    if len(name) <= limit:
        return name
    _note_cut(name)
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{_short_redacted(name[: 2 * limit])[: limit - 9]}…{digest}"


@functools.lru_cache(maxsize=8192)
def _short_redacted(name: str) -> str:
    return _without_forms(name).encode("utf-8", "replace").decode()


def _without_forms(text: str) -> str:
    return _CERTAIN.sub(rf"\1{MASK}", _SCHEME.sub(rf"\1{MASK}", _LOOKS.sub(MASK, text)))


def _of_command(found: re.Match[str]) -> str:
    """Return a match of _OF_COMMAND, masked if it is a user with a password, a password of a program, or a mixed word.

    A mixed word has 8 characters or more, with letters and digits unlike in `bfloat16`, `a100-80gb` and `5e-05`.
    """
    option, value = found.groups()
    before = found.string[max(0, found.start() - 200) : found.start()]
    is_mixed = len(value) >= 8 and not all(map(_ORDINARY, re.findall("[A-Za-z0-9]+", value)))
    is_secret = is_mixed or (option.startswith("-p") and _ASKS.search(before))
    if option.startswith(("-u", "--")):
        is_secret = re.match(r"(?!\d+:\d+\Z|\$)[^:/]+:(?!//).", value)
    return f"{option}{MASK}" if is_secret else found[0]


def _masked(text: str) -> str:
    text = _SPOKEN.sub(rf"\1{MASK}", _LOGIN.sub(MASK, _without_forms(text)))
    text = _OF_COMMAND.sub(_of_command, text)
    parts, end = [], 0
    for found in _NAMED.finditer(text):
        value = _VALUE.match(text, found.end()) if found.start() >= end and is_secret_name(found[1]) else None
        if value is not None:
            parts += [text[end : found.end()], MASK]
            end = value.end()
    return "".join([*parts, text[end:]])


def _note_cut(text: str) -> None:
    if not _cut:
        _cut.append(MASK)
        log.warning(
            "Rankscope cuts a text of %s characters; logged once: %s…", f"{len(text):,}", _masked(text[:400])[:60]
        )


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line with secrets masked. Examples: `--token x`, `--token=x`, `api.key=x`, `ghp_…`."""
    shown: list[str] = []
    masks_next = False
    for given in arguments:
        before = " ".join(shown[-20:])[-200:]
        argument = _OF_COMMAND.sub(_of_command, f"{before} {given}")[len(before) + 1 :]
        option = _OPTION.match(argument)
        is_value = masks_next and not argument.startswith("--")
        masks_next = option is not None and is_secret_name(option[1])
        name, equals, _ = argument.partition("=")
        if is_value and not masks_next:
            shown.append(MASK)
        elif equals and is_secret_name(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(redacted_text(argument))
    return shown


def redacted(value: Any, *, depth: int = 0) -> Any:
    """Return a JSON value with secrets masked. Secrets are detected by the names of keys and by the form of texts."""
    if depth > _DEEPEST:
        return MASK  # deeper nesting would exceed the recursion limit
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, Mapping):
        return {redacted_name(str(key), MAX_LABEL): _named(str(key), item, depth) for key, item in value.items()}
    if isinstance(value, list | tuple):
        is_texts = all(isinstance(item, str) for item in value)  # such as a command line
        return redacted_arguments(value) if is_texts else [redacted(item, depth=depth + 1) for item in value]
    return value


def redacted_json(text: str | None) -> str | None:
    """Return a JSON text with secrets masked and long texts in it cut.

    A text that needs no change is returned as it is. A text that is not JSON is cleaned as plain text. An object that
    contains only the length replaces a text of more than MAX_DOCUMENT characters, or with very deep nesting.
    """
    if text is None:
        return None
    left_out = json.dumps({"left_out": f"{len(text):,} characters"})
    try:
        document = json.loads(text, object_pairs_hook=_without_doubles)
        shown = redacted(document)
        text = text if shown == document else json.dumps(shown, ensure_ascii=False)
    except RecursionError:
        return left_out
    except ValueError:
        return redacted_text(text)
    return left_out if len(text) > MAX_DOCUMENT else text.encode("utf-8", "replace").decode()


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. Raises ValueError if a name is repeated."""
    # Readers use only the last value of a repeated name, but the JSON text also contains the first value, which may
    # be a secret.
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in a JSON object")
    return found


def _named(name: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool) or not is_secret_name(name):
        return redacted(value, depth=depth + 1)
    return MASK
