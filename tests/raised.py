"""The titles of all errors that the package raises, as its source has them.

Terms: a *title* is the first line of a message up to its first semicolon, with `…` for what differs
from case to case.

Signature: source files -> titles, and where each is.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.source_tree import ROOT, source_files

LAYOUTS = ("format_error", "join_faults")
UNKNOWN = "…"


def titles() -> dict[str, list[str]]:
    """Every title with the `file:line` of its places."""
    found: dict[str, list[str]] = {}
    for path in source_files(".py"):
        if path.parts[0] in ("piper_dynamo", "passes", "lowering", "runtime"):
            for line, title in _of_file(path):
                found.setdefault(title, []).append(f"{path}:{line}")
    return found


def _of_file(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef):
            continue
        for call in ast.walk(scope):
            if isinstance(call, ast.Call) and _is_message(call) and call.args:
                for text in _texts(call.args[0], scope, tree):
                    title = title_of(text)
                    if re.search("[a-z]", title):  # else it is another error's text
                        yield call.lineno, title


def _is_message(call: ast.Call) -> bool:
    """Whether a call makes an error, or its text."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    is_error = name == "Misuse" or (name.startswith("Piper") and name.endswith("Error"))
    return is_error or name in LAYOUTS


def _texts(node: ast.expr, scope: ast.FunctionDef, tree: ast.Module) -> Iterator[str]:
    """The texts that an expression may be; none where that is not to be seen in its file."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr():
            parts = (v.value if isinstance(v, ast.Constant) else UNKNOWN for v in node.values)
            yield "".join(map(str, parts))
        case ast.IfExp():
            yield from _texts(node.body, scope, tree)
            yield from _texts(node.orelse, scope, tree)
        case ast.BinOp(left=left):
            yield from _texts(left, scope, tree)
        case ast.Name(id=name):
            for other in ast.walk(scope):
                if isinstance(other, ast.Assign) and any(
                    isinstance(t, ast.Name) and t.id == name for t in other.targets
                ):
                    yield from _texts(other.value, scope, tree)
            for value in _given(name, scope, tree):
                yield from _texts(value, scope, tree)
        case ast.Call(func=ast.Name(id=name)) if not _is_message(node):
            for made in ast.walk(tree):
                if isinstance(made, ast.FunctionDef) and made.name == name:
                    for other in ast.walk(made):
                        if isinstance(other, ast.Return) and other.value is not None:
                            yield from _texts(other.value, made, tree)


def _given(name: str, scope: ast.FunctionDef, tree: ast.Module) -> Iterator[ast.expr]:
    """What a function's callers in its file, or its own signature, give for a parameter."""
    names = [a.arg for a in scope.args.args]
    if name not in names:
        return
    place, first = names.index(name), len(names) - len(scope.args.defaults)
    if place >= first:
        yield scope.args.defaults[place - first]
    for call in ast.walk(tree):
        is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if is_call and call.func.id == scope.name:
            yield from call.args[place : place + 1]
            yield from (k.value for k in call.keywords if k.arg == name)


def title_of(text: str) -> str:
    """The title of a message's text."""
    return text.strip().partition("\n")[0].partition(";")[0].strip()


# Lines of one error that lists many faults: what a plan is unsafe by.

PROOF = ("verify", "matching", "contributions", "exchanges", "casts", "evaluate")


def plan_faults() -> dict[str, str]:
    """The first line of every fault that the proof of a plan tells, and where it is.

    Without the place that it begins with; `…` stands for what differs from case to case.
    """
    found: dict[str, str] = {}
    for name in PROOF:
        path = ROOT / "piper_dynamo" / "ir" / f"{name}.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for told in _told(node):
                line = _fault_line(told)
                if re.search("[a-z]", line):  # else it is put together from others
                    found[line] = f"{path.name}:{told.lineno}"
    return found


def _told(node: ast.AST) -> Iterator[ast.JoinedStr]:
    """The texts that a statement adds to a list of faults."""
    match node:
        case ast.Call(func=ast.Attribute(attr="_fault"), args=args):
            yield from _outermost(args[-1])
        case ast.Call(func=ast.Attribute(attr="append", value=to), args=[text]) if ast.unparse(
            to
        ).endswith("faults"):
            yield from _outermost(text)
        case ast.AugAssign(target=to, value=value) if ast.unparse(to).endswith("faults"):
            yield from _outermost(value)


def _outermost(node: ast.AST) -> Iterator[ast.JoinedStr]:
    if isinstance(node, ast.JoinedStr):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _outermost(child)


def _fault_line(told: ast.JoinedStr) -> str:
    parts = (v.value if isinstance(v, ast.Constant) else UNKNOWN for v in told.values)
    line = "".join(map(str, parts)).partition("\n")[0].strip()
    line = re.sub(f"{UNKNOWN}+", UNKNOWN, line)
    return re.sub(rf"^(rank )?{UNKNOWN}( {UNKNOWN})*: ", "", line)
