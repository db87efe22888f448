"""Which packages the library may import, and which of our packages may import which."""

from __future__ import annotations

import ast
import ctypes
import functools
import gc
import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest

import guidance

ROOT = Path(guidance.__file__).parents[1]
ALLOWED = {"torch", "transformers", "numpy", "safetensors", "guidance"} | set(sys.stdlib_module_names)
OPTIONAL = {"adapters.py": {"peft", "pyarrow"}}
"""Packages that one file imports if they are installed; it says so if they are not."""
FORBIDDEN = {"guidance": {"pipelines", "cli"}, "pipelines": {"cli"}}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The packages that a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add(str(node.module).split(".")[0])
    return names


@pytest.mark.parametrize("path", sources("guidance"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_library_imports_torch_transformers_numpy_and_safetensors_alone(path: Path) -> None:
    assert imported(path) <= ALLOWED | (OPTIONAL.get(path.name, set()) if path.parent.name == "checkpoint" else set())


@pytest.mark.parametrize("path", sources("guidance"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_library_neither_prints_nor_exits(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("print", "input", "exit", "quit", "eval", "exec"), f"line {node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys":
            assert node.attr not in ("stdout", "stderr", "exit"), f"line {node.lineno}"


@pytest.mark.parametrize("package", ["engine", "probing", "stages", "statistics", "storage", "text", "training"])
def test_only_quickstart_the_page_and_commands_import_views(package: str) -> None:
    for path in sources(f"pipelines/{package}"):
        assert "pipelines.views" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("package", FORBIDDEN)
def test_nothing_imports_a_layer_above_it(package: str) -> None:
    found = {str(path.relative_to(ROOT)): imported(path) & FORBIDDEN[package] for path in sources(package)}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize("package", ["guidance", "pipelines", "cli"])
def test_nothing_reads_pickles_or_runs_code_of_models(package: str) -> None:
    for path in sources(package):
        assert not imported(path) & {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}, path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
                assert isinstance(node.value, ast.Constant) and node.value.value is False, f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load") or path.name == "convert.py", path


def test_only_one_file_opens_pickles_and_it_reads_only_weights() -> None:
    calls = []
    for path in [path for package in ("guidance", "pipelines", "cli") for path in sources(package)]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.load"]
        called = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.load"]
        assert len(named) == len(called), f"{path}: torch.load is passed on"
        calls += [(str(path.relative_to(ROOT)), node) for node in called]
    ((path, call),) = calls
    assert path == "pipelines/tools/convert.py"
    assert {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}["weights_only"] == "True"
    assert None not in {keyword.arg for keyword in call.keywords}


def test_every_module_imports_without_output_and_has_a_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    for found in pkgutil.walk_packages(guidance.__path__, "guidance."):
        module = importlib.import_module(found.name)
        assert module.__doc__, found.name
    assert capsys.readouterr() == ("", "")


def test_a_method_that_a_library_gives_every_object_hides_no_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As importing nnsight does with ``save``."""
    methods: Any = gc.get_referents(object.__dict__)[0]
    changed = functools.partial(ctypes.pythonapi.PyType_Modified, ctypes.py_object(object))
    try:
        methods["save"] = lambda anything: anything
        changed()
        assert object().save()  # type: ignore[attr-defined]
        found = guidance.save
    finally:
        del methods["save"]
        changed()
    assert found is guidance.checkpoint.writing.save
    monkeypatch.setattr(guidance, "save", None)
    assert guidance.save is None
    with pytest.raises(AttributeError, match="module 'guidance' has no attribute 'saves'"):
        guidance.saves  # noqa: B018
