"""Flags, environment and guide.toml all come from a stage's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field, model_validator

from cli import options
from cli.app import app
from cli.flags import field_parameters, flag_type
from cli.options import Session, command, stage_command
from pipelines.engine.declaration import Stage
from pipelines.engine.stage import Config, Result, run_stage
from pipelines.storage.store import Store


class ShowConfig(Config):
    max_length: int = Field(128, ge=8, le=512, description="Longest.")
    mode: Literal["fast", "slow"] = Field("fast", description="How.")
    rate: float | None = Field(None, gt=0, description="Rate.")
    lower: bool = Field(True, description="Lower case.")
    words: tuple[str, ...] = Field(("a", "b"), description="Words.")
    steps: int | Literal["auto"] = Field("auto", description="Steps.")

    @model_validator(mode="after")
    def _sensible(self):
        if self.mode == "slow" and self.lower:
            raise ValueError("slow needs --no-lower")
        return self


def _build(run):
    run.out.write_json("config.json", run.config.model_dump())
    if run.config.max_length == 8:
        run.warn("short")


STAGE = Stage("try-it", "trial", 1, ShowConfig, _build)


@pytest.fixture
def trial(guide):
    """`guide try-it`, a command that writes its configuration; returns the answer, with that configuration."""

    @stage_command("try-it", ShowConfig, examples=["guide try-it text"], next_command="guide show {}")
    def try_it(session: Session, config: ShowConfig, text: Annotated[str, typer.Argument(help="Text.")]) -> Result:
        """Try it."""
        return run_stage(STAGE, config, {}, **session.options())

    def call(*arguments, store="artifacts"):
        answer = guide("try-it", "text", *arguments)
        answer.config = None
        if answer.code == 0:
            reference = json.loads(answer.out)["artifact"] if answer.out.startswith("{") else answer.out.strip()
            answer.config = json.loads(Store(Path(store)).load(reference).read("config.json"))
        return answer

    yield call
    app.registered_commands = [c for c in app.registered_commands if c.name != "try-it"]


def test_stdout_has_the_reference_and_stderr_everything_else(trial):
    answer = trial()
    assert answer.out.startswith("trial/")
    assert answer.out.count("\n") == 1
    assert "done: " in answer.err
    assert f"next: guide show {answer.out.strip()}" in answer.err
    assert "up to date" in trial().err
    assert trial("-q").err == ""


def test_quiet_leaves_warnings_and_those_of_an_artifact_that_is_up_to_date(trial):
    for _ in range(2):
        answer = trial("--max-length", 8, "-q")
        assert [line.split(": ")[-1] for line in answer.err.splitlines()] == ["short"]


def test_with_json_stdout_has_one_object(trial):
    answer = json.loads(trial("--json", "--name", "mine").out)
    assert answer["schema"] == 1
    assert answer["artifact"].startswith("trial/")
    assert (answer["kind"], answer["name"], answer["reused"], answer["warnings"]) == ("trial", "mine@1", False, [])


def test_flags_of_every_type_reach_the_configuration(trial):
    flags = ["--max-length", 64, "--mode", "slow", "--rate", 0.5, "--no-lower", "--words", "x", "--words", "y"]
    expected = {"max_length": 64, "mode": "slow", "rate": 0.5, "lower": False, "words": ["x", "y"], "steps": 7}
    assert trial(*flags, "--steps", 7).config == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-length", "3"], "--max-length: input should be greater than or equal to 8, not 3"),
        (["--max-length", "abc"], "--max-length"),
        (["--mode", "other"], "'fast', 'slow'"),
        (["--max-length", "9" * 20], "--max-length: the number is too large"),
        (["--max-length", "9" * 400], "--max-length: the number is too large"),
        (["--max-length", "9" * 5000], "--max-length"),
        (["--rate", "9" * 400], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "-1"], "--rate"),
        (["--steps", "some"], "--steps"),
        (["--mode", "slow"], "slow needs --no-lower"),
        (["--max-lenght", "9"], "--max-lenght"),
        (["extra"], "extra"),
        (["--name", "../x"], "bad name"),
        (["--name", "con"], "bad name"),
    ],
)
def test_a_wrong_value_is_a_usage_error_that_names_the_flag(trial, flags, message):
    answer = trial(*flags)
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err) < 1000
    assert answer.out == ""
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("fsat", "'fsat' is not one of 'fast', 'slow'; did you mean 'fast'?"),
        ("SLOW", "'SLOW' is not one of 'fast', 'slow'; did you mean 'slow'?"),
        ("other", "'other' is not one of 'fast', 'slow'"),
    ],
)
def test_a_wrong_choice_is_named_once_with_the_choices_and_the_nearest_of_them(trial, monkeypatch, mode, said):
    assert trial("--mode", mode).err.splitlines()[0] == f"guide: --mode: {said}"
    monkeypatch.setenv("GUIDE_MODE", mode)
    assert trial().err.splitlines()[0] == f"guide: GUIDE_MODE: {said}"


def test_flags_override_the_environment_which_overrides_the_file_which_overrides_defaults(trial, monkeypatch):
    assert trial().config["max_length"] == 128
    Path("guide.toml").write_text('[try-it]\nmax-length = 32\nwords = ["toml"]\nlower = false\nrate = 2\n')
    assert trial().config | {"mode": "", "steps": ""} == {
        "max_length": 32, "words": ["toml"], "lower": False, "rate": 2.0, "mode": "", "steps": "",
    }  # fmt: skip
    monkeypatch.setenv("GUIDE_MAX_LENGTH", "64")
    monkeypatch.setenv("GUIDE_WORDS", "one two")
    assert trial().config["max_length"] == 64
    assert trial().config["words"] == ["one", "two"]
    assert trial("--max-length", 99, "--words", "flag").config["max_length"] == 99


def test_the_store_comes_from_the_flag_the_environment_or_the_file(trial, guide, monkeypatch):
    Path("guide.toml").write_text('store = "from-file"\n')
    trial(store="from-file")
    monkeypatch.setenv("GUIDE_STORE", "from-environment")
    trial(store="from-environment")
    trial("--store", "from-flag", store="from-flag")
    assert guide("--store", "before", "try-it", "text").code == 0
    assert all(Path(name, "trial").is_dir() for name in ("from-file", "from-environment", "from-flag", "before"))
    assert not Path("artifacts").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ten", "input should be a valid integer, not 'ten'"),
        ("3", "input should be greater than or equal to 8, not 3"),
    ],
)
def test_a_wrong_value_names_the_place_it_came_from_and_says_what_is_right(trial, monkeypatch, value, message):
    answer = trial("--max-length", value)
    assert f"--max-length: {message}" in answer.err
    assert "Longest." in answer.err and "≥ 8, ≤ 512" in answer.err
    Path("guide.toml").write_text(f'[try-it]\nmax-length = "{value}"\n')
    answer = trial()
    assert (answer.code, message in answer.err) == (2, True)
    assert "'guide.toml', [try-it] max-length" in answer.err
    monkeypatch.setenv("GUIDE_MAX_LENGTH", value)
    answer = trial()
    assert (answer.code, message in answer.err) == (2, True)
    assert "GUIDE_MAX_LENGTH" in answer.err and "guide.toml" not in answer.err


def test_an_error_of_the_work_names_where_its_values_were_given(guide, monkeypatch):
    monkeypatch.setenv("GUIDE_SCORES", "nowhere.csv")
    assert "GUIDE_" not in guide("plan", "check", "preset:nothing").err
    monkeypatch.setenv("GUIDE_STORE", "far/away")
    answer = guide("show", "nothing")
    assert (answer.code, "--store was given by GUIDE_STORE" in answer.err) == (2, True)
    monkeypatch.delenv("GUIDE_STORE")
    Path("guide.toml").write_text('store = "from-file"\n')
    assert "--store was given by 'guide.toml', store" in guide("show", "nothing").err


def test_an_error_about_something_else_does_not_name_where_the_store_was_given(trial, guide, monkeypatch):
    monkeypatch.setenv("GUIDE_STORE", "no")  # two letters that many words have
    answer = guide("plan", "check", "preset:nothing")
    assert answer.code == 2 and "nothing" in answer.err and "GUIDE_STORE" not in answer.err
    monkeypatch.setenv("GUIDE_STORE", "far/away")
    trial(store="far/away")
    manifest = next(Path("far/away/trial").glob("*/artifact.json"))
    manifest.write_text("{}")
    answer = guide("show", str(manifest.parent))
    assert answer.code == 2 and "it is not a manifest" in answer.err and "GUIDE_STORE" not in answer.err


@pytest.mark.parametrize("place", ["flag", "before", "environment"])
def test_a_store_whose_path_is_not_utf_8_is_refused(guide, monkeypatch, place):
    arguments = ["ls"]
    if place == "environment":
        monkeypatch.setenv("GUIDE_STORE", "caf\udce9")
    else:
        arguments = ["ls", "--store", "caf\udce9"] if place == "flag" else ["--store", "caf\udce9", "ls"]
    answer = guide(*arguments)
    assert (answer.code, "--store" in answer.err, "not UTF-8" in answer.err) == (2, True, True), answer.err
    assert ("GUIDE_STORE" in answer.err) == (place == "environment")


def test_a_variable_that_resembles_a_setting_causes_a_warning(trial, guide, monkeypatch):
    monkeypatch.setenv("GUIDE_MAXLENGTH", "32")
    monkeypatch.setenv("GUIDE_FOR_HITCHHIKERS", "42")  # of another program
    answer = guide("try-it", "text")
    assert answer.code == 0
    assert "warning: GUIDE_MAXLENGTH is not read; did you mean GUIDE_MAX_LENGTH?" in answer.err
    assert "HITCHHIKERS" not in answer.err
    monkeypatch.setenv("GUIDE_MAX_LENGTH", "32")
    assert trial().config["max_length"] == 32


def test_config_may_come_before_or_after_the_command(trial, guide):
    Path("guide.toml").write_text("broken")
    Path("other.toml").write_text("[try-it]\nmax-length = 32\n")
    assert trial("--config", "other.toml").config["max_length"] == 32
    assert guide("--config", "other.toml", "try-it", "text").code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[try-it]\nmax-lenght = 3", "unknown setting of try-it 'max-lenght'; did you mean 'max-length'?"),
        (b"[tryit]\nmax-length = 30", "unknown table 'tryit'; did you mean 'try-it'?"),
        (b"stroe = 'x'", "did you mean 'store'?"),
        (b"[ls.deeper]\nx = 1", "unknown setting of ls 'deeper'"),
        (b"[try-it]\nmax-length = 'abc'", "--max-length"),
        (b"[try-it]\nmax-length = {}", "--max-length"),
        (b"[try-it]\nwords = 'one'", "[try-it] words: not a list"),
        (b"[try-it]\nlower = 'perhaps'", "lower"),
        (b"[try-it]\nmode = 1979-05-27", "mode"),
        (b"[try-it]\nmax-length = " + b"9" * 5000, "'guide.toml': a number has too many digits"),
        (b"[try-it]\nmax-length = 0x" + b"f" * 5000, "[try-it] max-length: the number is too large"),
        (b"[try-it]\nmax-length = true", "[try-it] max-length: true and false are for flags that are on or off"),
        (b"[try-it]\nrate = true", "[try-it] rate: true and false are for flags"),
        (b"[try-it]\nmax-length = 9.5", "max-length"),
        (b"not toml", "not TOML"),
        (b"\xff\xfe", "not TOML"),
        (b"x = " + b"[" * 100_000, "nested too deeply"),
        (b"#" * ((1 << 20) + 1), "larger than 1 MB"),
    ],
    ids=range(18),
)
def test_a_bad_settings_file_is_refused_and_named(trial, text, message):
    Path("guide.toml").write_bytes(text)
    answer = trial()
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.splitlines()) <= 20


def test_a_settings_file_that_is_missing_or_not_a_file_is_refused(trial):
    Path("folder").mkdir()
    for name in ("missing.toml", "folder", "/dev/zero"):
        assert trial("--config", name).code == 2


def test_help_works_with_a_broken_settings_file(guide):
    Path("guide.toml").write_text("broken")
    assert guide("ls", "--help").code == 0


def test_defining_a_command_fails_if_a_field_cannot_become_a_flag():
    with pytest.raises(TypeError, match="no flag"):
        flag_type(dict[str, int])

    class Clash(Config):
        store: str = "x"

    with pytest.raises(ValueError, match="two parameters"):
        stage_command("clash", Clash, examples=["guide clash"])(lambda session, config: None)
    with pytest.raises(ValueError, match="no examples"):
        command("clash", group="Help", examples=[])


def test_defaults_and_descriptions_are_read_from_the_configuration():
    parameters = {p.name: p for p in field_parameters(ShowConfig)}
    assert parameters["max_length"].default == ShowConfig().max_length
    assert options.typing.get_args(parameters["max_length"].annotation)[1].help == "Longest.  [≥ 8, ≤ 512]"


@pytest.mark.parametrize("key", ["ascii", "only-ascii", "only_ascii"])
def test_a_key_of_the_file_is_the_flag_or_the_name_that_it_had_before(guide, key):
    Path("guide.toml").write_text(f"[patterns.show]\n{key} = true\n")
    assert guide("patterns", "show", "next").out.isascii()
