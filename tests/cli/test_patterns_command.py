"""`guide patterns list`, and `guide patterns show` for every pattern."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from cli.pictures import cells, legend, matrix_lines, shade
from cli.tables import folded
from guidance.patterns import PATTERNS
from tests.shared import shared

TEXT = "The dog ran. It barked!"


def weights(guide, name, *arguments):
    """The weights of a pattern as a matrix (queries, keys)."""
    answer = guide("patterns", "show", name, "--json", *arguments)
    assert answer.code == 0, answer.err
    return np.array(json.loads(answer.out)["weights"])


def pairs(matrix):
    return {(int(query), int(key)) for query, key in np.argwhere(matrix > 0)}


# list


def test_list_has_every_pattern_with_needs_options_source_and_summary(guide):
    lines = guide("patterns", "list").out.splitlines()
    assert lines[0].split() == ["PATTERN", "NEEDS", "OPTIONS", "SOURCE", "SUMMARY"]
    assert [line.split()[0] for line in lines[1:]] == list(PATTERNS)
    window = next(line for line in lines if line.startswith("window"))
    assert "size = 3, words = false" in window
    assert PATTERNS["window"].source in window and PATTERNS["window"].summary in window


def test_list_as_json_has_defaults_as_values(guide):
    rows = {row["name"]: row for row in json.loads(guide("patterns", "list", "--json").out)["patterns"]}
    assert rows.keys() == PATTERNS.keys()
    assert rows["rare"]["options"] == {"fraction": 0.1, "least": 2}
    assert "cooccurrence" in rows["conflict"]["needs"] and rows["conflict"]["weighted"]


def test_a_table_has_one_line_per_row_in_a_pipe_and_is_wrapped_on_a_terminal():
    rows = [("next", "Each token looks one step right, and so on and so on"), ("none", "")]
    assert folded(("NAME", "SUMMARY"), rows, None)[1] == "next  " + rows[0][1]
    narrow = folded(("NAME", "SUMMARY"), rows, 26)
    assert max(map(len, narrow)) <= 26
    assert " ".join(line[6:].strip() for line in narrow[1:-1]) == rows[0][1]
    assert narrow[-1] == "none"


# show


OF_THE_CALLER = ("matrix", "weight_matrix")


@pytest.mark.parametrize("name", OF_THE_CALLER)
def test_a_matrix_of_the_callers_is_not_drawn(guide, name):
    answer = guide("patterns", "show", name)
    assert (answer.code, f'guidance.pattern("{name}"' in answer.err) == (2, True)


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in OF_THE_CALLER])
def test_every_pattern_can_be_drawn_on_the_sample(guide, name):
    answer = guide("patterns", "show", name)
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[0] == name
    assert lines[1].startswith(PATTERNS[name].summary)
    assert sum(line.startswith(("[CLS]", "[SEP]")) for line in lines) == 2
    tokens = json.loads(guide("patterns", "show", "self", "--json").out)["tokens"]
    start = max(map(len, tokens)) + 1
    marks = [[line[start + 2 * key] for key in range(len(tokens))] for line in lines[-2 - len(tokens) : -2]]
    found = weights(guide, name)
    assert [[mark != "·" for mark in row] for row in marks] == (found != 0).tolist()
    assert "split into words" in answer.err


def test_the_picture_has_a_row_for_each_query_and_a_column_for_each_key(guide):
    out = guide("patterns", "show", "next", "--text", "a b").out
    assert out.splitlines()[3:-2] == [
        "      [     [",
        "      C     S",
        "      L     E",
        "      S     P",
        "      ] a b ]",
        "[CLS] · ██· ·",
        "a     · · ██·",
        "b     · · · ██",
        "[SEP] · · · ·",
    ]


def test_ascii_is_used_if_asked_for_or_if_stdout_cannot_encode_blocks(guide, monkeypatch):
    out = guide("patterns", "show", "next", "--text", "日 b", "--ascii").out
    assert out.isascii()
    assert "[CLS]  . # . ." in out and "\\u65e5" in out
    monkeypatch.setattr("cli.arguments.speaks_unicode", lambda: False)
    assert guide("patterns", "show", "next", "--text", "日 b").out == out


def test_combinations_and_options_are_written_as_plans_write_them(guide):
    either = weights(guide, '{ or = ["next", "previous"] }', "--text", TEXT)
    assert pairs(either) == {(i, j) for i in range(9) for j in range(9) if abs(i - j) == 1}
    wide = weights(guide, "window", "--option", "size=5", "--text", TEXT)
    assert (pairs(wide)) == {(i, j) for i in range(9) for j in range(9) if abs(i - j) <= 2}
    marks = weights(guide, "separator", "--option", "marks=.!", "--text", TEXT)
    assert {key for _, key in pairs(marks)} == {0, 4, 7, 8}
    both = weights(guide, '{ sum = ["next", { name = "first", weight = 0.5 }] }', "--text", TEXT)
    assert both[0, 1] == 1 and both[3, 0] == 0.5 and both.sum() == 8 + 9 * 0.5


def test_sentences_of_a_text_are_those_that_a_corpus_of_it_would_have(guide):
    segments = weights(guide, "same_segment", "--text", 'Is it "so?" Sure. 3.5 is!')
    tokens = json.loads(guide("patterns", "show", "self", "--json", "--text", 'Is it "so?" Sure. 3.5 is!').out)[
        "tokens"
    ]
    assert tokens == ["[CLS]", "Is", "it", '"', "so", "?", '"', "Sure", ".", "3", ".", "5", "is", "!", "[SEP]"]
    assert {key for query, key in pairs(segments) if query == 1} == set(range(7))
    assert {key for query, key in pairs(segments) if query == 7} == {7, 8}
    titled = weights(guide, "same_segment", "--text", "Mr. Who is. So")
    assert {key for query, key in pairs(titled) if query == 1} == set(range(6))


def test_features_may_be_given_per_word_or_per_token(guide):
    for values in ("0,1,0", "0,0,1,0,0"):
        assert pairs(weights(guide, "marked", "--text", "a b c", "--feature", f"marked={values}")) == {
            (query, 2) for query in range(5)
        }
    parse = ["--feature", "head=1,1,1", "--feature", "relation=nsubj,root,obj"]
    found = weights(guide, "dependency", "--text", "dogs chase cats", *parse)
    assert {key for query, key in pairs(found) if query == 1} == {1, 2}
    assert {key for query, key in pairs(found) if query == 2} == {1, 2, 3}


def test_the_sample_has_its_parse(guide):
    found = weights(guide, "dependency")
    tokens = json.loads(guide("patterns", "show", "self", "--json").out)["tokens"]
    chased = tokens.index("chased")
    assert {tokens[key] for query, key in pairs(found) if query == chased} == {"chased", "dog", "cat", "."}
    nouns = {tokens[key] for _, key in pairs(weights(guide, "noun"))}
    assert nouns == {"dog", "cat"}


def test_conflict_counts_co_occurrence_in_the_text_and_says_so(guide):
    answer = guide("patterns", "show", "conflict", "--json", "--text", "The bee. The sea.")
    assert "counted in this text only" in answer.err
    found = np.array(json.loads(answer.out)["weights"])
    # The and . occur in both sentences, bee only in the first: it co-occurs equally with The and ., and never with sea
    b, c = 2, 5
    assert found[b, c] == 0 and found[b, 1] == found[b, 3] == 1
    assert found[0].sum() == found[:, 0].sum() == 0


@pytest.mark.parametrize("kind", ["byte-bpe", "bpe", "unigram", "wordpiece", "word"])
def test_a_tokenizer_gives_tokens_each_with_its_word(guide, kind):
    Path("text.txt").write_text("The old dog chased a cat. The cat ran home.\n" * 30)
    corpus = guide("build-corpus", "text.txt").out.strip()
    built = guide("build-tokenizer", corpus, "--kind", kind, "--vocab-size", 300, "--name", "small")
    assert built.code == 0, built.err
    for reference in ("small", f"artifacts/{built.out.strip()}"):
        text = "The unseen dog ran."
        answer = json.loads(
            guide("patterns", "show", "same_segment", "--json", "--tokenizer", reference, "--text", text).out
        )
        tokens = answer["tokens"]
        assert tokens[0] in ("[CLS]", "<s>") and tokens[-1] in ("[SEP]", "</s>")
        if kind == "byte-bpe":
            assert "".join(t.removeprefix("##") for t in tokens[1:-1]).replace("Ġ", "") == "Theunseendogran."
        inner = np.array(answer["weights"])[1:-1, 1:-1]
        assert inner.all()


def test_a_spacy_model_gives_the_parse(guide):
    model = shared("models/spacy-en_ud_ewt_sm")
    found = guide("patterns", "show", "dependency", "--text", "The old dog chased a cat.", "--parser", f"spacy:{model}")
    assert found.code == 0, found.err
    assert "split into words" not in found.err
    tokens = ["[CLS]", "The", "old", "dog", "chased", "a", "cat", ".", "[SEP]"]
    matrix = weights(guide, "dependency", "--text", "The old dog chased a cat.", "--parser", f"spacy:{model}")
    dog = tokens.index("dog")
    assert {tokens[key] for query, key in pairs(matrix) if query == dog} >= {"The", "old", "dog"}
    for name in ("major_relation", "noun", "verb", "adjective", "negation", "stop_word"):
        assert guide("patterns", "show", name, "--text", "He did not run.", "--parser", f"spacy:{model}").code == 0


# pictures


def test_the_same_text_gives_the_same_png(guide):
    for name in ("one.png", "two.png"):
        answer = guide("patterns", "show", "window", "--text", TEXT, "--png", name)
        assert (answer.code, f"drawn: {name}" in answer.err) == (0, True)
    assert Path("one.png").read_bytes() == Path("two.png").read_bytes()
    assert Path("one.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_may_have_dollar_signs_and_letters_without_a_font(guide):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = guide("patterns", "show", "next", "--text", "$x$ \\frac \U000f0000 日", "--png", "odd.png")
    assert answer.code == 0, answer.err
    assert answer.err.count("no installed font") == 1


def test_wide_letters_and_combining_marks_do_not_shift_columns():
    labels = ["[CLS]", "日本", "é\u0301", "internationalisation", "\x1b[31m"]
    lines = matrix_lines(np.eye(5).tolist(), labels, labels, width=80)
    drawn = lines[-5:]
    assert len({cells(line[: line.index("██")]) - 2 * number for number, line in enumerate(drawn)}) == 1
    assert "internationalis…" in drawn[3] and "\\x1b[31m" in drawn[4]
    assert not any("\x1b" in line for line in lines)


def test_a_matrix_that_is_too_wide_is_split_into_blocks_that_fit():
    labels = [f"t{n}" for n in range(50)]
    lines = matrix_lines(np.eye(50).tolist(), labels, labels, width=24)
    assert max(map(cells, lines)) <= 24
    assert "".join(lines).count("█") == 50
    assert sum(line.startswith("columns ") for line in lines) == 3


def test_shades_grow_with_the_weight_and_only_zero_looks_empty():
    for ascii_only in (False, True):
        drawn = [shade(value, ascii=ascii_only) for value in (0, 1e-9, 0.2, 0.5, 0.8, 0.999, 1, 3)]
        assert drawn[0] not in drawn[1:] and drawn[-1] == drawn[-2] != drawn[-3]
        assert all(mark in legend(weighted=True, ascii=ascii_only) for mark in (drawn[0], drawn[-1]))


# mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nxt"], "did you mean 'next'?"),
        (["next", "--text", ""], "the text is empty"),
        (["next", "--text", " \n "], "the text is empty"),
        (["next", "--text", "a " * 300], "the limit is 254"),
        (["window", "--option", "sise=5"], "did you mean 'size'?"),
        (["window", "--option", "size=4"], "not an odd number"),
        (["window", "--option", "size"], "is not NAME=VALUE"),
        (["window", "--option", "size=3", "--option", "size=5"], "given twice"),
        (["{ or = [ }"], "not a TOML inline table"),
        (["{ xor = ['next'] }"], "does not describe a pattern"),
        (["dependency", "--text", "a b"], "`guide build-masks`"),
        (["dependency", "--text", "a b"], "--parser spacy:"),
        (["rare", "--text", "a b"], "rare needs idf, which this text lacks"),
        (["marked", "--text", "a b", "--feature", "markd=0,1"], "did you mean 'marked'?"),
        (["marked", "--text", "a b", "--feature", "marked=0"], "has 1 values; the text has 2 words and 4 tokens"),
        (["marked", "--text", "a b", "--feature", "marked=0,2"], "'2' is not 0 or 1"),
        (["rare", "--text", "a b", "--feature", "idf=0,x"], "'x' is not a number"),
        (["same_segment", "--text", "a b", "--feature", "segment=0,9999999999"], "is not a whole number"),
        (["next", "--text", "a \udcff"], "the text is not UTF-8"),
        (["conflict", "--option", "truth=true"], "an objective with a generator gives it"),
        (["next", "--parser", "spacy:."], "not a spaCy model"),
        (["noun", "--text", "a b", "--feature", "pos=NOUN,NOON"], "'NOON' is not a whole number, or the name of a pos"),
        (["next", "--png", "no/folder.png"], "there is no folder 'no'"),
        (["next", "--png", "picture.jpg"], "for example: --png picture.png"),
        (["next", "--tokenizer", "nothing"], "no artifact 'nothing'"),
        (["next", "--parser", "treebank"], "unknown parser 'treebank'; did you mean spacy:treebank?"),
        (["next", "--parser", "spacy:./nothing"], "no such folder with a spaCy model"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_printed_or_written(guide, arguments, message):
    answer = guide("patterns", "show", *arguments)
    assert answer.code == 2, answer.err
    assert message in answer.err
    assert answer.out == ""
    assert "Traceback" not in answer.err
    assert not list(Path().glob("**/*.png"))


def test_shared_options_may_come_before_between_or_after_both_words(guide):
    for arguments in (
        ["--json", "patterns", "list"],
        ["patterns", "--json", "list"],
        ["patterns", "list", "--json"],
    ):
        assert json.loads(guide(*arguments).out)["schema"] == 1
    assert guide("--quiet", "patterns", "show", "next").err == ""
    assert guide("patterns", "-q", "show", "next").err == ""


def test_guide_toml_has_nested_tables_for_two_word_commands(guide):
    Path("guide.toml").write_text('[patterns.show]\ntext = "x y"\n')
    assert json.loads(guide("patterns", "show", "next", "--json").out)["tokens"] == ["[CLS]", "x", "y", "[SEP]"]
    Path("guide.toml").write_text('[patterns.shwo]\ntext = "x y"\n')
    assert "did you mean 'show'?" in guide("patterns", "show", "next").err
    Path("guide.toml").write_text('[patterns.show]\ntxet = "x y"\n')
    assert "did you mean 'text'?" in guide("patterns", "list").err
