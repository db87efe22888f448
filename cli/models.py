"""``guide models``."""

from __future__ import annotations

from cli.options import Session, command
from cli.output import say_json
from cli.tables import say_table


@command(
    "models",
    group="Help",
    examples=["guide models", "guide models --json | jq -r '.models[] | select(.supported) | .family'"],
)
def models(session: Session) -> None:
    """List the architectures that can be guided, each tested on a tiny model with the installed transformers."""
    import transformers

    from pipelines.tools.support import examine

    rows = examine()
    if session.json:
        found = [row.as_dict() for row in rows]
        say_json({"schema": 1, "transformers": transformers.__version__, "models": found})
        return
    table = [
        (
            row.family,
            row.model,
            row.attention,
            ", ".join(row.heads) or "-",
            f"no: {row.reason}" if row.reason else "yes",
        )
        for row in rows
    ]
    say_table(("FAMILY", "TESTED ON", "ATTENTION", "HEADS", "GUIDED"), table)
    session.tell(f"with transformers {transformers.__version__}")
