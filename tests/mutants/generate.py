"""Generates mutants: small changes of a module's syntax tree that a test should notice."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

_MARK = "# mutant: no"
_SHOWN = 90  # The maximum length of the source text in a mutant's name.

_PAIRS = (
    "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, Mult FloorDiv, Div Mult, Mod FloorDiv"
)
_OPERATORS = [[getattr(ast, name) for name in pair.split()] for pair in f"{_PAIRS}, BitAnd BitOr".split(", ")]
_SWAPPED = {new: old for old, new in _OPERATORS} | {one[0]: one[1] for one in _OPERATORS}
_OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any"}
_EMPTY = {"int": "0", "str": "''", "bool": "False", "list": "[]", "set": "set()", "Iterator": "iter(())"}
_EMPTY |= {"tuple": "()", "Sequence": "()", "Iterable": "()", "dict": "{}", "Mapping": "{}"}

# Fields of syntax nodes that do not change what the program does.
_NOT_CODE = {"annotation", "returns", "decorator_list", "bases", "type_params", "pattern"}
_TYPES = {"NewType", "TypeVar", "ParamSpec", "cast"}
_TEXTS = {"__repr__", "__str__", "__slots__", "__all__"}


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Args:
        path: the source file, relative to the working directory.
        digest: a digest of the statement that is changed.
        key: a unique name, which does not depend on the line number.
        lines: the lines of the changed statement, without its nested statements.
        place: the position in `tree` that changes.
        new: the node to put at that position.
    """

    path: str
    digest: str
    key: str
    lines: range
    place: _Place
    new: ast.AST
    tree: ast.Module = field(repr=False)

    def compiled(self) -> CodeType:
        """Compile the module with the change, and restore the tree."""
        old = self.place.put(self.new)
        try:
            return compile(self.tree, str(Path(self.path).resolve()), "exec", dont_inherit=True)
        finally:
            self.place.put(old)


@dataclass(frozen=True)
class _Place:
    parent: ast.AST
    name: str
    index: int | None

    def put(self, new: ast.AST) -> ast.AST:
        """Put a node at this position; return the node that was there."""
        inside = getattr(self.parent, self.name)
        if self.index is None:
            setattr(self.parent, self.name, new)
            return inside
        inside[self.index], old = new, inside[self.index]
        return old


@dataclass(frozen=True)
class _Site:
    """A node, and the names and statements around the node."""

    node: ast.AST
    place: _Place
    scope: tuple[str, ...] = ()
    statement: ast.stmt | None = None
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None


def sample(paths: Iterable[Path], seed: int, number: int) -> list[Mutant]:
    """Choose mutants of all modules at random. With the same seed, a smaller sample is the start of a larger
    one.
    """
    sources = {path: path.read_text() for path in paths}
    defaults = parameters_with_defaults(sources.values())
    found = [mutant for path, source in sources.items() for mutant in mutants(str(path), source, defaults)]
    return sorted(found, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())[:number]


def mutants(path: str, source: str, defaults: Mapping[str, set[str]] | None = None) -> Iterator[Mutant]:
    """Yield every mutant of a module.

    Args:
        path: the module's path, used in names.
        source: the module's source.
        defaults: for each function, the parameters with defaults.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    unmarked = {number for number, line in enumerate(lines, 1) if _MARK not in line}
    seen = Counter[str]()
    for site in _sites(tree, _Site(tree, _Place(tree, "", None))):
        if getattr(site.node, "lineno", 0) not in unmarked or site.statement is None:
            continue
        before, texts = _text(site.node), set[str]()
        for kind, new in _changes(site, defaults or {}):
            after = _text(new)
            if after in texts or after == before:
                continue
            texts.add(after)
            name = f"{path} {'.'.join(site.scope) or 'module'}: {kind}: {before[:_SHOWN]} -> {after[:_SHOWN]}"
            seen[name] += 1
            key = name if seen[name] == 1 else f"{name} ({seen[name]})"
            ast.fix_missing_locations(ast.copy_location(new, site.node))
            own = _own_lines(site.statement)
            written = " ".join(" ".join(lines[own[0] - 1 : own[-1]]).split())
            digest = hashlib.sha256(written.encode()).hexdigest()[:8]
            yield Mutant(path, digest, key, own, site.place, new, tree)


def parameters_with_defaults(sources: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of the parameters with defaults, for each function and class name."""
    found = defaultdict[str, set[str]](set)
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        match node:
            case ast.FunctionDef(name, arguments) | ast.AsyncFunctionDef(name, arguments):
                found[name] |= _optional(arguments)
            case ast.ClassDef(name, body=body):
                found[name] |= _optional_fields(body)
    return found


def _optional(arguments: ast.arguments) -> set[str]:
    positional = (arguments.posonlyargs + arguments.args)[::-1]
    found = {parameter.arg for parameter, _ in zip(positional, arguments.defaults[::-1], strict=False)}
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return found | {parameter.arg for parameter, default in keywords if default is not None}


def _optional_fields(body: Iterable[ast.stmt]) -> set[str]:
    found = set[str]()
    for node in body:
        match node:
            case ast.AnnAssign(ast.Name(name), value=ast.expr()):
                found.add(name)
            case ast.FunctionDef("__init__", arguments):
                found |= _optional(arguments)
    return found


def _sites(tree: ast.AST, outer: _Site) -> Iterator[_Site]:
    for name, value in ast.iter_fields(tree):
        if name in _NOT_CODE or (name == "keywords" and isinstance(tree, ast.ClassDef)):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_not_code(child):
                continue
            site = _inner(child, _Place(tree, name, index), outer)
            yield site
            if not isinstance(child, ast.Raise):  # error messages are not mutated
                yield from _sites(child, site)


def _inner(node: ast.AST, place: _Place, outer: _Site) -> _Site:
    scope, function = outer.scope, outer.function
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope = (*scope, node.name)
        function = None if isinstance(node, ast.ClassDef) else node
    return _Site(node, place, scope, node if isinstance(node, ast.stmt) else outer.statement, function)


def _is_not_code(node: ast.AST) -> bool:
    """Return whether a node is never mutated, such as a docstring, an f-string, a log call or an assertion."""
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Expr(ast.Constant()):
            return True
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("log")))) | ast.If(ast.Name("TYPE_CHECKING")):
            return True
        case ast.Call(ast.Name(name)):
            return name in _TYPES
        case ast.AnnAssign():
            return _text(node.annotation) == "TypeAlias"
        case ast.Assign([ast.Name(name)], ast.BinOp(op=ast.BitOr()) | ast.Subscript()) if name[0].isupper():
            return not name.isupper()  # a capitalized name that is not a constant is a type alias
        case ast.Assign([ast.Name(name)]) | ast.FunctionDef(name):
            return name in _TEXTS
        case ast.ClassDef():
            return any(_text(base).startswith("Protocol") for base in node.bases)
    return False


def _changes(site: _Site, defaults: Mapping[str, set[str]]) -> Iterator[tuple[str, ast.AST]]:
    for kind, change in _KINDS.items():
        for new in change(site):
            yield kind, new
    for new in _fewer_arguments(site.node, defaults):
        yield "argument dropped", new


def _comparison(site: _Site) -> Iterator[ast.AST]:
    if isinstance(site.node, ast.Compare):
        for index, operator in enumerate(site.node.ops):
            ops = list(site.node.ops)
            ops[index] = _SWAPPED[type(operator)]()
            yield _with(site.node, ops=ops)


def _and_or(site: _Site) -> Iterator[ast.AST]:
    if isinstance(site.node, ast.BoolOp):
        yield _with(site.node, op=_SWAPPED[type(site.node.op)]())


def _without_not(site: _Site) -> Iterator[ast.AST]:
    if isinstance(site.node, ast.UnaryOp) and isinstance(site.node.op, ast.Not):
        yield copy.copy(site.node.operand)


def _arithmetic(site: _Site) -> Iterator[ast.AST]:
    node = site.node
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _SWAPPED:
        yield _with(node, op=_SWAPPED[type(node.op)]())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Mult | ast.FloorDiv):
        for operator in (ast.Add(), ast.Sub()):
            yield ast.BinOp(left=copy.copy(node), op=operator, right=ast.Constant(1))


def _constant(site: _Site) -> Iterator[ast.AST]:
    if not isinstance(site.node, ast.Constant) or site.place.name == "test":
        return
    match site.node.value:
        case bool(value):
            yield ast.Constant(not value)
        case int(value) | float(value):
            yield ast.Constant(value + 1)
        case str(value):
            yield ast.Constant(value + "_" if value else "_")
        case bytes(value):
            yield ast.Constant(value + b"_")


def _deletion(site: _Site) -> Iterator[ast.AST]:
    match site.node:
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets) if not (site.function and site.function.name == "__init__"):
            if all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
                yield ast.Pass()


def _other_call(site: _Site) -> Iterator[ast.AST]:
    match site.node:
        case ast.Call(ast.Name(name)) if name in _OTHER_FUNCTION:
            yield _with(site.node, func=ast.Name(_OTHER_FUNCTION[name], ast.Load()))
        case ast.Call(ast.Name(), [argument], []) if not isinstance(argument, ast.Starred | ast.GeneratorExp):
            yield copy.copy(argument)


def _return_value(site: _Site) -> Iterator[ast.AST]:
    if isinstance(site.node, ast.Return) and site.node.value is not None and site.function is not None:
        returns = _text(site.function.returns).split("[")[0] if site.function.returns else ""
        yield ast.Return(value=ast.parse(_EMPTY.get(returns, "None"), mode="eval").body)


def _condition(site: _Site) -> Iterator[ast.AST]:
    if site.place.name not in ("test", "ifs", "guard"):
        return
    yield ast.Constant(False)
    if not isinstance(site.place.parent, ast.While):
        yield ast.Constant(True)


def _no_early_exit(site: _Site) -> Iterator[ast.AST]:
    is_last = site.function is not None and site.node is site.function.body[-1]
    if isinstance(site.node, ast.Return | ast.Raise | ast.Continue | ast.Break) and not is_last:
        yield ast.Pass()


def _fewer_arguments(node: ast.AST, defaults: Mapping[str, set[str]]) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call):
        optional = defaults.get(_text(node.func).rsplit(".", 1)[-1], set())
        for keyword in node.keywords:
            if keyword.arg in optional:
                yield _with(node, keywords=[other for other in node.keywords if other is not keyword])


_KINDS: dict[str, Callable[[_Site], Iterator[ast.AST]]] = {
    "comparison swapped": _comparison,
    "and for or": _and_or,
    "not removed": _without_not,
    "arithmetic": _arithmetic,
    "constant": _constant,
    "statement deleted": _deletion,
    "call": _other_call,
    "return value": _return_value,
    "condition forced": _condition,
    "early exit removed": _no_early_exit,
}


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _own_lines(statement: ast.stmt) -> range:
    body = getattr(statement, "body", None)
    last = max(body[0].lineno - 1, statement.lineno) if body else statement.end_lineno
    return range(statement.lineno, (last or statement.lineno) + 1)
