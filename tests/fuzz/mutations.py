"""Seeded mutations of the bytes that a reader gets from outside of its process."""

import random
from collections.abc import Sequence
from typing import Final

PIECES: Final = (
    *(b"", b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r\n", b"\n", b" ", b"\t", b"\x1b[31m"),
    *(b"NaN", b"nan", b"-Infinity", b"inf", b"1e999", b"-0", b"0x1p3", b"1_000", b"9" * 400, b"9" * 5000, b"-1"),
    *(b"2147483648", b"9223372036854775808", b"18446744073709551616", b"1e-400", b"253402300800", b"0.1", b"007"),
    *(b"null", b"true", b"{}", b"[]", b'""', b'"\\ud800"', b"[" * 3000, b'{"a":' * 3000, b"{" * 50, b"]" * 50),
    *(b'"', b"'", b"\\", b",", b":", b"=", b"#", b"|", b"%s", b"../x"),
    *(b"a" * 300, b"\xe4\xb8\xad", b"\xf0\x9f\x98\x80"),
)
"""Bytes that readers often treat wrongly: numbers at limits, deep nesting, invalid UTF-8, quotes and separators."""


def mutated(seed: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    """Return `seed` after one to four changes. `others` are further valid inputs, of which parts are inserted."""
    data = bytearray(seed)
    for _ in range(choose.choice((1, 1, 2, 4))):
        start = choose.randint(0, len(data))
        end = min(len(data), start + choose.choice((0, 1, 1, 4, 16, 100)))
        match choose.randrange(7):
            case 0:  # one bit
                if start < len(data):
                    data[start] ^= 1 << choose.randrange(8)
            case 1:
                del data[start:end]
            case 2:
                data[start:end] = choose.choice(PIECES)
            case 3:
                data[start:start] = data[start:end] * choose.choice((1, 3, 50))
            case 4:
                data[start:end] = choose.randbytes(end - start)
            case 5:
                other = choose.choice(others)
                place = choose.randint(0, len(other))
                data[start:end] = other[place : place + choose.choice((4, 20, 200))]
            case 6:  # a number or a word of the text
                _replace_word(data, choose)
    return bytes(data[:200_000])


def _replace_word(data: bytearray, choose: random.Random) -> None:
    kind = (b"0123456789.-+e", b"abcdefghijklmnopqrstuvwxyz_")[choose.randrange(2)]
    places = [place for place, byte in enumerate(data[:5000]) if byte in kind]
    if places:
        start = end = choose.choice(places)
        while start and data[start - 1] in kind:
            start -= 1
        while end < len(data) and data[end] in kind:
            end += 1
        data[start:end] = choose.choice(PIECES)
