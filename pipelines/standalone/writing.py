"""From what is needed of many modules to the text of one, in which every name is unique."""

from __future__ import annotations

import ast
import builtins
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from pipelines.standalone.closure import Closure
from pipelines.standalone.modules import Import, Module, Statement, module_of

Names = Mapping[tuple[Module, str], str]
"""The name in the file of what a module defines."""

Edits = dict[int, list[tuple[int, int, str]]]
"""By line, what is put in the place of bytes: (from, to, text)."""


def written(closure: Closure, classes: Collection[str] = ()) -> tuple[str, str]:
    """The imports of a closure, and its statements: the text of one module, its docstring left out.

    Args:
        classes: names of transformers that are imported too.
    """
    external = _external(closure) | {name: Import("transformers", name) for name in classes}
    names = _unique_names(closure, external)
    sections = [_section(module, closure, names) for module in closure.statements]
    return _imports(external), "\n\n\n".join(sections)


def _external(closure: Closure) -> dict[str, Import]:
    """What the statements use of other packages, by the name under which they do; all modules use the same name for it."""
    external: dict[str, Import] = {}
    for module, statements in closure.statements.items():
        used = {n.id for s in statements for n in closure.nodes(s) if isinstance(n, ast.Name)}
        for name in sorted(used & module.imports.keys()):
            imported = module.imports[name]
            if not imported.is_ours and external.setdefault(name, imported) != imported:
                raise AssertionError(f"{module.name} imports another {name} than the modules before it")
    return external


def _unique_names(closure: Closure, external: Collection[str]) -> Names:
    """The name of everything that is defined: its own, or with that of its module before it where two are the same."""
    defined = [(m, name) for m, statements in closure.statements.items() for s in statements for name in s.names]
    count = Counter(name for _, name in defined)
    taken = {*external, *dir(builtins)}
    names: dict[tuple[Module, str], str] = {}
    for module, name in defined:
        if count[name] == 1 and name not in taken:
            names[module, name] = name
            continue
        if name in module.inner_names:
            raise AssertionError(f"{module.name}: {name} is also the name of something inside a function or class")
        private, stem = "_" if name.startswith("_") else "", module.name.rpartition(".")[2]
        names[module, name] = f"{private}{stem}_{name.lstrip('_')}"
    if len(set(names.values())) < len(names):
        raise AssertionError("two definitions have the same name")
    return names


def _imports(external: Mapping[str, Import]) -> str:
    """The imports: of Python, then of others; each module once."""
    groups: list[list[str]] = [[], []]
    names: dict[str, list[str]] = {}
    for local, imported in external.items():
        if imported.name:
            names.setdefault(imported.module, []).append(
                imported.name if local == imported.name else f"{imported.name} as {local}"
            )
        else:
            groups[_is_foreign(imported.module)].append(
                f"import {imported.module}" + (f" as {local}" if local != imported.module else "")
            )
    for each in groups:
        each.sort()
    for module in sorted(names):
        lines = textwrap.wrap(", ".join(sorted(names[module], key=str.lower)), 100)
        listed = lines[0] if len(lines) == 1 else "(\n    " + "\n    ".join(lines) + ",\n)"
        groups[_is_foreign(module)].append(f"from {module} import {listed}")
    return "\n\n".join("\n".join(each) for each in groups)


def _is_foreign(module: str) -> bool:
    """Whether a module does not come with Python."""
    return module.partition(".")[0] not in sys.stdlib_module_names


def _section(module: Module, closure: Closure, names: Names) -> str:
    """The statements of a module, under a heading that says where they come from."""
    head = [f"# {module.place}", "#", *(f"# {line}" for line in module.summary.splitlines())]
    text, before = "\n".join(head), ""
    for statement in closure.statements[module]:
        mine = _text(statement, closure, names)
        is_apart = (
            isinstance(statement.node, ast.FunctionDef | ast.ClassDef) or "\ndef " in before or "\nclass " in before
        )
        text, before = f"{text}\n\n{'' if not is_apart else chr(10)}{mine}", f"\n{mine}"
    return text


def _text(statement: Statement, closure: Closure, names: Names) -> str:
    """A statement as it stands in its module, without what is not needed, and with the names of the file."""
    module = statement.module
    lines = [*module.lines[statement.first - 1 : statement.last]]
    for number, edits in _renamings(statement, closure, names).items():
        line = lines[number - statement.first].encode()
        for start, end, text in sorted(edits, reverse=True):
            line = line[:start] + text.encode() + line[end:]
        lines[number - statement.first] = line.decode()
    instead: dict[int, str] = {}
    gone: set[int] = set()
    for node in ast.walk(statement.node):
        if node in closure.dropped and isinstance(node, ast.stmt | ast.expr):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            gone |= set(_with_blank_lines(module, first, node)) if isinstance(node, ast.stmt) else _whole(node, first)
        elif isinstance(node, ast.FunctionDef) and node in closure.bodies:
            at = node.body[0]
            instead[at.lineno] = " " * at.col_offset + closure.bodies[node]
            gone -= {at.lineno}
            gone |= set(range(at.lineno + 1, (node.end_lineno or at.lineno) + 1))
    kept = [
        instead.get(number, line)
        for number, line in enumerate(lines, statement.first)
        if number not in gone or number in instead
    ]
    return "\n".join(kept).rstrip()


def _whole(node: ast.expr, first: int) -> set[int]:
    return set(range(first, (node.end_lineno or first) + 1))


def _with_blank_lines(module: Module, first: int, node: ast.stmt) -> range:
    """The lines of a statement inside another one, with comments and empty lines above it."""
    while not module.lines[first - 2].strip() or module.lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return range(first, (node.end_lineno or first) + 1)


def _renamings(statement: Statement, closure: Closure, names: Names) -> Edits:
    """Where a statement names something that has another name in the file."""
    edits: Edits = {}
    for node in closure.nodes(statement):
        for line, start, end, text in _renaming(statement.module, node, names):
            edits.setdefault(line, []).append((start, end, text))
    if (
        isinstance(node := statement.node, ast.FunctionDef | ast.ClassDef)
        and names[statement.module, node.name] != node.name
    ):
        start = len("def " if isinstance(node, ast.FunctionDef) else "class ")
        edits.setdefault(node.lineno, []).append((start, start + len(node.name), names[statement.module, node.name]))
    return edits


def _renaming(module: Module, node: ast.AST, names: Names) -> Iterator[tuple[int, int, int, str]]:
    """For a node that names something of ours under another name: its line, from where to where, and the name."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = module.imports.get(node.value.id)
        if owner is not None and owner.is_ours and not owner.name:
            name = names[module_of(owner.module), node.attr]
            yield node.lineno, node.col_offset, node.end_col_offset or 0, name
    if isinstance(node, ast.Name):
        imported = module.imports.get(node.id)
        if imported is not None and imported.is_ours and imported.name:
            name = names[module_of(imported.module), imported.name]
        else:
            name = names.get((module, node.id), node.id)
        if name != node.id:
            yield node.lineno, node.col_offset, node.end_col_offset or 0, name
