"""Exceptions become exit codes and messages in one place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli import main
from cli.output import escape
from cli.signals import Terminated
from guidance import errors
from guidance.registry import Registry

EXPECTED = {
    errors.InputError("x"): 2,
    errors.PlanError("x"): 2,
    errors.UnknownName("pattern", "nxt", ["next"]): 2,
    errors.MachineError("x"): 3,
    errors.NumericalError("x"): 4,
    errors.GateFailed("x"): 5,
    errors.Interrupted("x", signal_number=2): 130,
    errors.Interrupted("x", signal_number=15): 143,
    errors.Interrupted("x", signal_number=1): 143,
    KeyboardInterrupt(): 130,
    Terminated(): 143,
    MemoryError(): 3,
    OSError(28, "No space left on device"): 3,
    FileNotFoundError(2, "No such file"): 3,
    BrokenPipeError(32, "a pipe that is not stdout"): 3,
    KeyError("x"): 1,
    AssertionError(): 1,
    RecursionError(): 1,
    SystemExit(): 0,
    SystemExit(7): 7,
    SystemExit("text"): 1,
}


def test_an_error_in_the_code_of_a_package_that_registers_something_names_the_package(capsys):
    registry, code = Registry("mechanism"), {"__name__": "far_away.mechanisms"}
    exec("def fail():\n    return 1 / 0", code)
    for told in ("a bug in guide: ZeroDivisionError", "the package 'far_away', which adds to guide, fails"):
        with pytest.raises(ZeroDivisionError) as raised:
            code["fail"]()
        assert main.report(raised.value) == main.BUG
        assert told in capsys.readouterr().err
        registry.add("farther", None, "far_away.mechanisms")
    registry.remove("farther")


@pytest.mark.parametrize(("error", "code"), EXPECTED.items(), ids=lambda v: type(v).__name__)
def test_every_class_of_exception_has_its_exit_code(error, code):
    assert main.exit_code(error) == code


def test_none_of_our_exception_classes_counts_as_a_bug():
    import pipelines.storage.manifest  # noqa: F401  defines more of our exceptions

    def with_subclasses(kind: type) -> set[type]:
        return {kind}.union(*map(with_subclasses, kind.__subclasses__()))

    for kind in with_subclasses(errors.GuideError) - {errors.GuideError, errors.Interrupted}:
        assert any(f"{base.__module__}.{base.__qualname__}" in main.CODES for base in kind.__mro__), kind


def test_an_out_of_memory_error_is_recognised_without_importing_torch():
    error = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})("CUDA out of memory. Tried …\nmore")
    assert main.exit_code(error) == 3
    assert main.describe(error, 3) == ("CUDA out of memory. Tried …", "use a smaller batch to need less memory")


def test_too_little_memory_for_torch_on_the_cpu_is_no_bug():
    text = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 16000 bytes."
    assert main.exit_code(RuntimeError(text)) == 3
    message, hint = main.describe(RuntimeError(text), 3)
    assert message == "not enough memory: 16,000 bytes were asked for"
    assert "smaller model" in hint
    assert main.exit_code(RuntimeError("Storage size calculation overflowed with sizes=[9, 9]")) == 3


def failing(monkeypatch, error: BaseException):
    def load_app():
        raise error

    monkeypatch.setattr(main, "load_app", load_app)


def test_an_expected_error_shows_its_message_and_hint_but_no_traceback(guide, monkeypatch):
    failing(monkeypatch, errors.InputError("no corpus", hint="make one"))
    answer = guide("x")
    assert (answer.code, answer.out, answer.err) == (2, "", "guide: no corpus\n  make one\n")


def test_a_bug_shows_its_traceback_and_asks_for_a_report(guide, monkeypatch):
    failing(monkeypatch, KeyError("oops"))
    answer = guide("x")
    assert answer.code == 1
    assert "Traceback" in answer.err
    assert "please report it" in answer.err


def test_debug_shows_the_traceback_of_an_expected_error(guide, monkeypatch):
    failing(monkeypatch, errors.InputError("no corpus"))
    assert "Traceback" in guide("x", "--debug").err


def test_with_json_an_error_is_one_object(guide, monkeypatch):
    failing(monkeypatch, errors.MachineError("disk\x1b[31m full", hint="buy one"))
    answer = guide("x", "--json")
    assert json.loads(answer.err) == {"code": 3, "message": "disk\x1b[31m full", "hint": "buy one"}
    assert "\x1b" not in answer.err


def test_messages_have_at_most_twenty_lines_and_no_control_characters(guide, monkeypatch):
    hint = "\n".join(f"line {n} \x1b]0;title\x07 \u202e" for n in range(100))
    failing(monkeypatch, errors.InputError("bad \x1b[2J\r\nname\x00\udcff", hint=hint))
    answer = guide("x")
    assert answer.err.startswith("guide: bad \\x1b[2J\\r\\nname\\x00\\udcff\n")
    assert len(answer.err.splitlines()) == 20
    assert all(c == "\n" or c.isprintable() for c in answer.err)


NINES = "9" * 5000


@pytest.mark.parametrize(
    "command",
    [
        ("pretrain", "x", "--steps", NINES),
        ("build-dataset", "a.csv", "--text-column", NINES, "--label-column", 2),
        ("build-dataset", "a.csv", "--text-column", "text", "--label-column", NINES),
        ("discover", "accept", "x", "--heads", NINES),
        ("discover", "accept", "x", "--heads", f"0.{NINES}"),
        ("patterns", "show", "window", "--option", f"size={NINES}"),
        ("patterns", "show", f"{{ or = ['next', {NINES}] }}"),
    ],
    ids=lambda command: " ".join(str(word)[:20] for word in command),
)
def test_numbers_of_thousands_of_digits_are_not_echoed(guide, command):
    Path("a.csv").write_text("text,label\nA word.,1\n")
    answer = guide(*command)
    assert answer.code == 2
    assert len(answer.err) < 1000
    assert "set_int_max_str_digits" not in answer.err
    assert answer.err.splitlines()[0].count("'") % 2 == 0, "quotes are closed"


def test_long_paths_are_shown_whole(guide, monkeypatch):
    path = "/".join(["x" * 250] * 4)
    failing(monkeypatch, errors.InputError(f"{path!r}: not there"))
    assert f"guide: {path!r}: not there" in guide("ls").err


def test_printable_text_of_any_script_is_not_escaped():
    assert escape("Ünïcode 漢字 العربية 😀 [x]") == "Ünïcode 漢字 العربية 😀 [x]"
    assert escape("a\u200bb\u2028c\td") == "a\\u200bb\\u2028c\\td"
