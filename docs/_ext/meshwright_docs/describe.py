"""Conversion of a public definition to a directive of Sphinx's Python domain: signature, docstring and members."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright_docs.prose import as_markdown, split_attributes
from meshwright_docs.source import Definition, Module, Source, comment_below, is_public

LONGEST_DEFAULT = 40
NOT_FIELDS = ("model_config", "__slots__")
QUIET_BASES = ("object", "ABC", "Protocol", "Generic")


@dataclass(frozen=True)
class Scope:
    """Scope of name lookup: a module and optionally a class; `shown` maps full names to documented ones."""

    source: Source
    shown: Mapping[str, str]
    module: Module
    owner: str | None = None
    """Full name of the class."""
    arguments: frozenset[str] = frozenset()
    """Parameter names of the function, which are not linked in its docstring."""

    def link(self, name: str) -> str | None:
        """Return the documented name for a name in a docstring, or None."""
        if name.partition(".")[0] in self.arguments:
            return None
        if self.owner is not None and (found := self._member(self.owner, name)):
            return found
        full = self.source.resolve(self.module, name) or self._class_named(name)
        if full is None:
            return None
        if full in self.shown:
            return self.shown[full] if full != self.owner else None
        owner, _, member = full.rpartition(".")
        return self._member(owner, member)

    def qualified(self, annotation: ast.expr) -> str:
        """Return an annotation as text, with full names of the package so that they become links."""
        return ast.unparse(_Qualified(self).visit(ast.parse(ast.unparse(annotation), mode="eval").body))

    def annotated(self, annotation: ast.expr) -> set[str]:
        """Return the full names of the package in an annotation."""
        qualified = _Qualified(self)
        qualified.visit(ast.parse(ast.unparse(annotation), mode="eval").body)
        return qualified.found

    def within(self, function: ast.FunctionDef) -> Scope:
        """Return the scope of a function's docstring."""
        return replace(self, arguments=frozenset(one.arg for one in arguments(function)))

    def _class_named(self, name: str) -> str | None:
        """Return the documented class with a name that the module does not import, if it is unique."""
        found = [full for full in self.shown if name[0].isupper() and full.endswith(f".{name}")]
        return found[0] if len(found) == 1 else None

    def _member(self, owner: str, name: str) -> str | None:
        found = self.source.definition(owner) if owner in self.shown else None
        if found is None or not isinstance(found[2], ast.ClassDef):
            return None
        return f"{self.shown[owner]}.{name}" if name in {one for one, _ in members(found[2])} else None


class _Qualified(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.found: set[str] = set()

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._named(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return self._named(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return node if ast.unparse(node.value).endswith("Literal") else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return self.visit(ast.parse(node.value, mode="eval").body) if isinstance(node.value, str) else node

    def _named(self, node: ast.Name | ast.Attribute) -> ast.expr:
        full = self.scope.source.resolve(self.scope.module, ast.unparse(node))
        if full is not None and self.scope.source.definition(full) is not None and is_public(full):
            self.found.add(full)
        shown = self.scope.shown.get(full or "")
        return ast.parse(shown, mode="eval").body if shown else node


def members(node: ast.ClassDef) -> list[tuple[str, ast.stmt]]:
    """Return public fields, methods and properties of a class, and special methods with a docstring."""
    found: dict[str, ast.stmt] = {}
    for one in node.body:
        if isinstance(one, ast.FunctionDef):
            special = one.name.startswith("__") and one.name not in ("__init__", "__post_init__")
            if is_public(one.name) or special and ast.get_docstring(one):
                found[one.name] = one
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            target = one.target if isinstance(one, ast.AnnAssign) else one.targets[0]
            if isinstance(target, ast.Name) and is_public(target.id) and target.id not in NOT_FIELDS:
                found[target.id] = one
    return list(found.items())


def references(scope: Scope, node: Definition) -> set[str]:
    """Return the full names of the package in the annotations and bases of a definition."""
    found: set[str] = set()
    for annotation in _annotations(node):
        found |= scope.annotated(annotation)
    return found


def _annotations(node: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(node, ast.ClassDef):
        yield from node.bases
        made = _init(node)
        for one in [*(member for _, member in members(node)), *([made] if made else [])]:
            yield from _annotations(one)
    elif isinstance(node, ast.FunctionDef):
        for argument in arguments(node):
            if argument.annotation is not None:
                yield argument.annotation
        if node.returns is not None:
            yield node.returns
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):  # an alias of types
        yield node.value


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
    """Return all parameters of a function."""
    given = function.args
    several = [one for one in (given.vararg, given.kwarg) if one is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *several]


def directive(scope: Scope, name: str, full: str) -> str:
    """Return the directive of a class, function or variable with public name `name`, defined as `full`."""
    found = scope.source.definition(full)
    assert found is not None, full
    _, own_name, node = found
    inner = Scope(scope.source, scope.shown, scope.module, full) if isinstance(node, ast.ClassDef) else scope
    module, _, short = name.rpartition(".")
    options = {"module": module} | ({"canonical": full} if full != name else {})
    if isinstance(node, ast.ClassDef):
        return _class(inner, node, short, options)
    if isinstance(node, ast.FunctionDef):
        text = as_markdown(ast.get_docstring(node) or "", scope.within(node).link)
        return _fenced("py:function", short + _signature(scope, node), options, text)
    if isinstance(node, ast.AnnAssign):
        options["type"] = scope.qualified(node.annotation)
    options |= _value(node if not isinstance(node, ast.Assign) or isinstance(node.targets[0], ast.Name) else None)
    return _fenced("py:data", short, options, as_markdown(scope.module.comment(own_name), scope.link))


def same_as(name: str, other: str) -> str:
    """Return the directive of a second name of a documented definition."""
    module, _, short = name.rpartition(".")
    return _fenced("py:data", short, {"module": module}, f"The same as {{py:obj}}`{other}`.")


def _class(scope: Scope, node: ast.ClassDef, name: str, options: dict[str, str]) -> str:
    parts = []
    bases = [one for one in node.bases if ast.unparse(one).partition("[")[0].rpartition(".")[2] not in QUIET_BASES]
    if bases:
        parts.append("Bases: " + ", ".join(_base(scope, one) for one in bases))
    made = _init(node)
    docstring, descriptions = split_attributes(ast.get_docstring(node) or "")
    parts.append(as_markdown(docstring, scope.link))
    if made is not None:
        parts.append(as_markdown(ast.get_docstring(made) or "", scope.within(made).link))
    listed = dict(members(node))
    for member in (one for one in descriptions if one not in listed):  # set in `__init__`
        parts.append(_fenced("py:attribute", member, {}, as_markdown(descriptions[member], scope.link)))
    for member, one in listed.items():
        parts.append(_member(scope, node, member, one, descriptions.get(member, "")))
    kind = "py:exception" if name.endswith("Error") else "py:class"
    return _fenced(kind, name + _constructor_signature(scope, node), options, "\n\n".join(filter(None, parts)), depth=4)


def _base(scope: Scope, base: ast.expr) -> str:
    target = scope.link(ast.unparse(base))
    return f"{{py:obj}}`{ast.unparse(base)} <{target}>`" if target else f"`{ast.unparse(base)}`"


def _member(scope: Scope, owner: ast.ClassDef, name: str, node: ast.stmt, description: str) -> str:
    if isinstance(node, ast.FunctionDef):
        text = as_markdown(ast.get_docstring(node) or "", scope.within(node).link)
        marks = {ast.unparse(one).rpartition(".")[2]: "" for one in node.decorator_list}
        options = {"abstractmethod": ""} if "abstractmethod" in marks else {}
        if "property" in marks or "cached_property" in marks:
            returned = {"type": scope.qualified(node.returns)} if node.returns is not None else {}
            return _fenced("py:property", name, options | returned, text)
        options |= {mark: "" for mark in ("classmethod", "staticmethod") if mark in marks}
        return _fenced("py:method", name + _signature(scope, node, bound="staticmethod" not in marks), options, text)
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    options = {"type": scope.qualified(node.annotation)} if isinstance(node, ast.AnnAssign) else {}
    text = as_markdown(comment_below(owner.body, node) or description or _described(node), scope.link)
    return _fenced("py:attribute", name, options | _value(node), text)


def _value(node: ast.stmt | None) -> dict[str, str]:
    value = getattr(node, "value", None)
    return {"value": _default(value)} if value is not None and _default(value) != "..." else {}


def _default(value: ast.expr) -> str:
    text = ast.unparse(value)
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "Field"):
        given = {one.arg: one.value for one in value.keywords}
        plain = given.get("default", value.args[0] if value.args else None)
        return _default(plain) if plain is not None else "..."
    private = any(isinstance(one, ast.Name) and not is_public(one.id) for one in ast.walk(value))
    return "..." if private or len(text) > LONGEST_DEFAULT else text


def _described(node: ast.Assign | ast.AnnAssign) -> str:
    """Return the description in `Field(…, description=…)` of a configuration key."""
    given = node.value.keywords if isinstance(node.value, ast.Call) else []
    texts = [one.value.value for one in given if one.arg == "description" and isinstance(one.value, ast.Constant)]
    return re.sub(r"([<*\\])", r"\\\1", str(texts[0])) if texts else ""


def _init(node: ast.ClassDef) -> ast.FunctionDef | None:
    return next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)


def _constructor_signature(scope: Scope, node: ast.ClassDef) -> str:
    """Return the constructor signature, from `__init__` or from the fields of a dataclass or named tuple."""
    made = _init(node)
    if made is not None:
        return _signature(scope, made, bound=True).removesuffix(" -> None")
    by_name = any("kw_only=True" in ast.unparse(one) for one in node.decorator_list)
    fields = list(_fields(scope, node))
    return f"({', '.join([*(['*'] if by_name else []), *fields])})" if fields else ""


def _fields(scope: Scope, node: ast.ClassDef) -> Iterator[str]:
    if not any("dataclass" in ast.unparse(one) for one in node.decorator_list) and "NamedTuple" not in map(
        ast.unparse, node.bases
    ):
        return
    for base in node.bases:
        full = scope.source.resolve(scope.module, ast.unparse(base))
        found = scope.source.definition(full) if full else None
        if found is not None and isinstance(found[2], ast.ClassDef):
            yield from _fields(Scope(scope.source, scope.shown, found[0]), found[2])
    for name, one in members(node):
        if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation):
            value = None if one.value is None else ast.unparse(one.value)
            if value is None or "init=False" not in value:
                default = "" if one.value is None else f" = {_default(one.value)}"
                yield f"{name}: {scope.qualified(one.annotation)}{default}"


def _signature(scope: Scope, node: ast.FunctionDef, *, bound: bool = False) -> str:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(given.defaults)), *given.defaults]
    parts = []
    for index, (one, default) in enumerate(zip(positional, defaults, strict=True)):
        parts.append(_argument(scope, one, default))
        if index + 1 == len(given.posonlyargs):
            parts.append("/")
    parts = parts[1:] if bound else parts
    if given.vararg is not None:
        parts.append("*" + _argument(scope, given.vararg, None))
    elif given.kwonlyargs:
        parts.append("*")
    parts += [_argument(scope, *pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg is not None:
        parts.append("**" + _argument(scope, given.kwarg, None))
    returned = f" -> {scope.qualified(node.returns)}" if node.returns is not None else ""
    return f"({', '.join(parts)}){returned}"


def _argument(scope: Scope, argument: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {scope.qualified(argument.annotation)}" if argument.annotation is not None else ""
    equals = " = " if annotation else "="
    return argument.arg + annotation + (equals + _default(default) if default is not None else "")


def _fenced(kind: str, argument: str, options: Mapping[str, str], text: str, depth: int = 3) -> str:
    """Return a directive with `depth` colons, more than those of nested directives."""
    written = {key: json.dumps(value, ensure_ascii=False) if value else "" for key, value in options.items()}
    given = [f":{key}: {value}".rstrip() for key, value in written.items()]
    body = "\n".join([*given, "", text]).strip("\n")
    return f"{':' * depth}{{{kind}}} {argument}\n{body}\n{':' * depth}"
