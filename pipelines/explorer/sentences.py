"""What examples the page has: if a text file has one sentence a line, each sentence is an example."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipelines.stages import corpus, discover_score, missing
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
from pipelines.text.line_layout import SAMPLE, beginning, has_sentence_lines
from pipelines.text.readers import format_of, open_text
from pipelines.training.opening import find_folder


def one_each(data: str, model: str, config: discover_score.Config, store: Store) -> tuple[str, discover_score.Config]:
    """The sequences that the page reads, and the settings with which it reads them.  A text file with one sentence a line becomes
    sequences of one sentence each, in tokens of the model; all other data and their settings are returned as they are."""
    with suppress(ArtifactMissing):
        store.find(data)
        return data, config
    if not (Path(data).is_file() and _has_sentence_lines(data)):
        return data, config
    lines = corpus.Config(valid=0.0, documents="line", sentences="line")
    read = corpus.run([data], lines, store=store)
    assert read is not None, "only shards give None"
    folder = find_folder(model, store)
    made, config = missing.read_by(model, folder, read.artifact, config, store, None, packing="document")
    made.close()
    return made.reference, config.model_copy(update={"split": "train", "sequence_length": 0, "parser": ""})


def _has_sentence_lines(name: str) -> bool:
    """Whether a file is text with one sentence a line, and has several lines: a single one is one example anyhow."""
    if format_of(name) != "text":
        return False
    with open_text(Path(name), name, "utf-8") as stream:
        return has_sentence_lines(beginning(stream.read(4 * SAMPLE), "utf-8"), fewest=2)
