"""Modules of `guidance` as text: their statements, what they import, and what a statement refers to."""

from __future__ import annotations

import ast
import importlib.util
import symtable
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

PACKAGE = "guidance"


@dataclass(frozen=True, eq=False)
class Statement:
    """A statement at the top of a module.

    Attributes:
        first, last: its lines, counted from 1, with the comment right above it and the docstring right below.
        names: what it defines; empty for a statement that is there for what it does, such as filling a table.
    """

    module: Module = field(repr=False)
    node: ast.stmt
    first: int
    last: int
    names: tuple[str, ...]

    @cached_property
    def receiver(self) -> str:
        """Of a statement without names: the name of the table that it fills; empty if it fills none."""
        calls = (node for node in ast.walk(self.node) if isinstance(node, ast.Call))
        owners = (call.func.value for call in calls if isinstance(call.func, ast.Attribute))
        return next((o.id for o in owners if isinstance(o, ast.Name) and o.id in self.module.known), "")


@dataclass(frozen=True)
class Import:
    """What a name at the top of a module stands for: ``name`` of a module, or the module itself if that is empty."""

    module: str
    name: str = ""

    @property
    def is_ours(self) -> bool:
        return self.module.partition(".")[0] == PACKAGE


class Module:
    """One module: its text and its statements.

    Attributes:
        place: its file, from the folder of the package.
        lines: of its text.
        imports: by name, what it imports at its top.
        statements: the others, in order.
    """

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, name
        self.name = name
        self.place = f"{name.replace('.', '/')}{'/__init__' if spec.submodule_search_locations else ''}.py"
        self.text = Path(spec.origin).read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)
        self.imports: dict[str, Import] = {}
        self.statements: list[Statement] = []
        self._read()

    def _read(self) -> None:
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = _import(str(node.module), alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = Import(alias.name)
            elif _is_text(node):
                if self.statements:  # about the statement before it
                    before = self.statements.pop()
                    last = node.end_lineno or node.lineno
                    self.statements.append(Statement(self, before.node, before.first, last, before.names))
            else:
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                while first > 1 and self.lines[first - 2].startswith("#"):
                    first -= 1
                self.statements.append(Statement(self, node, first, node.end_lineno or node.lineno, _defined(node)))

    @cached_property
    def summary(self) -> str:
        """The first paragraph of its docstring."""
        return (ast.get_docstring(self.tree) or "").partition("\n\n")[0]

    @cached_property
    def definitions(self) -> Mapping[str, Statement]:
        """By name, the statement that defines it."""
        return {name: statement for statement in self.statements for name in statement.names}

    @cached_property
    def known(self) -> frozenset[str]:
        """The names at its top."""
        return frozenset({*self.imports, *self.definitions})

    @cached_property
    def inner_names(self) -> frozenset[str]:
        """The names that its functions and classes bind for themselves."""

        def bound(table: symtable.SymbolTable) -> Iterator[str]:
            for child in table.get_children():
                yield from (symbol.get_name() for symbol in child.get_symbols() if symbol.is_local())
                yield from bound(child)

        return frozenset(bound(symtable.symtable(self.text, self.name, "exec")))


module_of = lru_cache(maxsize=None)(Module)
"""A module by name, read once."""


def _import(module: str, name: str) -> Import:
    """What ``from module import name`` brings: of our packages, the module that defines it."""
    if module.partition(".")[0] != PACKAGE:
        return Import(module, name)
    if _exists(f"{module}.{name}"):
        return Import(f"{module}.{name}")
    owner = module_of(module)
    return owner.imports.get(name, Import(module, name))


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of something that is no package
        return False


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _defined(node: ast.stmt) -> tuple[str, ...]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return tuple(n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
