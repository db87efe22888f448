"""The data of the page: of a text file with one sentence a line each sentence is an example."""

from __future__ import annotations

from pathlib import Path

from pipelines.stages import corpus, discover_score, missing, sequences
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
from pipelines.text.line_layout import SAMPLE, has_sentence_lines
from pipelines.text.readers import format_of, open_text


def one_each(data: str, model: str, config: discover_score.Config, store: Store) -> tuple[str, discover_score.Config]:
    """Sequences of one sentence each, made with the tokenizer of a model, and how they are read; data that are no text file with one
    sentence a line stay as they are."""
    try:
        store.find(data)
    except ArtifactMissing:
        if not (Path(data).is_file() and _has_sentence_lines(data)):
            return data, config
    else:
        return data, config
    lines = corpus.Config(valid=0.0, documents="line", sentences="line")
    read = corpus.run([data], lines, store=store)
    assert read is not None, "only shards give None"
    length = missing.longest(model, config.sequence_length, store)
    sequences.check_length(length)
    settings = sequences.Config(max_length=length, packing="document")
    made = sequences.run(read.reference, model, settings, store=store)
    return made.reference, config.model_copy(update={"split": "train", "sequence_length": 0})


def _has_sentence_lines(name: str) -> bool:
    if format_of(name) != "text":
        return False
    with open_text(Path(name), name, "utf-8") as stream:
        text = stream.read(4 * SAMPLE).decode("utf-8", "ignore").removeprefix("\ufeff")
    return has_sentence_lines(text.replace("\r\n", "\n").replace("\r", "\n")[:SAMPLE])
