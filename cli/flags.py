"""Turns the ``Config`` of a stage into flags, and values of flags into a ``Config``."""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from cli.app import parameter
from cli.completion import SETTINGS
from guidance.errors import InputError
from pipelines.engine.stage import is_internal

MOST_CHOICES = 12
"""Values of a flag that its help lists before the description; what has more lists them in the description."""


def field_parameters(config: type[BaseModel]) -> list[inspect.Parameter]:
    """One keyword parameter per field, annotated for Typer."""
    parameters = []
    for name, field in config.model_fields.items():
        if is_internal(field):
            continue
        annotation = flag_type(field.annotation)
        default = field.get_default(call_default_factory=True)
        if isinstance(default, (tuple, set, frozenset)):
            default = list(default)
        names = list(
            dict.fromkeys((flag_name(name, field), name.replace("_", "-")))
        )  # a renamed flag keeps its old name
        option = typer.Option(
            *(f"--{flag}" for flag in names if len(names) > 1),
            help=_field_help(field),
            envvar=[f"GUIDE_{flag.upper().replace('-', '_')}" for flag in names],
            show_envvar=False,
            show_default=default is not None,
            metavar="<name>" if _number_of_choices(annotation) > MOST_CHOICES else None,
            autocompletion=SETTINGS.get(name),
        )
        default = inspect.Parameter.empty if default is PydanticUndefined else default
        parameters.append(parameter(name, annotation, option, default))
    return parameters


def _number_of_choices(annotation: Any) -> int:
    kinds = [annotation, *typing.get_args(annotation)]
    return max((len(typing.get_args(kind)) for kind in kinds if typing.get_origin(kind) is Literal), default=0)


def flag_name(name: str, field: Any) -> str:
    """The flag of a field, without dashes in front: its name, or ``flag`` in its ``json_schema_extra``.

    A field keeps its name when its flag is renamed, because the name is part of the recipe.
    """
    return str((field.json_schema_extra or {}).get("flag", name.replace("_", "-")))


def flag_type(annotation: Any) -> Any:
    """The type of a flag for the type of a field; pydantic validates the value again."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return flag_type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        kept = [argument for argument in arguments if argument is not type(None)]
        inner = flag_type(kept[0]) if len(kept) == 1 else str
        return inner | None if len(kept) < len(arguments) else inner
    if origin in (list, tuple, set, frozenset):
        return list[flag_type(arguments[0])]  # type: ignore[misc]
    if origin is Literal:
        return annotation if all(isinstance(choice, str) for choice in arguments) else str
    if annotation in (bool, int, float, str, Path):
        return annotation
    raise TypeError(f"no flag for a field of type {annotation}")


def make_config(config: type[BaseModel], values: dict[str, Any]) -> Any:
    """An instance of the configuration.  Raises InputError if a value is invalid; the message names its flag, and the hint
    says what the flag means."""
    try:
        return config(**values)
    except ValidationError as error:
        problems, hints = [], []
        for problem in error.errors(include_url=False):
            message = problem["msg"].removeprefix("Value error, ")
            if problem["loc"]:
                name = str(problem["loc"][0])
                field = config.model_fields.get(name)
                flag = "--" + (flag_name(name, field) if field else name.replace("_", "-"))
                hints += [f"{flag}: {_field_help(field)}"] if field else []
                message = f"{flag}: {message[:1].lower()}{message[1:]}, not {problem['input']!r}"
            problems.append(message)
        raise InputError("; ".join(dict.fromkeys(problems)), hint="\n".join(dict.fromkeys(hints)) or None) from error


def _field_help(field: Any) -> str:
    """The description of a field, and its allowed range."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = {
        sign: limit
        for rule in field.metadata
        for key, sign in signs.items()
        if (limit := getattr(rule, key, None)) is not None
    }
    shown = ", ".join(f"{sign} {limit}" for sign, limit in limits.items())
    return (field.description or "") + (f"  [{shown}]" if limits else "")
