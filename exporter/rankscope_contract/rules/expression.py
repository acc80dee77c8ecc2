"""Scores of rules as text: a small language of words, numbers, `+ - * /` and comparisons.

`parse` returns the expression as a tree of `Node`. The module `evaluator` gives the words their meaning: a text of a
configuration is never run as code.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.kinds import OPS, Kind

GRADIENT: Final = "gradient"
"""The kind of the gradient that the optimizer got: clipped, or reduced if it was not clipped. NaN without an update."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the language: the names of its arguments, and its meaning."""

    arguments: tuple[str, ...]
    doc: str
    repeats: bool = False  # the last argument can be repeated


def _words() -> Iterator[tuple[str, Word]]:
    yield "abs", Word(("x",), "Absolute value.")
    yield "log", Word(("x",), "Natural logarithm; NaN for a value that is not positive.")
    yield "sqrt", Word(("x",), "Square root; NaN for a negative value.")
    yield "max", Word(("x", "y"), "The largest; NaN does not count.", repeats=True)
    yield "min", Word(("x", "y"), "The smallest; NaN does not count.", repeats=True)
    yield "sum", Word(("x",), "Sum over the tensors of the rank.")
    yield "over_tensors", Word(("x",), "Median over the tensors of the rank.")
    yield "largest", Word(("x",), "The largest value of all tensors; between ranks, of all tensors of all ranks.")
    yield "others", Word(("x",), "Mean over the other ranks that have the tensor. Only for rules between ranks.")
    yield "apart", Word(("x",), "Distance from the median over the ranks. Only for rules between ranks.")
    yield "over_ranks", Word(("x",), "Median over the ranks that have the tensor. Only for rules between ranks.")
    yield (
        "scalar",
        Word(
            ("name",), "The logged number with this name, or with this name and label, such as learning_rate/group=0."
        ),
    )
    yield "last", Word(("x",), "Value at the step before; NaN if that step was not measured.")
    yield "ago", Word(("n", "x"), "Value n measured steps ago.")
    yield "level", Word(("rate", "x"), "Deviation of x from its robust moving level, in usual deviations.")
    yield "deviation", Word(("rate", "x"), "Deviation of x from its robust moving level.")
    yield "usual", Word(("rate", "x"), "The usual deviation of x from its robust moving level.")
    yield "held", Word(("n", "clip", "z"), "Sum of the last n values of z, each cut to ±clip, over √n.")
    yield "least", Word(("n", "x"), "The smallest of the last n values.")
    yield "exceeded", Word(("share", "n", "x"), "The value that this share of the last n values of x reaches.")
    yield "lowest", Word(("x",), "The smallest value before.")
    yield "ceiling", Word(("n", "share", "x"), "The largest value before, if n values were within this share of it.")
    for name, doc in _SETTINGS.items():
        yield name, Word((), doc)


_SETTINGS: Final = {
    "beta1": "β₁ of Adam for the tensor.",
    "beta2": "β₂ of Adam for the tensor.",
    "weight_decay": "Weight decay of the tensor's group.",
}
WORDS: Final[dict[str, Word]] = dict(_words())
"""Every word, by name. A statistic of a tensor is `kind.op`, such as `param_after.norm`."""

SERIES_KINDS: Final = (GRADIENT, *map(str, Kind))
_SIGNS: Final = {">": 0, "<": 0, ">=": 0, "<=": 0, "+": 1, "-": 1, "*": 2, "/": 2}
_TOKEN: Final = re.compile(
    r"(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*(?:\.\w+)?)|"
    r'"(?P<text>[^"]*)"|(?P<sign>[<>]=?|[-+*/(),])'
)


class ExpressionError(ValueError):
    """The text is no expression; the message names the position and the cause."""


@dataclass(frozen=True, slots=True)
class Node:
    """A word, sign or statistic with its arguments. A number is `number` with a float, a text `text` with a string.

    `source` is the normalised text: equal expressions have equal sources.
    """

    name: str
    arguments: tuple[Node, ...] = ()
    value: float | str = ""

    @property
    def source(self) -> str:
        if self.name in ("number", "text"):
            return repr(self.value)
        return f"{self.name}({','.join(one.source for one in self.arguments)})" if self.arguments else self.name

    def walk(self) -> Iterator[Node]:
        """Yield this node and all nodes in its arguments."""
        yield self
        for one in self.arguments:
            yield from one.walk()


def parse(text: str) -> Node:
    """Return the tree of the expression `text`. Raise ExpressionError, with the position, if it is none."""
    parser = _Parser(text)
    tree = parser.expression(0)
    if parser.symbol is not None:
        raise parser.error(f"{parser.shown} does not continue the expression")
    return tree


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.end = self.at = 0
        self.kind = ""
        self.symbol: str | None = None
        self.depth = 0
        self.advance()

    @property
    def shown(self) -> str:
        return "the end" if self.symbol is None else repr(self.symbol)

    def error(self, cause: str) -> ExpressionError:
        return ExpressionError(f"{cause}, at position {self.at + 1} of {self.text!r}")

    def advance(self) -> str | None:
        """Read the next symbol, and return the one before it."""
        before = self.symbol
        rest = self.text[self.end :]
        self.at = self.end + len(rest) - len(rest.lstrip())
        if self.at == len(self.text):
            self.kind, self.symbol = "end", None
            return before
        found = _TOKEN.match(self.text, self.at)
        if found is None:
            raise self.error(f"{self.text[self.at]!r} is not part of an expression")
        self.kind, self.symbol, self.end = str(found.lastgroup), found[found.lastgroup or 0], found.end()
        return before

    def expect(self, sign: str) -> None:
        if self.kind != "sign" or self.symbol != sign:
            raise self.error(f"expected {sign!r} instead of {self.shown}")
        self.advance()

    def expression(self, strength: int) -> Node:
        """Return the longest expression whose signs bind at least as strongly as `strength`."""
        left = self.operand()
        while self.kind == "sign" and _SIGNS.get(str(self.symbol), -1) >= strength:
            sign = str(self.advance())
            left = Node(sign, (left, self.expression(_SIGNS[sign] + 1)))
        return left

    def operand(self) -> Node:
        self.depth += 1
        if self.depth > 50:
            raise self.error("the expression is nested too deeply")
        try:
            return self._operand()
        finally:
            self.depth -= 1

    def _operand(self) -> Node:
        kind, symbol = self.kind, self.symbol
        if kind == "number":
            self.advance()
            return Node("number", value=float(str(symbol)))
        if kind == "text":
            self.advance()
            return Node("text", value=str(symbol))
        if kind == "name":
            return self.word(str(symbol))
        if symbol == "-":
            self.advance()
            return Node("-", (Node("number", value=0.0), self.operand()))
        if symbol == "(":
            self.advance()
            inner = self.expression(0)
            self.expect(")")
            return inner
        raise self.error(f"expected a word or a number instead of {self.shown}")

    def word(self, name: str) -> Node:
        if "." in name:
            kind, _, op = name.partition(".")
            for part, known in ((kind, SERIES_KINDS), (op, OPS)):
                if part not in known:
                    raise self.error(_unknown(part, [*known]))
            self.advance()
            return Node(name)
        word = WORDS.get(name)
        if word is None:
            raise self.error(_unknown(name, [*WORDS]))
        self.advance()
        if not word.arguments:
            return Node(name)
        self.expect("(")
        given = [self.expression(0)]
        while self.kind == "sign" and self.symbol == ",":
            self.advance()
            given.append(self.expression(0))
        wanted, shown = len(word.arguments), f"{name}({', '.join(word.arguments)})"
        if len(given) < wanted or (len(given) > wanted and not word.repeats):
            raise self.error(f"{shown} has {len(given)} arguments")
        self.expect(")")
        for argument, node in zip(word.arguments, given, strict=False):
            if (argument in _CONSTANTS) != (node.name == "number") and argument in _CONSTANTS:
                raise self.error(f"{argument} of {shown} must be a number")
            if (argument == "name") != (node.name == "text"):
                raise self.error(f'{shown} needs a name such as "loss"' if argument == "name" else "a text is no value")
        return Node(name, tuple(given))


_CONSTANTS: Final = ("n", "rate", "clip", "share")


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name!r} is no word" + (f", did you mean {near[0]!r}?" if near else f": choose from {', '.join(known)}")
