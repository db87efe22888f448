"""Sentence boundaries of ``--sentences rules`` and of ``spacy-rules`` against known ones, and the speed of both.

    python -m benchmarks.sentences DATA [--speed FILE ...] [--rounds 5] [--show NAME]

Known boundaries come from text below the folder DATA, joined again to running text:

- each CoNLL-U file, by paragraph where it marks them (``# newpar``), else by document, else as a whole;
- files of one sentence in each line, ``tatoeba.*`` and ``lm-hornmt/*.txt``; where a line holds two, the second counts as
  wrong for both sides;
- files of Choi's segmentation set, ``seg-choi/**/*.ref``, which are tokenised: spaces stand before marks;
- besides DATA the example sentences that spaCy has for about 70 languages, by script.  They are joined without a space
  where the script has none, and examples that do not end with a mark are left out.

A boundary is where a sentence begins, except the first of a text, so that ends of paragraphs, which are trivial, do not
count.  P, R and F1 are per cent; agreement is the F1 of our boundaries against those of ``spacy-rules``.
Speed is in MB (10^6 bytes of UTF-8) per second of processor time, one thread, text in memory, in paragraphs or pieces of
100,000 characters, the best of alternating rounds.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib.util
import time
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.text.blocks import BLOCK_LIMIT, Notes
from pipelines.text.readers import open_lines
from pipelines.text.sentences import Splitter, splitter

_UNSPACED = ("ja", "zh")


@dataclass(frozen=True)
class Gold:
    """A running text and the offsets at which its sentences begin, without the first."""

    text: str
    starts: frozenset[int]


def join(sentences: Iterable[tuple[str, bool]]) -> Gold:
    """The text of sentences, each with whether a space follows it."""
    text, starts = "", set()
    for sentence, space in sentences:
        if text:
            starts.add(len(text))
        text += sentence + (" " if space else "")
    return Gold(text.rstrip(), frozenset(starts))


def treebank_texts(path: Path) -> Iterator[Gold]:
    """The paragraphs of a CoNLL-U file; documents if it marks no paragraphs; one text if it marks neither."""
    pending: list[tuple[str, bool]] = []
    text, covered, spaced, begins = "", "0", True, False
    lines = [line for _, line in open_lines(path, path.name, "utf-8", Notes())]
    mark = next((mark for mark in ("# newpar", "# newdoc") if any(line.startswith(mark) for line in lines)), None)
    for line in (*lines, ""):
        if line.startswith("#"):
            begins = begins or (mark is not None and line.startswith((mark, "# newdoc")))
            text = line.removeprefix("# text =").strip() if line.startswith("# text =") else text
        elif line.strip():
            number, *_, misc = line.split("\t")
            if "-" in number:
                covered = number.split("-")[1]
            # the spacing of a multi-word token is on its own line
            if "-" in number or ("." not in number and int(number) > int(covered)):
                spaced = "SpaceAfter=No" not in misc
        elif text:
            if begins and pending:
                yield join(pending)
                pending = []
            pending.append((text, spaced))
            text, covered, spaced, begins = "", "0", True, False
    if pending:
        yield join(pending)


def line_texts(path: Path) -> Iterator[Gold]:
    """Twenty lines joined by spaces make a text."""
    lines = [line.strip() for line in path.read_text("utf-8").split("\n") if line.strip()]
    for first in range(0, len(lines), 20):
        yield join((line, True) for line in lines[first : first + 20])


def choi_texts(path: Path) -> Iterator[Gold]:
    """The segments of a file."""
    for segment in path.read_text("utf-8").split("==========\n"):
        if lines := [line.strip() for line in segment.split("\n") if line.strip()]:
            yield join((line, True) for line in lines)


def example_texts() -> Iterator[tuple[str, Gold]]:
    """The script and the examples of each language that spaCy knows, read without importing spaCy."""
    spec = importlib.util.find_spec("spacy")
    assert spec is not None and spec.origin is not None
    for path in sorted(Path(spec.origin).parent.glob("lang/*/examples.py")):
        language = path.parent.name
        for node in ast.parse(path.read_text("utf-8")).body:
            if language != "xx" and isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
                sentences = [" ".join(text.split()) for text in ast.literal_eval(node.value)]
                ended = [text for text in sentences if unicodedata.category(text[-1]).startswith("P")]
                if ended:
                    letter = next(letter for letter in ended[0] if letter.isalpha())
                    script = unicodedata.name(letter).split()[0].capitalize()
                    yield script, join((text, language not in _UNSPACED) for text in ended)


def gold_texts(data: Path) -> dict[str, list[Gold]]:
    """All texts with known boundaries, by name."""
    found: dict[str, list[Gold]] = defaultdict(list)
    for path in sorted((*data.rglob("*.conllu"), *data.rglob("*.conllu.gz"))):
        found[path.name.split(".")[0]] += treebank_texts(path)
    for path in sorted((*data.rglob("tatoeba.*[!e][!n][!g]"), *data.rglob("lm-hornmt/*.txt"))):
        found[path.name.removesuffix(".txt")] += line_texts(path)
    for path in sorted(data.rglob("seg-choi/**/*.ref")):
        found["choi"] += choi_texts(path)
    for script, gold in example_texts():
        found[f"examples {script}"].append(gold)
    return {name: texts for name, texts in found.items() if any(text.starts for text in texts)}


@dataclass
class Score:
    """Counts of boundaries: found and right, found, and known."""

    right: int = 0
    found: int = 0
    known: int = 0

    def add(self, found: frozenset[int], known: frozenset[int]) -> None:
        self.right += len(found & known)
        self.found += len(found)
        self.known += len(known)

    @property
    def precision(self) -> float:
        return self.right / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        return self.right / self.known if self.known else 0.0

    @property
    def f1(self) -> float:
        return 2 * self.right / (self.found + self.known) if self.found + self.known else 1.0


def boundaries(split: Splitter, texts: list[Gold]) -> list[frozenset[int]]:
    return [frozenset(start for start, _ in spans[1:]) for spans in split([gold.text for gold in texts])]


def show(name: str, texts: list[Gold], found: list[frozenset[int]]) -> None:
    """Print every boundary that is missing or wrong."""
    for gold, starts in zip(texts, found, strict=True):
        for start in sorted(starts ^ gold.starts):
            kind = "wrong  " if start in starts else "missing"
            print(f"{name} {kind} {gold.text[max(0, start - 50) : start]!r} | {gold.text[start : start + 30]!r}")


def megabytes_per_second(split: Splitter, texts: list[str]) -> float:
    size = sum(len(text.encode()) for text in texts) / 1e6
    started = time.process_time()
    split(texts)
    return size / (time.process_time() - started)


def _read(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", errors="replace")


def compare_speed(paths: list[Path], rounds: int) -> None:
    ours, theirs = splitter("rules"), splitter("spacy-rules")
    for split in (ours, theirs):
        split(["Once. To load."])
    print("\n| text | MB | `rules`, MB/s | `spacy-rules`, MB/s | ratio |\n|---|--:|--:|--:|--:|")
    for path in paths:
        texts = [" ".join(part.split()) for part in _read(path).split("\n\n")]
        texts = [text[first : first + BLOCK_LIMIT] for text in texts for first in range(0, len(text), BLOCK_LIMIT)]
        best = [0.0, 0.0]
        for _ in range(rounds):
            best = [max(best[0], megabytes_per_second(ours, texts)), max(best[1], megabytes_per_second(theirs, texts))]
        size = sum(len(text.encode()) for text in texts) / 1e6
        print(f"| `{path.name}` | {size:.2f} | {best[0]:.0f} | {best[1]:.2f} | {best[0] / best[1]:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--speed", type=Path, nargs="+", default=[], help="files to measure speed on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--show", help="print the wrong boundaries of texts whose name contains this")
    arguments = parser.parse_args()
    ours, theirs = splitter("rules"), splitter("spacy-rules")
    print("| text | boundaries | P | R | F1 | spaCy: P | R | F1 | F1 more | agreement |\n|---" + "|--:" * 9 + "|")
    for name, texts in gold_texts(arguments.data).items():
        found, other = boundaries(ours, texts), boundaries(theirs, texts)
        scores = Score(), Score(), Score()
        for gold, mine, spacys in zip(texts, found, other, strict=True):
            scores[0].add(mine, gold.starts)
            scores[1].add(spacys, gold.starts)
            scores[2].add(mine, spacys)
        own, spacy, both = scores
        cells = (own.precision, own.recall, own.f1, spacy.precision, spacy.recall, spacy.f1, own.f1 - spacy.f1, both.f1)
        print(f"| {name} | {own.known:,} | " + " | ".join(f"{100 * cell:.1f}" for cell in cells) + " |")
        if arguments.show and arguments.show in name:
            show(name, texts, found)
    if arguments.speed:
        compare_speed(arguments.speed, arguments.rounds)


if __name__ == "__main__":
    main()
