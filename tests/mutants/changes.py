"""Small changes of source code that a test must notice. They are found again after the file was edited."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

COMPARISONS: Final = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: Final = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
CALLS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
SQL: Final = {  # Changes within a text that is an SQL statement, by pattern
    r"<=": "<",
    r">=": ">",
    r"(?<=\s)<(?=\s)": "<=",
    r"(?<=\s)>(?=\s)": ">=",
    r"(?<=\s)=(?=\s)": "<>",
    r"\bAND\b": "OR",
    r"\bOR\b(?! REPLACE)": "AND",
    r"\bmin\(": "max(",
    r"\bmax\(": "min(",
    r"\bLEFT JOIN\b": "JOIN",
    r"\bDESC\b": "ASC",
    r"\bIS NOT NULL\b": "IS NULL",
    r"\bIS NULL\b": "IS NOT NULL",
    r"\bcount\(DISTINCT ": "count(",
    r"\bUNION ALL\b": "UNION",
    r"(?<=\s)\+(?=\s)": "-",
    r"(?<=\s)-(?=\s)": "+",
    r"(?<=\s)[*](?=\s)": "+",
    r"(?<=\s)/(?=\s)": "*",
    r"(?<![\w.$])1(?![\w.])": "2",
    r"(?<![\w.$])0(?![\w.])": "1",
}

STATEMENT: Final = re.compile(r"\b(?:SELECT|WHERE|FROM|WHEN|OVER)\b")


class Place(NamedTuple):
    """Bytes of a file from `begin` to `end`, and the text in their place."""

    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class Change:
    """A change that can be found again: the `place`-th occurrence in this line of this function."""

    function: str
    line: str
    place: int
    before: str
    after: str


def changes(source: str) -> Iterator[tuple[int, Place, Change]]:
    """Yield each possible change of a file with the number of its line, in the order of the text."""
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    data = source.encode()
    found = sorted({(place, function) for function, place in _Finder(data, starts).all(ast.parse(source))})
    for place, function in found:
        number = max(index for index, start in enumerate(starts) if start <= place.begin)
        line = data[starts[number] : starts[number + 1]].decode().rstrip("\n")
        ends = data.find(b"\n", place.end)
        before = data[place.begin : place.end].decode()
        if ends < 0 or before == place.text:
            continue
        yield number + 1, place, Change(function, line.strip(), place.begin - starts[number], before, place.text)


class _Finder(ast.NodeVisitor):
    """Collects the places of a tree, with the qualified name of the function that has each."""

    def __init__(self, data: bytes, starts: list[int]) -> None:
        self._data, self._starts = data, starts
        self._names: list[str] = []
        self._found: list[tuple[str, Place]] = []

    def all(self, tree: ast.AST) -> list[tuple[str, Place]]:
        self.visit(tree)
        return self._found

    def _place(self, node: ast.AST, text: str) -> None:
        begin = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        self._found.append((".".join(self._names), Place(begin, end, text)))

    def _text(self, node: ast.AST) -> str:
        begin = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return self._data[begin:end].decode()

    def _named(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._names.append(node.name)
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        for child in body:
            self.visit(child)
        if not isinstance(node, ast.ClassDef):
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.visit(default)
        self._names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _named  # noqa: N815 - names of `ast`

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """The words of an error are no logic."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion states a fact, and changes none."""

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and (other := COMPARISONS.get(type(node.ops[0]))):
            self._place(node, self._joined(node.left, other(), node.comparators[0]))
        self.generic_visit(node)

    def _joined(self, left: ast.expr, operator: ast.AST, right: ast.expr) -> str:
        if isinstance(operator, ast.cmpop):
            words = ast.unparse(ast.Compare(ast.Name("x"), [operator], [ast.Name("y")]))
        else:
            words = ast.unparse(ast.BinOp(ast.Name("x"), operator, ast.Name("y")))  # type: ignore[arg-type]
        return f"({self._text(left)}) {words[2:-2]} ({self._text(right)})"

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sides = node.left, node.right
        is_text = any(isinstance(part, ast.JoinedStr | ast.Constant) and not _is_number(part) for part in sides)
        if (other := OPERATORS.get(type(node.op))) and not is_text:
            self._place(node, self._joined(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self._place(node, word.join(f"({self._text(value)})" for value in node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._place(node, f"({self._text(node.operand)})")
        if not isinstance(node.op, ast.USub):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._place(node, str(not node.value))
        elif _is_number(node):
            self._place(node, repr(node.value + 1))
        elif isinstance(node.value, str):
            self._sql(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._sql(node)

    def _sql(self, node: ast.expr) -> None:
        text = self._text(node)
        if not STATEMENT.search(text):
            return
        begin = self._starts[node.lineno - 1] + node.col_offset
        hidden = re.sub(r"\{[^{}]*\}|--[^\n]*", lambda found: "·" * len(found[0].encode()), text)
        for pattern, other in SQL.items():
            for found in re.finditer(pattern, hidden):
                first = begin + len(hidden[: found.start()].replace("·", "x").encode())
                place = Place(first, first + len(found[0].encode()), other)
                self._found.append((".".join(self._names), place))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and (other := CALLS.get(node.func.id)):
            self._place(node.func, other)
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            self._place(node.test, f"(not ({self._text(node.test)}))")
        self.generic_visit(node)

    visit_IfExp = visit_If  # noqa: N815 - a name of `ast`

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._place(node.value, "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Await):
            self._place(node, "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._place(node, "pass")
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._place(node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._place(node, "continue")


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
