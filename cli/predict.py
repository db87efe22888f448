"""``guide predict``."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from cli.completion import artifacts
from cli.options import Session, command
from cli.output import check_output_path, say_json
from guidance.errors import InputError
from pipelines import predictions
from pipelines.engine.stage import check_working_folder
from pipelines.storage.files import write_file

Row = dict[str, Any]


@command(
    "predict",
    config=predictions.Config,
    group="Train",
    examples=[
        "guide predict reviews-model new.csv > answers.jsonl",
        "echo 'a fine film' | guide predict reviews-model | jq -r .prediction",
        "guide predict ner-model sentences.txt --out tagged.conll",
        "guide predict summariser papers.jsonl | jq -r '.summary[]'",
        "guide predict rte-model RTE/test.tsv --format glue-rte --out submission/RTE.tsv",
    ],
)
def predict_command(
    session: Session,
    config: Any,
    model: Annotated[
        str, Argument(help="A model of a task: a name, name@n, an id, or a folder.", autocompletion=artifacts("model"))
    ],
    files: Annotated[list[str] | None, Argument(help="Files, folders, patterns; - for stdin.")] = None,
    out: Annotated[
        Path | None,
        Option(
            help="File to write to, instead of stdout: .jsonl, .parquet, .tsv (index and prediction, as for GLUE), or .conll (tags)."
        ),
    ] = None,
) -> None:
    """Say what a fine-tuned model predicts for each example of some files, as JSON lines.

    No labels are needed.  A text file has an example on each line, with a tab before the second text of a pair; for a tagger
    the words of a sentence are parted by spaces; to summarise, a file is a document, and to find topics a document with a
    sentence on each line.  Tables and JSON lines are read as by `guide build-dataset`.  The model's plan is applied.
    """
    check_working_folder()
    check_output_path(out, "--out", *_WRITERS)
    sources = files or ["-"]
    if "-" in sources and sys.stdin.isatty():
        session.tell("reading lines from the terminal; Ctrl-D ends")
    rows = predictions.predict(
        model, sources, config, store=session.store, stdin=sys.stdin.buffer, progress=session.progress
    )
    if out is None:
        for row in rows:
            say_json(row)
    else:
        write_file(out, _WRITERS[out.suffix.lower()](rows))
        session.tell(f"wrote {out}")


def _json_lines(rows: Iterable[Row]) -> bytes:
    return _text(json.dumps(row, ensure_ascii=False) for row in rows)


def _parquet(rows: Iterable[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), file, compression="zstd")
    return file.getvalue()


def _tsv(rows: Iterable[Row]) -> bytes:
    lines = ["index\tprediction"]
    for row in rows:
        if "prediction" not in row:
            raise InputError("--out .tsv holds one prediction for each example", hint="--out FILE.jsonl")
        lines.append(f"{row['id']}\t{row['prediction']}")
    return _text(lines)


def _conll(rows: Iterable[Row]) -> bytes:
    lines: list[str] = []
    for row in rows:
        if "tags" not in row:
            raise InputError("--out .conll is for taggers", hint="--out FILE.jsonl")
        lines += [f"{word}\t{tag}" for word, tag in zip(row["words"], row["tags"], strict=True)] + [""]
    return _text(lines)


def _text(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


_WRITERS: dict[str, Callable[[Iterable[Row]], bytes]] = {
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".tsv": _tsv,
    ".conll": _conll,
}
"""By the ending of the file."""
