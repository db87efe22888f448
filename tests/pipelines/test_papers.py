"""The published tables, and the papers to cite."""

from __future__ import annotations

import re

import pytest

from guidance.errors import UnknownName
from guidance.mechanisms import MECHANISMS
from guidance.patterns import PATTERNS
from pipelines import papers
from pipelines.training.objectives import OBJECTIVES


def test_every_table_is_read_and_its_pairs_are_rows_of_it() -> None:
    assert len(papers.names()) == 32
    for name in papers.names():
        table = papers.table(name)
        assert table.numbers, name
        assert table.paper in papers.entries(), name
        assert {row for pair in table.pairs for row in pair} <= {number.row for number in table.numbers}, name
        cells = [(number.row, number.column, number.metric) for number in table.numbers]
        assert len(set(cells)) == len(cells), name


def test_numbers_are_those_of_the_paper() -> None:
    found = {(n.row, n.column, n.metric): n for n in papers.table("a-table3").numbers}
    assert found["RoBERTa-16-MLM", "English", "validation loss, final"].number == 7.28
    assert found["RoBERTa-16-AG", "English", "validation loss, final"].number == 2.46
    assert papers.Number("", "", "", "50, 000", "", "", "", "").number == 50_000
    assert papers.Number("", "", "", "", "", "", "not given", "").number is None


def test_an_unknown_table_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'a-table3'\?"):
        papers.table("a-tabel3")


def test_papers_are_found_by_how_the_code_names_them() -> None:
    assert papers.cited(["Wang et al. 2020, eq. 2; Li et al. 2022, eq. 3", "Li et al. 2022"]) == ["wang2020", "li2022"]
    assert papers.cited(["convolutions of Jiang et al. 2020, So et al. 2021 and Allen-Zhu 2025"]) == [
        *("jiang2020", "so2021", "allen-zhu2025"),
    ]
    assert papers.cited(["a mask of the caller's", "Nobody et al. 1999"]) == []


def test_every_paper_that_a_pattern_or_mechanism_comes_from_has_an_entry() -> None:
    ours = [row for row in (*MECHANISMS.values(), *PATTERNS.values()) if not getattr(row, "package", "")]
    sources = [row.source for row in (*ours, *OBJECTIVES.values()) if "20" in row.source]
    assert all(papers.cited([source]) for source in sources)
    keys = re.findall(r"^@\w+\{(.*),$", (papers.FOLDER / "references.bib").read_text(encoding="utf-8"), re.M)
    assert keys == list(papers.entries())  # each is read, and none is there twice
    for key, entry in papers.entries().items():
        assert entry.startswith("@"), key
        assert entry.count("{") == entry.count("}"), key
        assert all(f"  {field} " in entry for field in ("title", "author", "year")), key
