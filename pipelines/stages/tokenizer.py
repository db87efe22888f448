"""Stage ``build-tokenizer``: trains a tokenizer on the training text of a corpus, as a Hugging Face folder.

Unigram training is not reproducible to the byte, because the library's hash maps have no fixed order.  Later stages therefore
depend on the digest of the files, not on the recipe.  The other four kinds are reproducible.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.declaration import Command, Opening, Stage
from pipelines.engine.stage import Run
from pipelines.inputs import Corpus
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.text.corpus_files import BLOCK_OF_COLUMN, check_pairs, is_parallel, read_blocks
from pipelines.text.tokenizer_files import settings_file

ROBERTA_TOKENS = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
BERT_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
BYTES = 256
NUMBER = r"(?<![\w.])[-+]?[0-9]+([.,][0-9]+)*(?![\w])"
"""A number, as a word of its own."""

WORD = r"(?i)\w+?(?=n['’]t\b)|n['’]t\b|['’](?:s|m|d|re|ve|ll)\b|\w+|\.{2,}|[^\w\s]"
"""A word of a tokenizer of whole words, as treebanks of English divide them: *do n't*, *it 's*, every mark of punctuation by
itself, and dots of an ellipsis together."""


class Config(stage.Config):
    """The kind and size of the tokenizer."""

    later = frozenset({"numbers"})

    kind: Literal["byte-bpe", "bpe", "wordpiece", "unigram", "word"] = Field(
        "byte-bpe",
        description="Kind of tokenizer: byte-level BPE (RoBERTa), BPE, WordPiece (BERT), Unigram, or whole words.",
    )
    vocab_size: int = Field(
        8000, description="Entries of the vocabulary, including special tokens; at most 10,000,000.", le=10_000_000
    )
    min_frequency: int = Field(
        2, ge=1, description="Fewest occurrences of a pair or word that gets an entry (not Unigram)."
    )
    lowercase: bool = Field(False, description="Lowercase the text before anything else.")
    numbers: bool = Field(
        False, description="Read every number, such as 1990 or -3.5, as the same word NUM; for whole words only."
    )
    model_max_length: int = Field(512, ge=8, description="Longest input, in tokens, recorded in the tokenizer.")
    column: Literal["both", "text", "pair"] = Field(
        "both", description="Text to train on, for examples with two texts."
    )

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.numbers and self.kind != "word":
            raise ValueError(f"--numbers is for --kind word, not {self.kind}")
        return self


def special_tokens(kind: str) -> dict[str, str]:
    """The special tokens by role, in the order of their ids from 0."""
    return BERT_TOKENS if kind in ("wordpiece", "word") else ROBERTA_TOKENS


def check_size(config: Config, references: Mapping[str, Any]) -> None:
    """Raise InputError if special tokens and bytes fill the whole vocabulary."""
    least = len(special_tokens(config.kind)) + (BYTES if config.kind == "byte-bpe" else 0)
    if config.vocab_size <= least:
        what = "5 special tokens and 256 bytes" if config.kind == "byte-bpe" else "5 special tokens"
        raise InputError(
            f"a vocabulary of {config.vocab_size} has no entries left after {what}",
            hint=f"--vocab-size {least + 1} or more",
        )


def _prepare(opening: Opening[Config]) -> None:
    if opening.config.kind == "wordpiece":
        # since version 2 the same text gives the same vocabulary
        opening.stage = replace(STAGE, version=2)
    if opening.config.kind == "word":
        # version 1 divided words at apostrophes, and took a run of marks for one word
        opening.stage = replace(STAGE, version=2)


def training_texts(corpus: Artifact, column: str = "both") -> Iterator[list[str]]:
    """The texts of the training blocks, in batches; of examples with two texts the one that ``column`` names, or both."""
    number = BLOCK_OF_COLUMN.get(column)
    for batch in read_blocks(corpus, ["block", "split", "text"]):
        rows = zip(*(batch.column(name).to_pylist() for name in ("block", "split", "text")), strict=True)
        yield [text for block, split, text in rows if split == "train" and number in (None, block)]


def build(run: Run[Config]) -> None:
    """Train a tokenizer on the training split of a corpus.  Raises InputError if the text has fewer than two distinct
    characters, or nothing in it occurs often enough to get an entry."""
    config = run.config
    corpus: Artifact = run.inputs["corpus"]
    blocks = int(corpus.counts.get("blocks", 0)) or None
    if config.column != "both":
        check_pairs(corpus)

    def texts() -> Iterator[list[str]]:
        with run.progress.task("tokenizer", total=blocks, unit="blocks") as bar:
            for batch in training_texts(corpus, config.column):
                yield batch
                bar.advance(len(batch))

    letters: set[str] = set()
    # checked here, because training accepts any text and would give an empty vocabulary
    for text in itertools.chain.from_iterable(training_texts(corpus, config.column)):
        letters.update("".join(text.split()))
        if len(letters) > 1:
            break
    if not letters:
        raise InputError(
            f"{corpus.reference} has no training text", hint="split off less of it for validation and testing"
        )
    if len(letters) < 2:
        raise InputError(f"{corpus.reference} has only one distinct character: too little to train a tokenizer on")
    tokenizer = train(texts, config)
    size = tokenizer.get_vocab_size()
    if size <= len(special_tokens(config.kind)):
        raise InputError(
            f"{corpus.reference} gives a vocabulary of special tokens alone: no word occurs {config.min_frequency} times",
            hint="lower --min-frequency, or train on more text",
        )
    run.out.counts |= {"vocab_size": size, "special": len(special_tokens(config.kind))}
    if size < config.vocab_size:
        often = config.min_frequency > 1 and config.kind != "unigram"
        few = f" that occur {config.min_frequency} times or more" if often else ""
        run.warn(f"the vocabulary has {size:,} entries, not {config.vocab_size:,}: the text has no more{few}")
    for file, data in folder_files(tokenizer, config).items():
        run.out.write(file, data)


def train(texts: Callable[[], Iterator[list[str]]], config: Config) -> Any:
    """A trained ``tokenizers.Tokenizer`` with normaliser, pre-tokenizer, decoder and templates for texts and pairs; ``texts`` may
    be called several times."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    kind, special = config.kind, special_tokens(config.kind)
    tokens, unknown = list(special.values()), special["unk"]
    frequency: dict[str, Any] = {"min_frequency": config.min_frequency}
    common: dict[str, Any] = {"vocab_size": config.vocab_size, "special_tokens": tokens, "show_progress": False}
    # split punctuation from letters, so that no merge can spell a special token such as <s>
    spaced = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")])
    model: Any
    trainer: Any
    words: Any
    decoder: Any = decoders.Metaspace()
    if kind == "byte-bpe":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        model, trainer = models.BPE(), trainers.BpeTrainer(initial_alphabet=alphabet, **frequency, **common)
        words, decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    elif kind == "bpe":
        model = models.BPE(unk_token=unknown)
        trainer, words = trainers.BpeTrainer(limit_alphabet=1000, **frequency, **common), spaced
    elif kind == "unigram":
        model, trainer, words = models.Unigram(), trainers.UnigramTrainer(unk_token=unknown, **common), spaced
    elif kind == "wordpiece":
        model = models.WordPiece(unk_token=unknown)
        trainer = trainers.WordPieceTrainer(limit_alphabet=1000, **frequency, **common)
        words, decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    else:
        model, trainer = models.WordLevel(unk_token=unknown), trainers.WordLevelTrainer(**frequency, **common)
        words, decoder = pre_tokenizers.Split(Regex(WORD), "removed", invert=True), None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = words
    if decoder is not None:
        tokenizer.decoder = decoder
    lowercase = [normalizers.Lowercase()] if config.lowercase else []
    if config.numbers:
        tokenizer.normalizer = normalizers.Sequence([*lowercase, normalizers.Replace(Regex(NUMBER), "NUM")])
    elif lowercase:
        tokenizer.normalizer = lowercase[0]
    elif kind == "wordpiece":
        tokenizer.normalizer = normalizers.BertNormalizer(
            handle_chinese_chars=True, strip_accents=False, lowercase=False
        )
    if kind == "wordpiece":
        tokenizer = _train_wordpiece(tokenizer, trainer, texts)
    else:
        tokenizer.train_from_iterator(texts(), trainer=trainer)
    for index, token in enumerate(tokens):
        if tokenizer.token_to_id(token) != index:
            raise RuntimeError(f"special token {token} has id {tokenizer.token_to_id(token)}, not {index}")
    single, pair = "<s> $A </s>", "<s> $A </s> </s> $B </s>"
    if kind in ("wordpiece", "word"):
        single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    named = [(token, tokens.index(token)) for token in (single.split()[0], single.split()[2])]
    post: Any = processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)
    if kind == "byte-bpe":
        # trim_offsets leaves the space before a word out of its offsets
        post = processors.Sequence([processors.ByteLevel(trim_offsets=True), post])
    tokenizer.post_processor = post
    return tokenizer


def _train_wordpiece(untrained: Any, trainer: Any, texts: Callable[[], Iterator[list[str]]]) -> Any:
    """A WordPiece tokenizer, whose vocabulary is the same each time.

    The library numbers the letters inside of words in the order of a hash map, and of pairs that are equally frequent it merges
    those of the lowest numbers first.  So the texts are read twice: first for their letters, which are then numbered in their
    order.
    """
    from tokenizers import Tokenizer, models

    def alike(vocabulary: dict[str, int] | None = None) -> Any:
        made = Tokenizer(models.WordPiece(vocabulary, unk_token=untrained.model.unk_token))
        made.normalizer, made.pre_tokenizer = untrained.normalizer, untrained.pre_tokenizer
        made.decoder = untrained.decoder
        return made

    special, size = trainer.special_tokens, trainer.vocab_size
    trainer.vocab_size = len(special)
    (first := alike()).train_from_iterator(texts(), trainer=trainer)
    letters = sorted(first.get_vocab().keys() - {str(token) for token in special}, key=lambda x: (len(x), x))
    trainer.vocab_size, trainer.special_tokens, trainer.limit_alphabet = size, [*special, *letters], 0
    (second := alike()).train_from_iterator(texts(), trainer=trainer)
    trained = alike(second.get_vocab())  # in which letters are no special tokens
    trained.add_special_tokens(special)
    return trained


def folder_files(tokenizer: Any, config: Config) -> dict[str, bytes]:
    """The files for ``AutoTokenizer.from_pretrained``, by name."""
    special, pair_types = special_tokens(config.kind), config.kind in ("wordpiece", "word")
    # name both bos/eos and cls/sep, since models use either
    roles = {**special, "cls": special.get("bos") or special["cls"], "sep": special.get("eos") or special["sep"]}
    names = {f"{role}_token": token for role, token in roles.items()}
    settings = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.model_max_length,
        "model_input_names": ["input_ids", *(["token_type_ids"] if pair_types else []), "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    files: dict[str, dict[str, Any]] = {"tokenizer_config.json": settings, "special_tokens_map.json": names}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        **{name: settings_file(content) for name, content in files.items()},
    }


def _next(made: Artifact, store: Store) -> str:
    command = "guide build-sequences {corpus} {}"
    with contextlib.suppress(InputError), store.load_input(made, "corpus", verify=False) as text:
        command += " --packing pairs" if is_parallel(text) else ""
    return command


STAGE = Stage(
    "build-tokenizer",
    "tokenizer",
    1,
    Config,
    build,
    takes={"corpus": Corpus()},
    check=check_size,
    prepare=_prepare,
    command=Command(
        "build-tokenizer",
        "Train a tokenizer on a corpus.",
        examples=(
            "guide build-tokenizer wiki --name bpe",
            "T=$(guide build-tokenizer $(guide build-corpus *.txt))",
            "guide build-tokenizer multi30k --column pair --name english",
        ),
        next=_next,
    ),
)

run = STAGE.run
