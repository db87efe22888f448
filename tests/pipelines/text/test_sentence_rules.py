"""Sentence rules: cases worked by hand in many scripts, laws that every text obeys, and time on hostile text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.text.sentence_rules import split_sentences

# in these texts a bar stands where a sentence begins
MARKS = [
    "He ran.| Was it late?| Yes!| Then… nothing…| Silence...| The end",
    "Really?!| No way!!!| Wow ! ! !| Well . . .| In Fla. , e.g. ; So",
    "Cena je 5.| Září přišlo.| Žádné!",
    "Он ушёл.| Куда?| Домой!| Ещё",
    "Τι είπε!| Τίποτα.| Όχι",
    "هل وصل؟| نعم. |لقد وصل.",
    "یہ کتاب ہے۔| وہ قلم ہے۔| پی۔ایچ۔ڈی",
    "वह गया।| क्या हुआ?| कुछ नहीं॥|अच्छा।|फिर",
    "আমি যাই।| তুমি?| সে",
    "ሰላም ነው።| ደህና ነህ፧| አዎ።|እሺ",
    "Լոնդոնը մեծ է։| Այո։|Ոչ",
    "နေကောင်းလား။| ကောင်းပါတယ်။|ဟုတ်",
    "សួស្តី។| អរគុណ។|បាទ៕",
    "བཀྲ་ཤིས།| བདེ་ལེགས།| ཐུགས",
    "你好。|我们走吧！|去哪？|回家！？|好 吧。| 再见",
    "行こう！|今日は晴れ。|明日は?|雨!|さあ",
    "안녕하세요.| 네.| 갑니다!| 뭐?",
    "ไปไหนมา สบายดีไหม ไม่มีเครื่องหมาย",
]
WHOLE_WORDS = [
    "It is 3.14 or ３．１４ at example.org/?q=1!x in v2.0.1, a.b@c.de.| Next",
    "Mr. and Mrs. J. R. Smith met Dr. Who and Sgt. Pepper.| Then they left.",
    "The U.S. Army came at 5 p.m. and left.| It left at 7 p.m.| We saw it.",
    "Das gilt z. B. für Haus und d. h. immer, ca. fünf usw. und mehr.| Ende",
    "Im 3. und 12. bis 14. war Ludwig XIV. da.| Im 16.| Jahrhundert",
    "1. First point.| 2. Second point.| 12. Last point.",
    "See No. 5, Vol. 3 and Jan. 7 of it.| In 1999.| 2000 came.",
    "А. С. Пушкин и т. е. поэт, М.В. Ломоносов, г. Москва.| Да.| Это я.| Он",
    "قال د. محمد ذلك.| نعم",
    "በ2019 እ.ኤ.አ. ከጥር ሄደ።| አዎ",
    "ngayon e.| Saan ka?| Ṣé ó.| Rárá",
    "I hasn't.| You can't.| Fly.| Army.| Tom.| End",
    "He ate etc. and so on vs. the rest.| they came.| it was late!| he said?| no",
]
CLOSING = [
    'He said "Why?" and "No!" she said.| "Yes."| (He left.)| [Why?]| End',
    "Er sagte: „Geh.“| Sie »ging.«| «Да.»| “So.”| ’Tis",
    '« Bonjour ! »| Il part.| He said . "| Then ( one . )| Two',
    "He said “well…” and went... and came… so.| End",
    "他说：“你好。”|我走了。|（完。）|「はい。」と言った。|『え？』|次",
]


@pytest.mark.parametrize("marked", [*MARKS, *WHOLE_WORDS, *CLOSING])
def test_sentences_of_many_scripts_end_where_a_reader_ends_them(marked: str) -> None:
    text = marked.replace("|", "")
    assert [text[start:end] for start, end in split_sentences(text)] == [part.strip() for part in marked.split("|")]


def test_white_space_of_every_kind_is_outside_of_sentences() -> None:
    assert split_sentences("") == split_sentences(" \t\u3000\n") == []
    assert split_sentences("\u00a0A be.\u3000 \u2003C do. ") == [(1, 6), (9, 14)]


PIECES = [
    *'.!?…。！？।።؟۔"()[]”»」1aBéяДのた的አक ',
    "\u0301",
    "\u200d",
    "\u3000",
    "😀",
    "Mr.",
    "... ",
    "1. ",
    '." ',
    "p.m. ",
]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.characters()), max_size=60).map("".join))
def test_sentences_are_in_order_disjoint_and_hold_all_but_white_space(text: str) -> None:
    position = 0
    for start, end in split_sentences(text):
        assert position <= start < end <= len(text)
        assert not text[position:start].strip()
        assert text[start:end] == text[start:end].strip()
        position = end
    assert not text[position:].strip()


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_every_sentence_but_the_last_ends_with_a_mark_and_what_closes_behind_it(text: str) -> None:
    for start, end in split_sentences(text)[:-1]:
        assert text[start:end].rstrip("\"')]”»」 \u3000")[-1:] in tuple(".!?…。！？።؟۔।")


HOSTILE = [
    *(". .) ( a 。 」 。」 。? ?। ... ." + '" " ." . ".').split(),
    *(
        "  ",
        ". ",
        ". )",
        "! ? ",
        "a. ",
        ". . a",
        '. "',
        "1. ",
        "Mr. ",
        ".\u3000",
        ".. a",
        '. "a',
        "e.\u0301 ",
        "「。」と",
        "A.",
    ),
]


def test_time_is_linear_on_hostile_text() -> None:
    times = []
    for piece in HOSTILE:
        started = time.process_time()
        for end in ("a", ' "a'):
            split_sentences('. "' + piece * (50_000 // len(piece)) + end)
        times.append(time.process_time() - started)
    # in quadratic time a text takes over a hundred times as long as the others
    assert max(times) < 2 + 40 * sorted(times)[len(times) // 2]
