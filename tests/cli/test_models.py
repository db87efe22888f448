"""The table of architectures: each row is tested, and a failure is a row of its own."""

from __future__ import annotations

import json

import pytest
import torch

import guidance.models.families
import pipelines.tools.support
from guidance.models.families import FAMILIES, Family
from pipelines.tools.support import examine


def test_every_architecture_in_the_table_can_be_guided_with_this_transformers(guide):
    answer = guide("models", "--json")
    assert answer.code == 0
    rows = json.loads(answer.out)["models"]
    assert [row["family"] for row in rows] == [family.label for family in FAMILIES.values()]
    assert [(row["family"], row["reason"]) for row in rows if not row["supported"]] == []
    heads = {row["family"]: row["heads"] for row in rows}
    assert heads["ALBERT"] == ["encoder self"]
    assert heads["T5"] == ["encoder self", "decoder self", "decoder cross"]


def test_the_table_can_be_printed_as_text(guide):
    answer = guide("models", "--quiet")
    lines = answer.out.splitlines()
    assert lines[0].split() == ["FAMILY", "TESTED", "ON", "ATTENTION", "HEADS", "GUIDED"]
    assert lines[1].split() == ["BERT", "BertForMaskedLM", "BertSelfAttention", "encoder", "self", "yes"]
    assert len(lines) == 1 + len(FAMILIES) and answer.err == ""


def test_an_architecture_that_cannot_be_guided_has_its_reason_in_the_table(guide, monkeypatch: pytest.MonkeyPatch):
    rows = {
        "bert": FAMILIES["bert"],
        "mpnet": Family("MPNet", "MPNetSelfAttention"),
        "roformer": Family("RoFormer", "NoSuchAttention"),
        "of_tomorrow": Family("Of tomorrow", "Attention"),
    }
    for module in (guidance.models.families, pipelines.tools.support):
        monkeypatch.setattr(module, "FAMILIES", rows)
    bert, mpnet, roformer, tomorrow = examine()
    assert bert.supported and bert.heads == ("encoder self",)
    assert mpnet.reason is not None and "called the attention function 0 times" in mpnet.reason
    assert roformer.reason == "RoFormerForMaskedLM: no attention module that can be guided"
    assert tomorrow.reason is not None and "of-tomorrow" in tomorrow.reason
    assert not any(row.supported or row.heads for row in (mpnet, roformer, tomorrow))
    answer = guide("models")
    assert answer.code == 0 and "no: RoFormerForMaskedLM" in answer.out


def test_examining_architectures_does_not_change_the_random_state():
    state = torch.get_rng_state()
    examine()
    assert torch.equal(torch.get_rng_state(), state)
