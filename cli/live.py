"""Commands that put trained models to work on lines of text and on files."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import Field
from typer import Argument, Option

from cli.arguments import Model
from cli.completion import artifacts
from cli.options import Session, command
from cli.output import check_output_path, say, say_texts
from cli.tables import table
from guidance.errors import InputError, counted
from pipelines import predictions
from pipelines.engine.stage import Config, Device, check_working_folder
from pipelines.lazy import pa, pq
from pipelines.storage.files import write_file
from pipelines.training.objectives.translation import Decoding

Row = dict[str, Any]
Parser = Annotated[str, Field(description="For plans that read syntax: the parser, as in `guide build-deps --parser`.")]


class TranslateConfig(Decoding):
    """How to translate."""

    batch_size: int = Field(
        32, ge=1, description="Lines of a file that are translated together; those of stdin are not."
    )
    parser: Parser = ""
    device: Device = "auto"


class FillConfig(Config):
    """How to fill in masks."""

    top: int = Field(5, ge=1, le=10_000, description="Number of tokens to show for each mask.")
    parser: Parser = ""
    device: Device = "auto"


@command(
    "translate",
    config=TranslateConfig,
    group="Train",
    examples=[
        "guide translate de-en sentences.de > sentences.en",
        "echo 'Ein Hund läuft.' | guide translate de-en",
        "tail -f log.de | guide translate ./opus-mt-de-en --beams 1 --json",
    ],
)
def translate_command(
    session: Session,
    config: TranslateConfig,
    model: Model,
    file: Annotated[str, Argument(help="A file with one text to a line; - for stdin.")] = "-",
) -> None:
    """Translate lines of text.

    Each line gets one line; an empty line stays empty.  From stdin, a line is translated and written as soon as it arrives.
    The model's plan is applied; what it reads of words is found in each line.  A line that is too long for the model is cut, which
    is said at the end.
    """
    from pipelines.stages.missing import text_words
    from pipelines.training.live_text import Translator, read_lines
    from pipelines.training.opening import find_folder

    check_working_folder()
    with ExitStack() as opened:
        stream = sys.stdin.buffer if file == "-" else opened.enter_context(_open(file))
        settings = config.model_dump(exclude={"batch_size", "parser"})
        folder = find_folder(model, session.store)
        # a line of parallel text is a sentence
        words = text_words(model, folder, config.parser, config.device, session.store, sentences="line")
        translator = Translator(folder, words=words, **settings)
        lines = read_lines(stream, _invite(session, file))
        size = 1 if file == "-" else config.batch_size
        while batch := list(itertools.islice(lines, size)):
            for line, translation in zip(batch, translator.translate(batch), strict=True):
                if session.json:
                    say_texts({"source": line, "translation": translation})
                else:
                    say(translation)
    if translator.cut:
        session.tell(
            f"warning: {counted(translator.cut, 'line was', 'lines were')} longer than the {translator.longest} tokens of the model, "
            "and cut"
        )


@command(
    "fill",
    config=FillConfig,
    group="Train",
    examples=[
        'guide fill guided "The old <mask> chased a cat."',
        'guide fill ./bert-base "Paris is the [MASK] of [MASK]." --top 3 --json',
        "guide fill guided --json < sentences.txt | jq -r '.masks[0][0].text'",
    ],
)
def fill_command(
    session: Session,
    config: FillConfig,
    model: Model,
    text: Annotated[str, Argument(help="A text with masks; - for texts from stdin, one to a line.")] = "-",
) -> None:
    """Let a masked language model fill in the masks of a text.

    A mask is written <mask> or [MASK].  Each mask has a table of its most likely tokens, with their probabilities and with the
    text that they make; other masks stay as they are.  With --json each text is one object.  From stdin, a line is answered as
    soon as it arrives.  The model's plan is applied; what it reads of words is found in the text with its masks.
    """
    from pipelines.stages.missing import text_words
    from pipelines.training.live_text import Filler, read_lines
    from pipelines.training.opening import find_folder

    check_working_folder()
    folder = find_folder(model, session.store)
    words = text_words(model, folder, config.parser, config.device, session.store)
    filler = Filler(folder, config.device, words=words)
    tell_once = cache(session.tell)
    texts = [text] if text != "-" else read_lines(sys.stdin.buffer, _invite(session, text))
    for number, line in enumerate(texts, 1):
        try:
            if text == "-" and not line.strip():
                tell_once("an empty line has an empty answer")
                masks = []
            else:
                masks = filler.fill(line, config.top)
        except InputError as error:
            if text == "-":
                error.message = f"stdin, line {number}: {error.message}"
            raise
        if number > 1 and not session.json:
            say()
        rows = [
            (str(number), f"{candidate.score:.4f}", candidate.token, candidate.text)
            for number, mask in enumerate(masks, 1)
            for candidate in mask
        ]
        session.answer(
            {"text": line, "masks": [[vars(candidate) for candidate in mask] for mask in masks]},
            table(("mask", "score", "token", "text"), rows, whole=("mask", "score", "token")),
            of_texts=True,
        )


class GenerateConfig(Config):
    """How to continue a prompt."""

    max_new_tokens: int = Field(40, ge=1, description="Most tokens to write.")
    strength: float = Field(1.0, gt=0, le=1, description="Strength of the rows of --plan; 1 is as the plan says.")
    beams: int = Field(1, ge=1, le=1000, description="Beams of the beam search; 1 is greedy search.")
    sample: bool = Field(False, description="Draw each token at random, by its probability.")
    temperature: float = Field(1.0, gt=0, description="For --sample: below 1 likely tokens become likelier.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="For --sample: draw from the most likely tokens that together have this probability.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="For --sample: seed of the random numbers.")
    device: Device = "auto"


@command(
    "generate",
    config=GenerateConfig,
    group="Train",
    examples=[
        'guide generate small-llama "The value of"',
        'guide generate ./llama "Answer in French. <<Be brief.>> What is a cat?" --plan preset:pasta --strength 0.5',
        "guide generate ./llama --plan steer.toml --mark 'Be brief.' --json < prompts.txt | jq -r .text",
    ],
)
def generate_command(
    session: Session,
    config: GenerateConfig,
    model: Model,
    text: Annotated[str, Argument(help="A prompt; - for prompts from stdin, one to a line.")] = "-",
    plan: Annotated[
        str | None,
        Option(
            help="A plan that steers the model: preset:NAME, a TOML file, or findings of `guide discover accept`; by default the model's own."
        ),
    ] = None,
    scores: Annotated[
        Path | None,
        Option(
            help="JSON, CSV or Parquet file with columns layer, head and score, for plans that choose heads by score."
        ),
    ] = None,
    mark: Annotated[
        list[str] | None,
        Option(help="Text to mark wherever it stands in a prompt (repeatable); <<so>> marks one place."),
    ] = None,
) -> None:
    """Continue a prompt with a causal language model, and steer its attention to what is marked in the prompt.

    Mark a part of the prompt with << and >>, or with --mark.  The rows of --plan act while the model reads the prompt and while it
    writes; their pattern `marked` names the marked tokens.  `preset:pasta` multiplies the attention to all other tokens of the
    prompt by 0.01 before each row is normalised.  Only the continuation is printed.  With --json each prompt is one object, with its marks.
    """
    from guidance.prompts import Prompt
    from pipelines.stages.missing import looked_up
    from pipelines.statistics.head_scores import read_scores
    from pipelines.training.live_text import read_lines
    from pipelines.training.opening import find_folder
    from pipelines.training.plans import read_plan
    from pipelines.training.steering import Writer
    from pipelines.training.text_words import TextWords

    check_working_folder()
    if not config.sample and (config.temperature != 1 or config.top_p != 1 or config.seed):
        raise InputError("--temperature, --top-p and --seed are for --sample", hint="add --sample")
    if plan is None and (config.strength != 1 or scores is not None):
        unused = "--strength is" if scores is None else "--scores are"
        raise InputError(f"{unused} for the rows of --plan", hint="--plan preset:pasta")
    folder = find_folder(model, session.store)
    writer = Writer(
        folder,
        None if plan is None else read_plan(plan, session.store),
        strength=config.strength,
        scores=None if scores is None else read_scores(scores),
        device=config.device,
        called=plan or "",
        words=TextWords(tables=looked_up(model, folder, session.store)),
    )
    if mark and not writer.reads_marks():
        raise InputError("--mark, and no guide looks at what is marked", hint="--plan preset:pasta")
    tell_once = cache(session.tell)
    search: dict[str, Any] = {"num_beams": config.beams, "do_sample": config.sample}
    if config.sample:
        import torch

        torch.manual_seed(config.seed)
        search |= {"temperature": config.temperature, "top_p": config.top_p, "top_k": 0}
    for number, line in enumerate([text] if text != "-" else read_lines(sys.stdin.buffer, _invite(session, text)), 1):
        if text == "-" and not line.strip():
            tell_once("an empty line has an empty answer")
            say_texts({"prompt": line, "marked": [], "text": ""}) if session.json else say()
            continue
        if not writer.reads_marks() and Prompt.has_marks(line):
            tell_once(
                "no guide looks at what is marked, so << and >> are read as text; --plan preset:pasta steers by them"
            )
        try:
            prompt = Prompt.parse(line, mark or ()) if writer.reads_marks() else Prompt(line)
            written = writer.write(prompt, max_new_tokens=config.max_new_tokens, tell=tell_once, **search)
        except InputError as error:
            if text == "-":
                error.message = f"stdin, line {number}: {error.message}"
            raise
        if session.json:
            say_texts({"prompt": prompt.text, "marked": [prompt.text[a:b] for a, b in prompt.marked], "text": written})
        else:
            say(written)


def _open(file: str) -> BinaryIO:
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise InputError(f"{file!r}: cannot be read ({os.strerror(error.errno or 0)})") from error


def _invite(session: Session, *files: str) -> str:
    """The name of the first input in messages; says on a terminal that it waits for lines."""
    if "-" in files and sys.stdin.isatty():
        session.tell("reading lines from the terminal; Ctrl-D ends")
    return "stdin" if files[0] == "-" else repr(files[0])


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
    _invite(session, *sources)
    rows = predictions.predict(
        model, sources, config, store=session.store, stdin=sys.stdin.buffer, progress=session.progress
    )
    if out is None:
        for row in rows:
            say_texts(row)
    else:
        write_file(out, _WRITERS[out.suffix.lower()](rows))
        session.tell(f"wrote {out}")


def _json_lines(rows: Iterable[Row]) -> bytes:
    return _text(json.dumps(row, ensure_ascii=False) for row in rows)


def _parquet(rows: Iterable[Row]) -> bytes:
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
