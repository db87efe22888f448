"""What a function or class of `guidance` needs: itself, and all that it refers to, in other modules too.

What is found by name is taken: a method stays in its class if its name stands anywhere in what is needed, as an attribute or as a
word in quotes, or if it may stand for one of a class of another package, which may call it.  So nothing that can run is missing.  Rows
of tables are left out by name; see `ROWS`.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipelines.standalone.modules import PACKAGE, Module, Statement, module_of

ROWS: Mapping[str, str] = {
    "guidance.attention.backends": "backends",
    "guidance.mechanisms": "mechanisms",
    "guidance.patterns.catalogue": "patterns",
    "guidance.patterns.combinations": "combinations",
    "guidance.patterns.features": "features",
    "guidance.models.families": "families",
}
"""Modules with a table of which a plan needs some rows, and what a row is."""


@dataclass(frozen=True)
class Closure:
    """What a root needs.

    Attributes:
        statements: those that are needed, by module; modules come after those that they import from.
        dropped: the nodes in them that are not needed: methods of classes, rows of tables, and what stood in `bodies`.
        bodies: by function, the line that stands for its docstring and statements.
    """

    statements: Mapping[Module, tuple[Statement, ...]]
    dropped: frozenset[ast.AST]
    bodies: Mapping[ast.FunctionDef, str]

    def nodes(self, statement: Statement) -> Iterator[ast.AST]:
        """The syntax nodes of a statement that are needed."""
        yield from _walk(statement.node, self.dropped)


def closure_of(
    roots: Collection[tuple[str, str]], rows: Mapping[str, Collection[str]], cuts: Mapping[tuple[str, str], str] = {}
) -> Closure:
    """What some definitions need.

    Args:
        roots: the definitions, as (module, name).
        rows: by kind of table, see `ROWS`, the names of the rows that are needed.
        cuts: by function, as (module, name) or (module, class.name), the line that stands for its body.
    """
    needed = {module_of(module).definitions[name]: None for module, name in roots}
    bodies = {_function(module_of(module), name): body for (module, name), body in cuts.items()}
    cut = {node for function in bodies for node in function.body}
    words: set[str] = set()
    dropped = frozenset[ast.AST]()
    size = (0, 0)
    while size != (len(needed), len(words)):
        size = (len(needed), len(words))
        unused = (node for s in needed for node in (*_unused_methods(s, words), *_unused_rows(s, rows)))
        dropped = frozenset({*cut, *unused})
        for statement in list(needed):
            for node in _walk(statement.node, dropped):
                words |= _words(node)
                if (found := _referred(statement.module, node)) is not None:
                    needed.setdefault(found)
        for module in {statement.module for statement in needed}:
            for statement in module.statements:
                is_filled = module.definitions.get(statement.receiver) in needed or statement.receiver in module.imports
                if not statement.names and statement.receiver and is_filled:
                    needed.setdefault(statement)
    ordered = _in_order({statement.module for statement in needed})
    by_module = {module: tuple(s for s in module.statements if s in needed) for module in ordered}
    return Closure(by_module, dropped, bodies)


def _function(module: Module, name: str) -> ast.FunctionDef:
    """A function of a module, or a method of one of its classes."""
    *owner, last = name.split(".")
    members: Any = module.definitions[owner[0]].node.body if owner else module.tree.body  # type: ignore[attr-defined]
    return next(node for node in members if isinstance(node, ast.FunctionDef) and node.name == last)


def _walk(node: ast.AST, without: frozenset[ast.AST]) -> Iterator[ast.AST]:
    if node in without:
        return
    yield node
    for child in _children(node):
        yield from _walk(child, without)


@cache
def _children(node: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.iter_child_nodes(node))


def _words(node: ast.AST) -> set[str]:
    """The names by which a node may ask an object for something."""
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        return {node.value}
    return set()


def _referred(module: Module, node: ast.AST) -> Statement | None:
    """The statement, in this module or another one of ours, that defines what a node names."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = module.imports.get(node.value.id)
        if owner is not None and owner.is_ours and not owner.name:
            return module_of(owner.module).definitions.get(node.attr)
    if not isinstance(node, ast.Name):
        return None
    if (imported := module.imports.get(node.id)) is not None:
        return module_of(imported.module).definitions[imported.name] if imported.is_ours and imported.name else None
    return module.definitions.get(node.id)


def _unused_methods(statement: Statement, words: Collection[str]) -> Iterator[ast.AST]:
    """The methods of a class that nothing asks for; those with two underscores are called by Python."""
    node = statement.node
    for member in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(member, ast.FunctionDef):
            is_asked_for = member.name.startswith("__") or member.name in words
            if not (is_asked_for or _is_asked_for_by_others(statement, member)):
                yield member


def _is_asked_for_by_others(statement: Statement, method: ast.FunctionDef) -> bool:
    """Whether a method stands for one of a class of another package, which may call it.

    The class has it from there: torch calls ``backward``.  Or it calls the one that it stands for, as in a mixin: transformers calls
    ``reorder_cache``.
    """
    owner = getattr(importlib.import_module(statement.module.name), statement.names[0])
    others = (base for base in owner.__mro__ if base.__module__.partition(".")[0] != PACKAGE)
    return any(method.name in vars(base) for base in others) or any(
        isinstance(node, ast.Attribute) and node.attr == method.name and _is_super(node.value)
        for node in ast.walk(method)
    )


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _unused_rows(statement: Statement, rows: Mapping[str, Collection[str]]) -> Iterator[ast.AST]:
    """The keys and values, or the calls, of a table's rows that are not needed."""
    kind = ROWS.get(statement.module.name)
    table = _table(statement) if kind is not None else None
    if kind is None or table is None:
        return
    if isinstance(table, ast.Dict):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and key.value not in rows[kind]:
                yield from (key, value)
    elif isinstance(table, ast.Tuple):
        for row in table.elts:
            name = row.args[0] if isinstance(row, ast.Call) and row.args else None
            if isinstance(name, ast.Constant) and name.value not in rows[kind]:
                yield row


def _table(statement: Statement) -> ast.expr | None:
    """The rows of a table, where a loop goes through them or a name stands for them; None if a statement is no table."""
    node = statement.node
    if isinstance(node, ast.For):
        through = node.iter
        is_of_items = isinstance(through, ast.Call) and isinstance(through.func, ast.Attribute)
        return through.func.value if is_of_items else through  # type: ignore[attr-defined]
    return node.value if isinstance(node, ast.AnnAssign) and statement.names == ("_COMBINATIONS",) else None


def _in_order(modules: Collection[Module]) -> list[Module]:
    """Modules, each after those that it imports from."""
    ordered: list[Module] = []
    seen: set[Module] = set()

    def visit(module: Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for name in sorted({imported.module for imported in module.imports.values() if imported.is_ours}):
            visit(module_of(name))
        ordered.append(module)

    for module in sorted(modules, key=lambda module: module.name):
        visit(module)
    return [module for module in ordered if module in modules]
