"""Readers of coreference: hand-written files, the counts of the files at hand, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from guidance.errors import InputError
from guidance.probes.coreference import queries
from pipelines.text.blocks import Notes
from pipelines.text.coreference_files import Text, read_coreference
from tests.shared import shared


def read(path: Path, kind: str | None = None) -> list[Text]:
    return list(read_coreference([path], [path.name], kind, "utf-8", Notes()))


def spans(text: Text) -> list[tuple[int, int, str]]:
    return [(m.start, m.end, m.entity) for m in text.mentions]


def written(folder: Path, content: str) -> Path:
    path = folder / "file"
    path.write_text(content)
    return path


LITBANK = """#begin document (a_b); part 0
a_b\t0\t0\tAnna\t_\t_\t(0)
a_b\t0\t1\tsaw\t_\t_\t
a_b\t0\t2\ther\t_\t_\t(1|(0)
a_b\t0\t3\tdog\t_\t_\t1)

a_b\t0\t0\tShe\t_\t_\t(0)
#end document
#begin document (a_b); part 1
a_b 1 0 It - - -
a_b 1 1 rains - - -
#end document
"""


def test_conll_has_nested_mentions_sentences_and_parts(tmp_path: Path) -> None:
    first, second = read(written(tmp_path, LITBANK))
    assert (first.name, first.words, first.sentences) == ("a_b/0", ["Anna", "saw", "her", "dog", "She"], [0, 4])
    assert spans(first) == [(0, 1, "0"), (2, 3, "0"), (2, 4, "1"), (4, 5, "0")]
    assert [mention.kind for mention in first.mentions] == ["nominal", "pronominal", "nominal", "pronominal"]
    assert (second.name, second.words, second.mentions) == ("a_b/1", ["It", "rains"], [])


def test_gum_has_types_and_names_at_its_brackets(tmp_path: Path) -> None:
    text = "# begin document x\n0\tThe\t(person-1-Name\n1\told\t(abstract-2)\n2\tman\tperson-1-Name)\n3\tcame\t_\n4\the\t(person-1)\n# end document\n"
    (found,) = read(written(tmp_path, text))
    assert spans(found) == [(0, 3, "1"), (1, 2, "2"), (4, 5, "1")]


def test_gap_and_winobias_have_one_question_each(tmp_path: Path) -> None:
    row = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"
    row += "d-1\tAnn Lee met Bo's aunt; she left.\tshe\t23\tAnn Lee\t0\tTRUE\tBo\t12\tFALSE\tu\n"
    (gap,) = read(written(tmp_path, row))
    assert gap.words == ["Ann", "Lee", "met", "Bo's", "aunt", ";", "she", "left", "."]
    assert spans(gap) == [(0, 2, "pronoun"), (3, 4, "B"), (6, 7, "pronoun")]
    assert [mention.asks for mention in gap.mentions] == [False, False, True]


def test_the_candidates_of_winobias_are_the_marked_occupation_and_the_other_one(tmp_path: Path) -> None:
    lines = "7 [The developer] asked a construction worker because [she] knew the workers.\n8 [The cook] saw [her].\n"
    file = tmp_path / "anti_stereotyped_type1.txt.dev"
    file.write_text(lines)
    wino, alone = read(file)
    assert wino.words[:6] == ["The", "developer", "asked", "a", "construction", "worker"]
    assert spans(wino) == [(0, 2, "marked"), (3, 6, "other"), (7, 8, "marked")]
    assert [mention.asks for mention in wino.mentions] == [False, False, True]
    assert [mention.head for mention in wino.mentions] == [1, 5, 7]
    assert wino.stereotype == alone.stereotype == "anti" and len(alone.mentions) == 2
    file = file.rename(tmp_path / "wino.txt")
    assert {text.stereotype for text in read(file)} == {""}


GAP = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"


def test_gap_has_texts_of_any_length(tmp_path: Path) -> None:
    row = GAP + "\n"
    row += f"d-1\tAnn met Bo; she left.{' It rained.' * 15_000}\tshe\t12\tAnn\t0\tTRUE\tBo\t8\tFALSE\tu\n"
    (gap,) = read(written(tmp_path, row))
    assert len(gap.words) == 7 + 45_000
    with pytest.raises(InputError, match="line 4: not a row of GAP, 2 cells for 11 columns"):
        read(written(tmp_path, row + "d-2\tshort\n"))


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ("some text\n", None, "no format of coreference"),
        ("a\t0\t0\tw\t_\t1)\n", "conll-2012", "line 1: entity '1' ends where none has begun"),
        ("a\t0\t0\tw\t_\t(1\n", "conll-2012", "entity '1' begins and never ends"),
        ("a\tb\n", "conll-2012", "line 1: 2 columns"),
        ("a\tb\n", "gum", "line 1: 2 columns"),
        ("ID\tText\tPronoun\n1\tx\ty\n", "gap", "line 1: a column Pronoun-offset is missing"),
        (
            GAP + "d\tAnn met Bo; she left.\tshe\t12\tAnn\t0\tTRUE\tBo\tnine\tFALSE\tu\n",
            None,
            "line 2: not a row of GAP, an offset",
        ),
        (
            GAP + "d\tAnn met Bo; she left.\tshe\t11\tAnn\t0\tTRUE\tBo\t8\tFALSE\tu\n",
            None,
            "'she' is not at character 11",
        ),
        ("no number\n", "winobias", "line 1: not a number"),
    ],
)
def test_other_files_are_refused(content: str, kind: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read(written(tmp_path, content), kind)


@pytest.mark.parametrize(
    ("folder", "documents", "words", "mentions"),
    [
        ("coref-litbank/conll", 26, 53_637, 7_441),
        ("coref-gum/gum", 108, 98_363, 28_465),
        ("coref-gum/ontogum", 108, 98_363, 11_668),
    ],
)
def test_files_at_hand_have_the_counts_of_their_readme(folder: str, documents: int, words: int, mentions: int) -> None:
    texts = [text for path in sorted((shared("data") / folder).iterdir()) for text in read(path)]
    assert len(texts) == documents
    assert sum(len(text.words) for text in texts) == words
    assert sum(len(text.mentions) for text in texts) == mentions


def test_gap_and_winobias_at_hand() -> None:
    gap = read(shared("data") / "coref-gap/gap-validation.tsv")
    assert len(gap) == 454
    true = [sum(m.entity == "pronoun" for m in text.mentions) - 1 for text in gap]
    assert true.count(0) == 62 and true.count(1) == 392
    wino = read(shared("data") / "coref-winobias/conll/dev_type1_pro_stereotype.v4_auto_conll.gz")
    assert len(wino) == 396 and sum(len(text.mentions) for text in wino) == 801
    lines = read(shared("data") / "coref-winobias/pro_stereotyped_type1.txt.dev")
    assert len(lines) == 396 and all(len(text.mentions) in (3, 4) for text in lines)
    questions = [len(queries(text.mentions, [True] * len(text.words))) for text in (*gap, *lines)]
    assert sum(questions[:454]) == 392 and sum(questions[454:]) == 405 and 0 not in questions[454:]
