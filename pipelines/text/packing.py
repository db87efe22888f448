"""Sequences of running text, ``build-sequences --packing full-sentences`` or ``document``: whole sentences of a corpus.

Numpy works over tokens, a plain loop over sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from guidance.errors import InputError
from pipelines.engine.stage import Run
from pipelines.storage.artifacts import Artifact
from pipelines.text.corpus_files import SPLITS, read_blocks
from pipelines.text.encoding import BLOCK_COLUMNS, Encoder, Tokens, batches_of
from pipelines.text.sequence_files import Counts, Packed, counts_of_splits, lay_out, sequence_schema, write_sequences


def build(run: Run) -> None:
    """Write the text of a corpus as sequences; see `pipelines.stages.sequences.build`."""
    corpus: Artifact = run.inputs["corpus"]
    encoder, counts = Encoder(run.inputs["tokenizer"]), counts_of_splits()
    empty = InputError(f"{corpus.reference} has no text that this tokenizer turns into tokens")
    of_text = Counter[str]()
    sequences = _sequences(run, corpus, encoder, counts, of_text)
    write_sequences(run, {"tokenizer": encoder}, sequence_schema(), sequences, counts, empty)
    if words := corpus.counts.get("words"):
        run.out.counts["tokens_per_word"] = round(of_text.total() / words, 2)


def _sequences(
    run: Run, corpus: Artifact, encoder: Encoder, counts: Counts, of_text: Counter[str]
) -> Iterator[tuple[str, Packed, list[Any]]]:
    """Some sequences of a split at a time; ``of_text`` counts the tokens of each split that are not special."""
    crosses, packers = run.config.packing == "full-sentences", dict[str, Packer]()
    with run.progress.task("sequences", total=corpus.counts.get("characters") or None, unit="chars") as bar:
        for blocks, encodings in _encoded_ahead(encoder, corpus):
            tokens, sizes = encoder(blocks, encodings)
            del encodings
            splits = np.repeat(np.array([SPLITS.index(split) for split in blocks["split"]], np.int8), sizes)
            for number, split in enumerate(SPLITS):
                chosen = splits == number
                if not chosen.any():
                    continue
                of_text[split] += int(chosen.sum())
                if split not in packers:
                    packers[split] = Packer(run.config.max_length, encoder.begin, encoder.separator, crosses)
                if packed := packers[split].add(tokens if chosen.all() else tokens.at(chosen)):
                    yield split, packed, []
            bar.advance(sum(map(len, blocks["text"])))
        for split, packer in packers.items():
            if packed := packer.flush():
                yield split, packed, []
            counts[split]["cut_sentences"] = packer.cut


def _encoded_ahead(encoder: Encoder, corpus: Artifact) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Blocks with their encodings.  The next ones are encoded in a thread meanwhile; the tokenizer releases the GIL."""
    batches = (b for part in read_blocks(corpus, BLOCK_COLUMNS, batch=4096) for b in batches_of(part))

    def encode() -> tuple[dict[str, Any], list[Any]] | None:
        blocks = next(batches, None)
        return None if blocks is None else (blocks, encoder.encode(blocks))

    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(encode)
        while (ready := waiting.result()) is not None:
            waiting = pool.submit(encode)
            yield ready
            del ready


@dataclass
class Packer:
    """Packs the sentences of one split: call `add` for each batch, then `flush`.

    Attributes:
        length: maximum number of tokens in a sequence, including its first and last special token.
        begin, separator: ids of the first and the last token of each sequence.  The separator also stands between two
            documents.
        cross_documents: whether a sequence may continue in the next document.
        cut: number of sentences so far that were longer than a sequence and were cut into pieces.
    """

    length: int
    begin: int
    separator: int
    cross_documents: bool
    cut: int = 0
    _pending: Tokens | None = None

    def add(self, tokens: Tokens) -> Packed | None:
        """Take more tokens and return the sequences that are now full, if any.

        Each call must end at the end of a sentence.
        """
        if self._pending is not None:
            tokens = Tokens(*(np.concatenate(pair) for pair in zip(self._pending, tokens, strict=True)))
            self._pending = None
        return self._pack(tokens, last=False)

    def flush(self) -> Packed | None:
        """The last sequences, the very last one perhaps not full."""
        pending, self._pending = self._pending, None
        return self._pack(pending, last=True) if pending is not None else None

    def _pack(self, tokens: Tokens, *, last: bool) -> Packed | None:
        total = len(tokens.id)
        if not total:
            return None
        capacity = self.length - 2
        changes = (np.diff(tokens.document) != 0) | (np.diff(tokens.sentence) != 0)
        firsts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        lengths = np.diff(firsts, append=total)
        documents = tokens.document[firsts]
        long = np.flatnonzero(lengths > capacity)
        if len(long):
            # units that are too long are cut into full pieces and a last, shorter one
            pieces = -(-lengths // capacity)
            rests = lengths - (pieces - 1) * capacity
            lengths, documents = np.full(int(pieces.sum()), capacity), np.repeat(documents, pieces)
            lengths[np.cumsum(pieces) - 1] = rests
        sizes, documents_of_units = lengths.tolist(), documents.tolist()
        # for each unit the position of its first token in the concatenation of all sequences
        places, ends = [], []
        used, done, previous, open_unit = 0, 0, documents_of_units[0], 0
        for unit, (size, document) in enumerate(zip(sizes, documents_of_units, strict=True)):
            gap = 0
            if used and document != previous:
                gap = 1 if self.cross_documents else capacity
            if used + gap + size > capacity:
                done += used + 2
                ends.append(done)
                used, gap, open_unit = 0, 0, unit
            places.append(done + 1 + used + gap)
            used += gap + size
            previous = document
        if last:
            done += used + 2
            ends.append(done)
            complete = len(sizes)
        else:
            complete = open_unit
        kept = int(lengths[:complete].sum())
        if not last:
            self._pending = tokens.at(slice(kept, None))
        # the first piece of a long sentence fills a sequence, so pending sentences are short and are not counted again
        self.cut += len(long)
        if not complete:
            return None
        target = np.arange(kept) + np.repeat(
            np.asarray(places[:complete]) - np.concatenate([[0], np.cumsum(lengths[: complete - 1])]),
            lengths[:complete],
        )
        return lay_out(tokens.at(slice(kept)), target, np.asarray(ends), self.begin, self.separator)
