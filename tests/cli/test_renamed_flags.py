"""A flag can be renamed: the field, the recipe, and the old flag, variable and key stay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pydantic import Field

from cli.app import app
from cli.main import load_app
from cli.options import Session, stage_command
from pipelines.engine.declaration import Stage
from pipelines.engine.stage import Config, Result, run_stage
from pipelines.storage.store import Store


class RenamedConfig(Config):
    source: str = Field("", description="Where from.", json_schema_extra={"flag": "source-run"})
    size: int = Field(3, gt=0, description="How many.", json_schema_extra={"flag": "number"})


STAGE = Stage("try-it", "trial", 1, RenamedConfig, lambda run: run.out.write_json("config.json", run.config.recipe()))


@pytest.fixture
def trial(guide: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`guide try-it`: gives the recipe that it was called with, or what it said when it failed."""

    @stage_command("try-it", RenamedConfig, examples=["guide try-it"])
    def try_it(session: Session, config: RenamedConfig) -> Result:
        """Try it."""
        return run_stage(STAGE, config, {}, **session.options())

    def call(*arguments: object) -> Any:
        answer = guide("try-it", "--quiet", *arguments)
        if answer.code:
            return answer.err
        return json.loads(Store(Path("artifacts")).load(answer.out.strip()).read("config.json"))

    yield call
    app.registered_commands = [c for c in app.registered_commands if c.name != "try-it"]


def test_the_new_flag_and_the_old_flag_set_the_field(trial: Callable[..., Any]) -> None:
    assert trial("--source-run", "x", "--number", 4) == {"source": "x", "size": 4}
    assert trial("--source", "x", "--size", 4) == {"source": "x", "size": 4}


def test_the_new_variable_and_the_old_variable_are_read(
    trial: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUIDE_SOURCE", "old")
    assert trial()["source"] == "old"
    monkeypatch.setenv("GUIDE_SOURCE_RUN", "new")
    assert trial()["source"] == "new"


@pytest.mark.parametrize("key", ["source", "source-run", "source_run"])
def test_the_new_key_and_the_old_key_of_the_settings_file_are_read(trial: Callable[..., Any], key: str) -> None:
    Path("guide.toml").write_text(f'[try-it]\n{key} = "toml"\n')
    assert trial()["source"] == "toml"
    assert trial("--source-run", "flag")["source"] == "flag"


def test_an_unknown_key_is_refused_with_the_new_name(trial: Callable[..., Any]) -> None:
    Path("guide.toml").write_text('[try-it]\nsource-rum = "toml"\n')
    assert "source-run" in trial()


def test_errors_name_the_new_flag(trial: Callable[..., Any]) -> None:
    assert "--number: input should be greater than 0, not 0" in trial("--size", 0)


def test_the_help_shows_only_the_new_flag(guide: Callable[..., Any]) -> None:
    load_app()
    text = guide("pretrain", "--help").out
    assert "--masking-run <str>" in text and "--masking <" not in text and "--masking," not in text
    option = next(p for p in typer.main.get_command(app).commands["pretrain"].params if p.name == "masking")
    assert set(option.opts) == {"--masking-run", "--masking"}
