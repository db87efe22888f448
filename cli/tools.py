"""``guide convert``, ``guide models`` and ``guide doctor``."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from cli.options import Session, command, newest
from cli.tables import table
from guidance.errors import MachineError, counted

if TYPE_CHECKING:
    from pipelines.tools.doctor import Finding


@command(
    "convert",
    group="Train",
    examples=["guide convert ./old-bert ./old-bert-safetensors", "M=$(guide convert ./old-bert ./new-bert)"],
)
def convert_command(
    session: Session,
    folder: Annotated[Path, Argument(help="A model folder with pytorch_model.bin.")],
    out: Annotated[Path, Argument(help="The folder to write; it must not exist yet.")],
) -> None:
    """Copy a model folder, converting pickled weights to safetensors.

    A separate process reads the pickle; it accepts tensors and refuses everything else.
    """
    from pipelines.tools.convert import convert

    done = convert(folder, out)
    session.tell(f"done: {done['tensors']:,} tensors, {done['numbers']:,} numbers")
    if corpus := newest("corpus", session.store):  # sequences for a model are made with its tokenizer
        session.suggest(f"guide build-sequences {corpus} {shlex.quote(os.fspath(out))}")
    session.answer({"path": os.fspath(out), **done}, [out])


@command(
    "models",
    group="Help",
    examples=["guide models", "guide models --json | jq -r '.models[] | select(.supported) | .family'"],
)
def models(session: Session) -> None:
    """List the architectures that can be guided, each tested on a tiny model with the installed transformers."""
    import transformers

    from pipelines.tools.support import examine

    tested = examine()
    rows = [
        (
            row.family,
            row.model,
            row.attention,
            ", ".join(row.heads) or "-",
            f"no: {row.reason}" if row.reason else "yes",
        )
        for row in tested
    ]
    facts = [{**dataclasses.asdict(row), "supported": row.supported} for row in tested]
    session.answer(
        {"transformers": transformers.__version__, "models": facts},
        table(("FAMILY", "TESTED ON", "ATTENTION", "HEADS", "GUIDED"), rows),
    )
    session.tell(f"with transformers {transformers.__version__}")


@command(
    "doctor",
    group="Help",
    examples=["guide doctor", "guide doctor --json | jq '.findings[] | select(.state==\"bad\")'"],
)
def doctor(session: Session) -> None:
    """Check versions, extras, language models, devices and the store."""
    from pipelines.tools.doctor import examine

    findings = examine(session.store)
    bad = [finding for finding in findings if finding.state == "bad"]
    session.answer(
        {"ok": not bad, "findings": [dataclasses.asdict(finding) for finding in findings]}, _report(findings)
    )
    if bad:
        raise MachineError(
            f"{counted(len(bad), 'problem')} found",
            hint="\n".join(f"{finding.name}: {finding.detail}" for finding in bad),
        )


def _report(findings: list[Finding]) -> Iterator[str]:
    marks = {"ok": "ok ", "absent": " - ", "bad": "BAD"}
    for topic, group in itertools.groupby(findings, lambda finding: finding.topic):
        yield topic
        for finding in group:
            yield f"  {marks[finding.state]}  {finding.name:<18} {finding.detail}"
