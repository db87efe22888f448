"""The probes of ``guide probe`` on models with known answers, and against attention that transformers computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import guidance
from guidance.errors import InputError, NumericalError, PlanError
from guidance.probes.importance import Importance, switched_off
from guidance.probes.relevance import even_attention
from guidance.sites import Site
from pipelines.engine.declaration import Table
from pipelines.inputs import Model
from pipelines.probing import one_text
from pipelines.probing.heads import heads_of
from pipelines.probing.losses import HeldOut
from pipelines.probing.watched import WatchedModel, _read
from pipelines.stages import (
    dataset,
    discover_accept,
    discover_score,
    evaluate,
    find,
    probe_attack,
    probe_coreference,
    probe_dependencies,
    probe_distance,
    probe_importance,
    probe_induction,
    probe_loss,
    probe_pairs,
    probe_reflexives,
    probe_relevance,
    probe_sinks,
)
from pipelines.stages.missing import longest
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.storage.tables import schema_of
from tests import finetunings, trainings
from tests.shared import shared
from tests.trainings import one_thread  # noqa: F401

WORDS = ["anna", "saw", "the", "dog", ".", "she", "fed", "it", "was", "glad", "her", "man"]
COREF = """#begin document (one); part 0
one 0 0 anna - - (0)
one 0 1 saw - - -
one 0 2 the - - (1
one 0 3 dog - - 1)
one 0 4 . - - -

one 0 0 anna - - (0)
one 0 1 fed - - -
one 0 2 dog - - (1)
#end document
#begin document (one); part 1
one 1 0 the - - (2
one 1 1 man - - 2)
one 1 2 saw - - -
one 1 3 man - - (2)
#end document
"""


COLUMNS_VARY = {("probe-attack", "heads.parquet"), ("probe-relevance", "heads.parquet")}
"""Tables whose columns depend on the settings, so that no stage can declare them."""


def table_of(artifact: Artifact) -> Table:
    """What people see of a probe.  Its tables must have the columns that its stage declares."""
    stage = find(artifact.manifest["stage"])
    for path in artifact.path.glob("*.parquet"):
        written = pq.read_schema(path)
        declared = [schema_of(columns) for title, columns in stage.writes.items() if title.split()[0] == path.name]
        if (stage.name, path.name) not in COLUMNS_VARY:
            assert any(written.names == each.names and written.types == each.types for each in declared)
    table: Table = stage.command.show(artifact, stage.config())
    return table


def saved(folder: Path, model: Any) -> str:
    """A model folder with a tokenizer of whole words."""
    folder.mkdir()
    model.save_pretrained(folder)
    for name, data in trainings.tokenizer_files([*trainings.SPECIAL, *WORDS]).items():
        (folder / name).write_bytes(data)
    return str(folder)


def matching(layers: int = 2, heads: int = 2) -> BertModel:
    """A model whose head 1 of layer 0 looks at tokens like its own, and at the token before it alike, and nothing else looks
    anywhere: embeddings are one-hot, queries and keys of that head read them."""
    size = 40
    config = BertConfig(
        vocab_size=size,
        hidden_size=size * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=8,
    )
    model = BertModel(config)
    with torch.no_grad():
        for table in (model.embeddings.position_embeddings, model.embeddings.token_type_embeddings):
            table.weight.zero_()
        model.embeddings.word_embeddings.weight.zero_()
        model.embeddings.word_embeddings.weight[:, :size] = torch.eye(size)
        for layer in model.encoder.layer:
            for linear in (layer.attention.self.query, layer.attention.self.key):
                linear.weight.zero_()
                linear.bias.zero_()
        first = model.encoder.layer[0].attention.self
        for linear in (first.query, first.key):
            linear.weight[-size:, :size] = 2 * torch.eye(size)
    return model.eval()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "artifacts")


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_the_head_that_looks_at_antecedents_is_found(store: Store, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    file = written(tmp_path, "one.conll", COREF)
    made = probe_coreference.run(folder, [file], probe_coreference.Config(), store=store).artifact
    rows = pq.read_table(made.path / "heads.parquet").to_pylist()
    assert [(row["layer"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # heads that look everywhere alike are never right
    assert [row["accuracy"] for row in rows] == [0.0, 1.0, 0.0, 0.0]
    counts = made.counts
    assert (counts["questions"], counts["documents"], counts["mentions"]) == (3, 2, 6)
    assert (counts["best"]["layer"], counts["best"]["head"], counts["split_half"]) == (0, 1, 1.0)
    assert counts["baselines"]["head match"]["accuracy"] == 1.0
    assert counts["baselines"]["nearest"]["accuracy"] == pytest.approx(1 / 3)
    assert rows[1]["proper"] is None and rows[1]["nominal"] == 1.0
    assert (made.path / "heads.png").read_bytes().startswith(b"\x89PNG")
    random = probe_coreference.Config(random=0)
    other = probe_coreference.run(folder, [file], random, store=store).artifact
    assert other.id != made.id and other.counts["questions"] == 3
    assert pq.read_table(other.path / "heads.parquet").to_pylist() != rows


GAP = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"


def gap_row(number: int, text: str, pronoun: str, a: str, b: str, right: str) -> str:
    """A row of GAP; ``right``: A, B or neither."""
    found = [(name, text.index(name)) for name in (pronoun, a, b)]
    cells = [f"{found[0][0]}\t{found[0][1]}"]
    cells += [f"{name}\t{at}\t{str(role == right).upper()}" for role, (name, at) in zip("AB", found[1:], strict=True)]
    return f"test-{number}\t{text}\t" + "\t".join(cells) + "\tu\n"


def test_gap_is_what_a_plain_computation_gives(store: Store, tmp_path: Path) -> None:
    rows = [
        ("she fed it . the dog saw anna .", "she", "dog", "anna", "A"),  # the pronoun stands before both
        ("anna saw the dog . the man fed it .", "it", "anna", "dog", "B"),
        ("the dog was glad . her man saw anna .", "her", "dog", "anna", "B"),  # between them
        ("anna saw the man . it was glad .", "it", "anna", "man", "neither"),
    ]
    file = written(tmp_path, "gap.tsv", GAP + "".join(gap_row(n, *row) for n, row in enumerate(rows)))
    torch.manual_seed(1)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=8)
    config.initializer_range = 1.0
    folder = saved(tmp_path / "model", BertModel(config))
    made = probe_coreference.run(folder, [file], probe_coreference.Config(), store=store).artifact
    assert (made.counts["questions"], made.counts["without_antecedent"]) == (3, 1)
    opened = AutoModel.from_pretrained(folder, attn_implementation="eager")
    expected: dict[tuple[int, int], list[int]] = {}
    for text, pronoun, a, b, right in rows[:3]:
        words = text.split()
        ids = torch.tensor(
            [[trainings.SPECIAL.index("<s>"), *AutoTokenizer.from_pretrained(folder)(text)["input_ids"]]]
        )
        ids = torch.cat([ids, torch.tensor([[trainings.SPECIAL.index("</s>")]])], dim=1)
        maps = opened(ids, output_attentions=True).attentions
        for layer in range(3):
            for head in range(4):
                looks = dict(enumerate(maps[layer][0, head, 1 + words.index(pronoun), 1:-1].tolist()))
                its, other = words.index(a if right == "A" else b), words.index(b if right == "A" else a)
                anywhere = max((w for w in looks if w != words.index(pronoun)), key=lambda w: looks[w])
                found = expected.setdefault((layer, head), [0, 0])
                found[0] += looks[its] > looks[other]
                found[1] += anywhere == its
    for row in pq.read_table(made.path / "heads.parquet").to_pylist():
        assert [3 * row["accuracy"], 3 * row["any_word"]] == pytest.approx(expected[row["layer"], row["head"]])
    assert len({tuple(each) for each in expected.values()}) > 4, "otherwise this tests little"
    table = table_of(made)
    assert table.titles == ("", "all", "any word") and table.rows[0] == ("questions", "3", "3")
    assert [row[0] for row in table.rows[-2:]] == ["nearest mention", "rules in order"], "no candidate is a pronoun"
    assert "1 pronoun has no antecedent among the candidates" in table.notes[0]


def test_winobias_is_measured_for_and_against_stereotypes(store: Store, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    lines = "1 [The man] saw the cook . [she] was glad .\n2 The cook saw [the baker] . [it] was glad .\n"
    files = [written(tmp_path, f"{kind}_stereotyped.txt", lines) for kind in ("pro", "anti")]
    made = probe_coreference.run(folder, files, probe_coreference.Config(), store=store).artifact
    table = table_of(made)
    assert table.titles == ("", "all", "pro", "anti", "any word", "pro - anti")
    assert table.rows[0] == ("questions", "4", "2", "2", "4", "")
    assert {len(row) for row in table.rows} == {6}
    assert table.rows[-1] == ("rules in order", "50.0 %", "50.0 %", "50.0 %", "–", "+0.0"), "the nearer one"


def test_there_are_no_rules_where_every_candidate_is_right(store: Store, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    file = written(
        tmp_path, "one.conll", COREF.split("#begin document (one); part 1")[1].join(["#begin document (a);", ""])
    )
    made = probe_coreference.run(folder, [file], probe_coreference.Config(), store=store).artifact
    assert made.counts["questions"] == 1 and made.counts["baselines"] == {}
    assert "every rule is right" in table_of(made).notes[-1]


def test_documents_are_cut_or_read_in_windows_or_sentences(store: Store, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    file = written(tmp_path, "one.conll", COREF)

    def counts(**settings: Any) -> dict[str, Any]:
        config = probe_coreference.Config(max_length=8, **settings)
        return probe_coreference.run(folder, [file], config, store=store).artifact.counts

    cut = counts()  # six words fit beside the special tokens
    assert (cut["texts"], cut["cut_off_mentions"], cut["questions"]) == (2, 1, 2)
    whole = probe_coreference.run(folder, [file], probe_coreference.Config(max_length=8), store=store).artifact
    assert "1 of 6 mentions was cut off; --scope windows reads whole documents" in table_of(whole).notes[0]
    windows = counts(scope="windows")
    assert (windows["texts"], windows["cut_off_mentions"], windows["questions"]) == (3, 0, 1)
    assert counts(scope="sentences")["questions"] == 1
    with pytest.raises(InputError, match="no mention has an antecedent") as raised:
        counts(scope="sentences", limit=2)
    assert raised.value.hint == "a larger --max-length"


@pytest.mark.parametrize(
    ("length", "told"), [(128, "the model reads 10 tokens"), (9, "a larger --max-length reads more")]
)
def test_what_cuts_texts_is_said(store: Store, tmp_path: Path, length: int, told: str) -> None:
    model = matching()
    positions = model.embeddings.position_embeddings
    positions.weight = nn.Parameter(positions.weight[:10].detach())
    model.config.max_position_embeddings = 10
    rows = [
        ("anna saw anna and she fed", "she", "anna", "anna", "A"),
        ("anna saw the dog " * 3 + "she", "she", "anna", "dog", "A"),
    ]
    file = written(tmp_path, "gap.tsv", GAP + "".join(gap_row(n, *row) for n, row in enumerate(rows)))
    config = probe_coreference.Config(max_length=length)
    made = probe_coreference.run(saved(tmp_path / "model", model), [file], config, store=store).artifact
    assert f"1 of 6 mentions was cut off; {told}" in table_of(made).notes[0]


def test_split_words_are_one_word_and_special_tokens_are_their_own() -> None:
    # <s> an|na, a space that belongs to the next token, do|g </s>
    offsets, parts = [(0, 0), (0, 2), (2, 4), (4, 7), (7, 8), (0, 0)], [None, 0, 0, 0, 0, None]
    read = _read(["anna", "dog"], SimpleNamespace(offsets=offsets, sequence_ids=parts))
    assert read.words == [None, 0, 1, None] and read.numbers == [0, 1, 1, 2, 2, 3]
    assert read.row_of == {0: 1, 1: 2}


def test_attention_between_words_is_that_of_transformers(tmp_path: Path) -> None:
    tokenizer = trainings.tokenizer_files([*trainings.SPECIAL, *WORDS])
    model = BertModel(
        BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    (tmp_path / "model").mkdir()
    model.save_pretrained(tmp_path / "model")
    for name, data in tokenizer.items():
        (tmp_path / "model" / name).write_bytes(data)
    watched = WatchedModel(tmp_path / "model", length=32, device="cpu")
    words = ["anna", "saw", "dog"]
    read, by_site = watched.look(words)
    assert read.words == [None, 0, 1, 2, None]
    (attention,) = by_site.values()
    assert attention.shape == (2, 5, 5)
    opened = AutoModel.from_pretrained(tmp_path / "model", attn_implementation="eager")
    given = AutoTokenizer.from_pretrained(tmp_path / "model")(" ".join(words), return_tensors="pt")["input_ids"]
    ids = torch.tensor([[trainings.SPECIAL.index("<s>"), *given[0].tolist(), trainings.SPECIAL.index("</s>")]])
    expected = opened(ids, output_attentions=True).attentions[0][0]
    torch.testing.assert_close(attention, expected, atol=1e-5, rtol=1e-4)


CONLLU = """1\tthe\tthe\tDET\t_\t_\t2\tdet\t_\t_
2\tdog\tdog\tNOUN\t_\t_\t3\tnsubj\t_\t_
3\tsaw\tsee\tVERB\t_\t_\t0\troot\t_\t_
4\tanna\tanna\tPROPN\t_\t_\t3\tobj\t_\t_
5\t.\t.\tPUNCT\t_\t_\t3\tpunct\t_\t_

1\tanna\tanna\tPROPN\t_\t_\t2\tnsubj\t_\t_
2\tfed\tfeed\tVERB\t_\t_\t0\troot\t_\t_
3\tthe\tthe\tDET\t_\t_\t4\tdet\t_\t_
4\tman\tman\tNOUN\t_\t_\t2\tobj\t_\t_

"""


def test_dependencies_are_those_of_plain_loops(store: Store, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    config.initializer_range = 1.0
    folder = saved(tmp_path / "model", BertModel(config))
    file = written(tmp_path, "trees.conllu", CONLLU)
    made = probe_dependencies.run(folder, [file], probe_dependencies.Config(), store=store).artifact
    opened = AutoModel.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right: dict[tuple[int, int], list[int]] = {}
    for text, heads in (("the dog saw anna .", {0: 1, 1: 2, 3: 2}), ("anna fed the man", {0: 1, 2: 3, 3: 1})):
        own_ids = tokenizer(text, return_tensors="pt")["input_ids"][0].tolist()
        ids = torch.tensor([[trainings.SPECIAL.index("<s>"), *own_ids, trainings.SPECIAL.index("</s>")]])
        maps = opened(ids, output_attentions=True).attentions
        for layer, attention in enumerate(maps):
            for head in range(2):
                own = attention[0, head, 1:-1, 1:-1].tolist()
                for direction in range(2):
                    for word, its in heads.items():
                        row = own[word] if direction == 0 else [line[word] for line in own]
                        others = [value if place != word else -1 for place, value in enumerate(row)]
                        found = others.index(max(others)) == its
                        right.setdefault((layer, head), [0, 0])[direction] += found
    rows = pq.read_table(made.path / "heads.parquet").to_pylist()
    for row in rows:
        shares = [row["towards_head"], row["towards_dependent"]]
        assert shares == [pytest.approx(number / 6) for number in right[row["layer"], row["head"]]]
    relations = made.counts["relations"]
    assert set(relations) == {"det", "nsubj", "obj"}
    assert (relations["nsubj"]["offset"], relations["nsubj"]["offset_accuracy"]) == (1, 1.0)
    table = pq.read_table(made.path / "relations.parquet").to_pylist()
    assert len(table) == 3 * 2 * 4
    best = relations["obj"]["best"]
    assert best["accuracy"] == max(row["accuracy"] for row in table if row["relation"] == "obj")


def test_the_commands_print_tables(guide: Callable[..., Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    done = guide("probe", "coref", folder, written(tmp_path, "one.conll", COREF))
    assert done.code == 0 and done.out.startswith("probe/"), done.err
    assert "head 0-1, best on all" in done.err and "100.0 %" in done.err and "same head word" in done.err
    assert any(line.split() == ["questions", "3"] for line in done.err.splitlines())
    shown = guide("show", done.out.strip()).out
    assert all(line in shown for line in done.err.splitlines() if line.startswith(("head", "split", "nearest")))
    assert "best_by" not in shown
    done = guide("probe", "deps", folder, written(tmp_path, "trees.conllu", CONLLU), "--json")
    assert json.loads(done.out)["counts"]["probe"] == "deps"
    assert "nsubj" in done.err


def test_the_table_of_relations_names_those_that_it_leaves_out(guide: Callable[..., Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    lines = [f"{n}\tdog\tdog\tNOUN\t_\t_\t1\tr{n:02}\t_\t_\n" for n in range(2, 21)]
    first = "1\tsaw\tsee\tVERB\t_\t_\t0\troot\t_\t_\n"
    again = first + "2\tdog\tdog\tNOUN\t_\t_\t1\tr20\t_\t_\n"
    file = written(tmp_path, "trees.conllu", f"{first}{''.join(lines)}\n{again}\n")

    def relations(*flags: Any) -> tuple[list[str], list[str]]:
        told = guide("probe", "deps", folder, file, *flags).err.splitlines()
        return [line.split()[0] for line in told if line.startswith("r")][1:], [
            line for line in told if "more: " in line
        ]

    shown, (note,) = relations()
    assert shown == ["r20", *(f"r{n:02}" for n in range(2, 16))]
    assert note == "4 more: r16, r17, r18, r19; --min-words 1 shows all"
    assert relations("--min-words", 2)[0] == ["r20"], "although the artifact was there already"
    shown, notes = relations("--min-words", 1)
    assert len(shown) == 19 and not notes


def test_what_is_up_to_date_repeats_the_warnings_of_all_stages_behind_it(
    guide: Callable[..., Any], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model", matching())
    text = written(tmp_path, "text.txt", "anna saw the dog she fed it the man was glad .\n" * 2)
    command = ("probe", "sinks", folder, text, "--sequence-length", 8)
    first, second = guide(*command).err, guide(*command).err
    (warning,) = (line for line in first.splitlines() if line.startswith("warning: "))
    assert "were cut" in warning, "the sequences, which are made on the way, have it"
    assert "up to date" in second and second.splitlines().count(warning) == 1


def test_a_probe_without_its_file_is_shown_by_its_counts(guide: Callable[..., Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    made = guide("probe", "distance", folder, written(tmp_path, "text.txt", "anna saw anna .\n" * 3)).out.strip()
    assert "nearest" in guide("show", made).out.partition("inputs")[0]
    heads = next(Path("artifacts").glob("probe/*/heads.parquet"))
    heads.chmod(0o600)
    heads.write_bytes(b"")
    shown = guide("show", made)
    assert shown.code == 0 and "counts" in shown.out


def test_what_is_missing_is_noticed_before_a_model_is_opened(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "open", None)
    folder = saved(tmp_path / "model", matching())
    with pytest.raises(InputError, match=r"'nofile.conll': cannot be read"):
        probe_coreference.run(folder, ["nofile.conll"], store=store)
    with pytest.raises(InputError, match=r"no artifact 'nofile.txt'"):
        probe_sinks.run(folder, "nofile.txt", store=store)
    with pytest.raises(InputError, match=r"no artifact 'nomodel'"):
        probe_distance.run(folder, written(tmp_path, "text.txt", "anna saw anna .\n"), "nomodel", store=store)


def test_a_file_in_a_wrong_format_is_refused_before_the_model_is_opened(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchedModel, "of", None)
    folder, prose = saved(tmp_path / "model", matching()), written(tmp_path, "prose.txt", "anna saw the dog .\n")
    with pytest.raises(InputError, match=r"'prose.txt': no format of coreference"):
        probe_coreference.run(folder, [written(tmp_path, "one.conll", COREF), prose], store=store)
    tree = written(tmp_path, "one.conllu", "1\ta\ta\tX\t_\t_\t0\troot\t_\t_\n\n")
    with pytest.raises(InputError, match=r"'prose.txt', line 1: 1 column, CoNLL-U has 10"):
        probe_dependencies.run(folder, [tree, prose], store=store)
    with pytest.raises(InputError, match=r"'prose.txt', line 1: not a sentence"):
        probe_reflexives.run(folder, prose, store=store)


def test_what_cannot_be_probed_is_refused(store: Store, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    with pytest.raises(InputError, match="no format of coreference"):
        probe_coreference.run(folder, [written(tmp_path, "x.txt", "hm\n")], probe_coreference.Config(), store=store)
    text = "# text = a\n1\ta\ta\tX\t_\t_\t0\troot\t_\t_\n\n"
    with pytest.raises(InputError, match="no sentence with a tree"):
        probe_dependencies.run(folder, [written(tmp_path, "y.conllu", text)], probe_dependencies.Config(), store=store)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("data", ["coref-litbank/conll", "coref-gum/ontogum", "coref-gap/gap-validation.tsv"])
def test_real_files_are_probed(store: Store, tmp_path: Path, data: str) -> None:
    folder = saved(tmp_path / "model", matching())
    config = probe_coreference.Config(limit=6, scope="windows")
    made = probe_coreference.run(folder, [str(shared("data") / data)], config, store=store).artifact
    assert made.counts["questions"] > 3
    assert 0 <= made.counts["best"]["accuracy"] <= 1


def test_reflexives_that_match_are_not_reflexives_that_refer(store: Store, tmp_path: Path) -> None:
    """A head that looks at equal words finds an antecedent only where the words are equal."""
    folder = saved(tmp_path / "model", matching())
    lines = (
        "anna saw her man dog\t4\ther man\n" + "the dog fed the dog\t4\tthe dog\n" + "the dogs fed it\t3\tthe dogs\n"
    )
    file = written(tmp_path, "reflexives.tsv", lines)
    made = probe_reflexives.run(folder, file, probe_reflexives.Config(distractor="none"), store=store).artifact
    rows = pq.read_table(made.path / "heads.parquet").to_pylist()
    assert made.counts["confusion"] is None, "there is no other noun phrase"
    # "dogs" is no word of the tokenizer, but one token; the first "dog" has no equal word, so the row is even
    assert made.counts["sentences"] == 3
    assert [row["accuracy"] for row in rows] == [0.0, 0.0, 0.0, 0.0], "itself is as high as the equal word"
    with pytest.raises(InputError, match="line 1: not a sentence"):
        probe_reflexives.run(
            folder, written(tmp_path, "x.tsv", "a b c\t9\ta b\n"), probe_reflexives.Config(), store=store
        )


def test_the_confusion_of_a_layer_is_that_of_a_plain_computation(store: Store, tmp_path: Path) -> None:
    torch.manual_seed(2)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    config.initializer_range = 1.0
    folder = saved(tmp_path / "model", BertModel(config))
    text = "the dog saw the man . it fed anna"
    file = written(tmp_path, "r.tsv", f"{text}\t6\tthe dog\tthe man\tanna\n{text}\t6\tthe dog\n")
    made = probe_reflexives.run(folder, file, probe_reflexives.Config(distractor="none"), store=store).artifact
    opened = AutoModel.from_pretrained(folder, attn_implementation="eager")
    own = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    ids = torch.tensor([[trainings.SPECIAL.index("<s>"), *own, trainings.SPECIAL.index("</s>")]])
    found = made.counts["confusion"]
    assert found["sentences"] == 1 and found["even"] == pytest.approx(math.log2(5 / 2))
    for layer, attention in enumerate(opened(ids, output_attentions=True).attentions):
        row = attention[0].mean(0)[1 + 6, 1:-1].tolist()
        share = (row[0] + row[1]) / (row[0] + row[1] + row[3] + row[4] + row[8])
        assert found["layers"][layer] == pytest.approx(-math.log2(share), rel=1e-4)
    assert "2 sentences" in table_of(made).notes[0] and "bits in layer" in table_of(made).notes[1]


def test_a_head_that_looks_one_back_finds_an_antecedent_that_stands_there(store: Store, tmp_path: Path) -> None:
    model = matching(1, 1)
    with torch.no_grad():
        layer = model.encoder.layer[0].attention.self
        for linear in (layer.query, layer.key):
            linear.weight.zero_()
        # "it" asks for "dog"
        its, dog = (len(trainings.SPECIAL) + WORDS.index(word) for word in ("it", "dog"))
        layer.query.weight[0, its] = layer.key.weight[0, dog] = 5.0
    folder = saved(tmp_path / "model", model)
    file = written(tmp_path, "one.tsv", "the dog fed it\t3\tthe dog\nthe man fed it\t3\tthe man\n")
    made = probe_reflexives.run(folder, file, probe_reflexives.Config(distractor="after"), store=store).artifact
    (row,) = pq.read_table(made.path / "heads.parquet").to_pylist()
    assert row["accuracy"] == 0.5
    assert made.counts["mean"] == 0.5


def test_relevance_is_the_mean_attention_on_a_pattern(store: Store, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    config.initializer_range = 1.0
    folder = saved(tmp_path / "model", BertModel(config))
    texts = ["anna saw the dog .", "she fed it", "the man was glad ."]
    file = written(tmp_path, "data.jsonl", "".join(json.dumps({"text": text, "label": "x"}) + "\n" for text in texts))
    data = dataset.run({"valid": [file]}, dataset.Config(), store=store).reference
    made = probe_relevance.run(folder, data, probe_relevance.Config(batch_size=2), store=store).artifact
    rows = pq.read_table(made.path / "heads.parquet").to_pylist()
    opened = AutoModel.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total: dict[tuple[int, int], float] = {}
    for text in texts:
        own = tokenizer(text, return_tensors="pt")["input_ids"][0].tolist()
        ids = torch.tensor([[trainings.SPECIAL.index("<s>"), *own, trainings.SPECIAL.index("</s>")]])
        for layer, attention in enumerate(opened(ids, output_attentions=True).attentions):
            for head in range(2):
                back = sum(float(attention[0, head, i, i - 1]) for i in range(1, ids.shape[1])) / ids.shape[1]
                total[layer, head] = total.get((layer, head), 0.0) + back / len(texts)
    for row in rows:
        assert row["previous"] == pytest.approx(total[row["layer"], row["head"]], rel=1e-4)
        assert 0 <= row["matching_token"] <= 1
    counts = made.counts
    assert counts["patterns"]["previous"]["outstanding"] == [], "with four heads none can stand out"
    assert "dependency" in counts["left_out"] and "next" in counts["patterns"]
    with pytest.raises(InputError, match="the pattern dependency cannot be measured: it needs the feature word"):
        probe_relevance.run(folder, data, probe_relevance.Config(patterns=["dependency"]), store=store)
    conditions = probe_relevance.Config(patterns=["distance == 2", "distance != 2"])
    pictures = probe_relevance.run(folder, data, conditions, store=store).artifact.path.glob("*.png")
    assert {path.name for path in pictures} == {"heads-distance-2.png", "heads-distance-2-2.png"}


def test_a_head_of_the_plan_stands_out(store: Store, tmp_path: Path) -> None:
    data = trainings.sequences(store)
    plan = written(tmp_path, "plan.toml", '[[guide]]\npattern = "next"\nmechanism = "fix"\nlayers = [0]\nheads = [1]\n')
    model = trainings.train(store, data, plan=plan, layers=4, heads=4, steps=1).reference
    made = probe_relevance.run(model, data.reference, probe_relevance.Config(), store=store).artifact
    found = made.counts["patterns"]["next"]
    assert found["outstanding"] == ["0-1"]
    assert found["best"]["next"] > 0.8
    assert (made.path / "heads-next.png").is_file()


def test_relevance_of_a_condition_without_special_tokens_in_a_text_file(store: Store, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    text = written(tmp_path, "text.txt", "anna saw anna . she fed the man .\n")
    condition = "matching_token and not self"
    same = {"patterns": [condition, "matching_token"]}
    made = probe_relevance.run(folder, text, probe_relevance.Config(**same), store=store).artifact
    assert made.counts["sequences"] == 1 and made.counts["patterns"][condition]["best"]["head"] == 1
    few = probe_relevance.Config(**same, special=False, diagonal=False)
    without = probe_relevance.run(folder, text, few, store=store).artifact
    found = pq.read_table(without.path / "patterns.parquet").to_pylist()
    rows = {(row["pattern"], row["head"]): row for row in found if row["layer"] == 0}
    # of nine words four occur twice; a head that looks everywhere gives each other word an eighth
    even = rows[condition, 0]
    assert even["relevance"] == pytest.approx(4 / 9 / 8, abs=1e-6)
    assert even["lift"] == pytest.approx(1.0, abs=1e-6) and even["standard_error"] is None
    assert rows[condition, 1]["lift"] > 5
    assert rows["matching_token", 1]["relevance"] == rows[condition, 1]["relevance"], "its own place is left out"


def test_a_head_that_is_switched_off_says_nothing(store: Store, tmp_path: Path) -> None:
    data = finetunings.build(store, tmp_path, {"train": finetunings.reviews(24), "valid": finetunings.reviews(6)})
    trained = finetunings.train(store, data, steps=20, learning_rate=0.01).artifact
    config = probe_importance.Config(batch_size=4, by="off")
    made = probe_importance.run(trained.reference, data.reference, config, store=store).artifact
    rows = pq.read_table(made.path / "heads.parquet").to_pylist()
    same = probe_importance.Config(batch_size=4, by="off", limit=6)
    held_out = HeldOut({"model": trained, "sequences": store.load_input(made, "sequences")}, same)
    weights = {name: value.clone() for name, value in held_out.model.state_dict().items()}
    assert held_out.mean() == pytest.approx(made.counts["loss"])
    for row in rows:
        # without values a head adds nothing to the output matrix
        value = held_out.model.get_submodule(f"bert.encoder.layer.{row['layer']}.attention.self.value")
        size = held_out.model.config.hidden_size // held_out.model.config.num_attention_heads
        with torch.no_grad():
            for parameter in (value.weight, value.bias):
                parameter[row["head"] * size : (row["head"] + 1) * size] = 0
        assert held_out.mean() - made.counts["loss"] == pytest.approx(row["importance"], abs=1e-6)
        held_out.model.load_state_dict(weights)
    assert any(abs(row["importance"]) > 1e-4 for row in rows)
    module, *_ = held_out.handle.sites
    with switched_off(held_out.model, held_out.handle.sites, [(module, 0), (module, 1)]):
        assert held_out.mean() != pytest.approx(made.counts["loss"])
    assert held_out.mean() == pytest.approx(made.counts["loss"]), "the weights are back"


def test_masked_language_models_have_important_heads_too(store: Store) -> None:
    data = trainings.sequences(store)
    model = trainings.train(store, data, layers=2, heads=2, steps=2).artifact
    config = probe_importance.Config(batch_size=4, seed=3)
    made = probe_importance.run(model.reference, data.reference, config, store=store).artifact
    assert made.counts["task"] == "masked-lm"
    rows = pq.read_table(made.path / "heads.parquet").to_pylist()
    held_out = HeldOut({"model": model, "sequences": data}, config, config.seed)
    counted, total, count = Importance(held_out.model, held_out.handle.sites), 0.0, 0.0
    for loss in held_out.losses():
        (loss.total / loss.count).backward()
        total, count = total + float(loss.total), count + loss.count
    for site, scores in counted.scores().items():
        own = [row["importance"] for row in rows if row["layer"] == site.layer]
        torch.testing.assert_close(torch.tensor(own, dtype=torch.float64), scores, rtol=1e-4, atol=0)
    assert total / count == pytest.approx(held_out.mean(), rel=1e-5)


@pytest.mark.parametrize("accumulate", ["gradients", "scores"])
def test_importance_is_that_of_ones_own_gradients(store: Store, tmp_path: Path, accumulate: str) -> None:
    data = finetunings.build(store, tmp_path, {"train": finetunings.reviews(24), "valid": finetunings.reviews(6)})
    trained = finetunings.train(store, data, steps=3).artifact
    config = probe_importance.Config(batch_size=3, accumulate=accumulate)  # type: ignore[arg-type]
    made = probe_importance.run(trained.reference, data.reference, config, store=store).artifact
    rows = pq.read_table(made.path / "heads.parquet").to_pylist()
    model = AutoModelForSequenceClassification.from_pretrained(trained.path)
    tokenizer = AutoTokenizer.from_pretrained(trained.path)
    handle = guidance.install(model, guidance.Plan())
    counted = Importance(model, handle.sites)
    totals: dict[Any, torch.Tensor] = {}
    examples = finetunings.reviews(6)
    for some in (examples[:3], examples[3:]):
        given = tokenizer([row["text"] for row in some], return_tensors="pt", padding=True)
        labels = torch.tensor([model.config.label2id[row["label"]] for row in some])
        model(**given, labels=labels).loss.backward()
        if accumulate == "scores":
            totals = {site: totals.get(site, 0) + scores for site, scores in counted.scores().items()}
            model.zero_grad()
    expected = totals or counted.scores()
    for row in rows:
        (site,) = (site for site in expected if site.layer == row["layer"])
        assert row["importance"] == pytest.approx(float(expected[site][row["head"]]), rel=1e-4)
    assert {min(row["score"] for row in rows), max(row["score"] for row in rows)} == {0.0, 1.0}
    best = made.counts["best"]
    assert best["importance"] == max(row["importance"] for row in rows)
    # a plan chooses heads by this file
    plan = written(tmp_path, "plan.toml", '[[guide]]\nmechanism = "off"\nheads = ["least important 1"]\n')
    pruned = finetunings.train(store, data, steps=1, plan=plan, scores=str(made.path / "heads.parquet"))
    assert pruned.artifact.counts["steps"] == 1


@pytest.mark.parametrize("by", ["taylor", "off"])
def test_importance_of_a_loss_that_is_no_number_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: Any
) -> None:
    losses = HeldOut.losses
    nothing = lambda held_out: (replace(loss, total=loss.total * math.nan) for loss in losses(held_out))  # noqa: E731
    monkeypatch.setattr(HeldOut, "losses", nothing)
    data = finetunings.build(store, tmp_path, {"train": finetunings.reviews(24), "valid": finetunings.reviews(6)})
    trained = finetunings.train(store, data, steps=1).artifact
    with pytest.raises(NumericalError, match="the importance of layer 0, head 0 is nan"):
        probe_importance.run(trained.reference, data.reference, probe_importance.Config(by=by), store=store)


def test_importance_needs_a_head_for_the_task(store: Store, tmp_path: Path) -> None:
    data = finetunings.build(store, tmp_path, {"train": finetunings.reviews(24), "valid": finetunings.reviews(6)})
    folder = saved(tmp_path / "model", matching())
    with pytest.raises(InputError):
        probe_importance.run(folder, data.reference, probe_importance.Config(), store=store)
    text = written(tmp_path, "text.txt", "anna saw the dog .\n" * 9)
    for given, message in ((text, "a bert model without a head for any of"), (data.reference, "without a head")):
        with pytest.raises(InputError, match=message) as caught:
            probe_importance.run(folder, given, probe_importance.Config(), store=store)
        assert "evaluate" not in f"{caught.value.message} {caught.value.hint}", "that is another command"
    with pytest.raises(InputError, match="predicts no masked words") as caught:
        probe_pairs.run(folder, [written(tmp_path, "p.tsv", "a dog\tdog a\n")], probe_pairs.Config(), store=store)
    assert caught.value.hint and caught.value.hint.startswith("`guide probe blimp` takes")
    trained = finetunings.train(store, data, steps=1).reference
    with pytest.raises(InputError, match="has no sequences in 'test'"):
        probe_importance.run(trained, data.reference, probe_importance.Config(split="test"), store=store)


def test_the_loss_of_all_slices_is_that_of_an_evaluation(store: Store) -> None:
    data = trainings.sequences(store)
    model = trainings.train(store, data, layers=1, heads=2, steps=20).reference
    made = probe_loss.run(model, data.reference, probe_loss.Config(limit=0), store=store).artifact
    rows = pq.read_table(made.path / "slices.parquet").to_pylist()
    whole = rows[0]
    measured = evaluate.run(model, data.reference, evaluate.Config(split="valid"), store=store).artifact
    metrics = json.loads((measured.path / "metrics.json").read_text())
    assert whole["loss"] == pytest.approx(metrics["metrics"]["loss"], abs=1e-5)
    assert whole["accuracy"] == pytest.approx(metrics["metrics"]["accuracy"], abs=1e-6)
    for floor in ("unigram", "previous", "neighbours", "ngrams"):
        assert whole[floor] == pytest.approx(metrics["floors"][floor], abs=1e-9)
    slices = {row["slice"] for row in rows}
    assert {"frequency", "place", "neighbours"} <= slices
    for name in slices:
        own = [row for row in rows if row["slice"] == name]
        assert sum(row["tokens"] for row in own) == whole["tokens"]
        total = sum(row["loss"] * row["tokens"] for row in own)
        assert total / whole["tokens"] == pytest.approx(whole["loss"], abs=1e-9)
    assert (made.path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_text_that_is_itself_counted_has_no_floors(store: Store) -> None:
    data = trainings.sequences(store)
    model = trainings.train(store, data, layers=1, heads=2, steps=2).reference
    made = probe_loss.run(model, data.reference, probe_loss.Config(split="train"), store=store).artifact
    rows = pq.read_table(made.path / "slices.parquet").to_pylist()
    assert rows and all(row["ngrams"] is None for row in rows)
    assert "so there are no floors" in "\n".join(made.manifest["warnings"])


def test_sequences_of_a_text_are_no_longer_than_a_model_folder_can_read(store: Store, tmp_path: Path) -> None:
    from transformers import BertConfig, ModernBertConfig

    for config, expected in ((BertConfig(max_position_embeddings=64), 64), (ModernBertConfig(), 128)):
        config.save_pretrained(tmp_path / config.model_type)
        assert longest(str(tmp_path / config.model_type), 0, store) == expected
    assert longest(str(tmp_path / "bert"), 32, store) == 32


def test_only_models_of_words_have_a_loss(store: Store, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    text = written(tmp_path, "text.txt", "anna saw the dog .\n" * 9)
    with pytest.raises(InputError, match="predicts no words"):
        probe_loss.run(folder, text, probe_loss.Config(), store=store)


def even_decoder(heads: int = 2) -> LlamaForCausalLM:
    """A decoder with shared keys, whose queries are 0, so that all heads look alike at all keys that they see."""
    size = len(trainings.SPECIAL) + len(WORDS)
    sizes = {"vocab_size": size, "hidden_size": 8 * heads, "intermediate_size": 16, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=1))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    return model


def test_even_heads_of_a_decoder_are_at_chance_on_everything(store: Store, tmp_path: Path) -> None:
    """Seven tokens, of which the query at place t sees t + 1; the first one is seen by all, the last one by itself."""
    folder = saved(tmp_path / "llama", even_decoder())
    text = written(tmp_path, "text.txt", "anna saw the dog .\n")
    first, last = sum(1 / (t + 1) for t in range(7)) / 7, 1 / 7 / 7
    sinks = probe_sinks.run(folder, text, probe_sinks.Config(), store=store).artifact
    for row in pq.read_table(sinks.path / "heads.parquet").to_pylist():
        assert row["first"] == pytest.approx(first) and row["special"] == pytest.approx(first + last)
        assert row["entropy"] == pytest.approx(1.0) and row["highest"] == pytest.approx(first)
    assert sinks.counts["by_chance"] == {"special": pytest.approx(first + last), "first": pytest.approx(first)}
    for special in (True, False):
        config = probe_relevance.Config(special=special)
        made = probe_relevance.run(folder, text, config, store=store).artifact
        for row in pq.read_table(made.path / "patterns.parquet").to_pylist():
            lift = None if row["relevance"] == 0 else pytest.approx(1.0)
            assert row["lift"] == lift and (row["pattern"] != "next" or lift is None), row
    looked = one_text.look(Path(folder), "anna saw the dog .")
    for head in looked.heads:
        assert head.entropy == pytest.approx(1.0)
        assert "next" not in [pattern for pattern, _, _ in head.closest] and len(head.closest) > 3
        assert [lift for _, _, lift in head.closest] == pytest.approx([1.0] * len(head.closest))


def test_a_decoder_is_asked_only_about_what_stands_before(store: Store, tmp_path: Path) -> None:
    """All heads look alike at what they see; a plan fixes one at the token before."""
    model = even_decoder()
    folder = saved(tmp_path / "llama", model)
    guidance.save(
        guidance.install(model, guidance.Plan((guidance.Guide("previous", "fix", layers=(0,), heads=(1,)),))), folder
    )
    rows = [
        ("she fed it . the dog saw anna .", "she", "dog", "anna", "A"),  # the pronoun stands before both
        ("anna saw the dog . her man fed it .", "it", "anna", "dog", "B"),
        ("the dog was glad . her man saw anna .", "her", "dog", "anna", "A"),  # between them
    ]
    file = written(tmp_path, "gap.tsv", GAP + "".join(gap_row(n, *row) for n, row in enumerate(rows)))
    made = probe_coreference.run(folder, [file], probe_coreference.Config(), store=store).artifact
    assert (made.counts["questions"], made.counts["without_antecedent"]) == (1, 2)
    assert made.counts["best"]["accuracy"] == 0, "even attention is a tie, and the token before is no candidate"
    assert "2 pronouns have no antecedent among the candidates before it, or no other one" in table_of(made).notes[0]

    file = written(tmp_path, "trees.conllu", CONLLU)
    made = probe_dependencies.run(folder, [file], probe_dependencies.Config(), store=store).artifact
    found = {(row["layer"], row["head"]): row for row in pq.read_table(made.path / "heads.parquet").to_pylist()}
    # of six words two have their head before them, one of them beside it; the other four stand before their head, beside it
    assert [found[0, 1][name] for name in probe_dependencies.UNITS] == pytest.approx([1 / 6, 4 / 6])
    assert [made.counts["seen"][name] for name in probe_dependencies.UNITS] == pytest.approx([2 / 6, 4 / 6])
    assert ("obj", "2", "0-1", "towards head", "50.0 %", "100.0 %", "50.0 %", "-1") in table_of(made).rows
    assert "33.3 % from the word" in table_of(made).notes[-1]

    with pytest.raises(InputError, match="--distractor after has no effect in a causal model"):
        probe_reflexives.run(folder, None, probe_reflexives.Config(distractor="after"), store=store)
    for line, bits in (
        ("the man fed it the dog\t3\tthe man\tthe dog", 0),
        ("the dog the man fed it\t5\tthe man\tthe dog", 1),
    ):
        file = written(tmp_path, "sentences.tsv", line + "\n")
        made = probe_reflexives.run(folder, file, probe_reflexives.Config(distractor="none"), store=store).artifact
        confusion = made.counts["confusion"]
        assert (confusion["layers"][1], confusion["even"]) == (pytest.approx(bits, abs=1e-6),) * 2


def test_discovery_proposes_what_a_head_of_a_decoder_does(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of twelve heads looks at the token before, as if it had learned that; training would refuse the next one."""
    monkeypatch.setattr("guidance.probes.discovery.guided_heads", lambda handle: frozenset())
    model = even_decoder(heads=6)
    folder = saved(tmp_path / "llama", model)
    plan = guidance.Plan((guidance.Guide("previous", "fix", layers=(1,), heads=(4,)),))
    guidance.save(guidance.install(model, plan), folder)
    text = written(tmp_path, "text.txt", "anna saw the dog .\nshe fed it .\nthe man was glad .\n" * 8)
    scored = discover_score.run(folder, text, discover_score.Config(sequence_length=12), store=store).artifact
    assert scored.counts["task"] == "causal-lm"
    assert {tuple(each["heads"][0]) for each in scored.counts["candidates"]} == {(1, 4)}
    assert "previous" in scored.counts["proposed"] and "next" not in scored.counts["proposed"]
    accepted = discover_accept.run(scored.reference, store=store).artifact
    found = guidance.Plan.load(str(accepted.path / "plan.toml"))
    assert (found.guides[0].mechanism, found.guides[0].pattern) == ("fix", "previous")
    with pytest.raises(PlanError, match="next"):
        discover_accept.run(scored.reference, discover_accept.Config(patterns=["next"]), store=store)


def test_attention_on_tokens_that_say_nothing(store: Store, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", matching())
    text = written(tmp_path, "text.txt", "anna saw the dog .\n")
    made = probe_sinks.run(folder, text, probe_sinks.Config(), store=store).artifact
    rows = {(row["layer"], row["head"]): row for row in pq.read_table(made.path / "heads.parquet").to_pylist()}
    even = rows[0, 0]
    # seven tokens, two of them special, and a head that looks at all alike
    assert even["special"] == pytest.approx(2 / 7) and even["first"] == pytest.approx(1 / 7)
    assert even["entropy"] == pytest.approx(1.0) and even["highest"] == pytest.approx(1 / 7)
    assert even["itself"] == pytest.approx(5 / 7 / 7), "special tokens that look at themselves rest on special tokens"
    for row in rows.values():
        assert row["special"] + row["itself"] + row["ordinary"] == pytest.approx(1.0)
    assert rows[0, 1]["itself"] > even["itself"]
    assert made.counts["by_chance"] == {"special": pytest.approx(2 / 7), "first": pytest.approx(1 / 7)}


def test_random_weights_on_sequences_are_those_of_a_new_model_of_the_shape(store: Store, tmp_path: Path) -> None:
    text = written(tmp_path, "text.txt", "anna saw the cat .\n" * 5)
    model = matching()
    folder = saved(tmp_path / "model", model)
    torch.manual_seed(7)
    new = saved(tmp_path / "new", type(model)(model.config))
    for probe in (probe_sinks, probe_relevance, probe_distance):
        own, random, expected = (
            heads_of(probe.run(which, text, probe.Config(**settings), store=store).artifact)
            for which, settings in ((folder, {}), (folder, {"random": 7}), (new, {}))
        )
        assert random == expected != own
    with pytest.raises(InputError, match="--random is for the heads of one model"):
        probe_distance.run(folder, text, new, probe_distance.Config(random=7), store=store)


def test_a_head_of_a_decoder_that_looks_at_what_followed_is_an_induction_head(
    store: Store, tmp_path: Path, guide: Callable[..., Any]
) -> None:
    """A plan fixes head 1 of layer 1 at what followed the query's token before."""
    model = even_decoder()
    folder = saved(tmp_path / "llama", model)
    config = probe_induction.Config(sequences=4, length=5)
    plain = probe_induction.run(folder, config, store=store).artifact
    # the tokens of the second copy stand at places 6 to 10, after the token that begins sequences
    even = sum(1 / (place + 1) for place in range(6, 11)) / 5
    for row in pq.read_table(plain.path / "heads.parquet").to_pylist():
        assert [row[name] for name in probe_induction.UNITS] == [pytest.approx(even)] * 3
    assert plain.counts["by_chance"] == dict.fromkeys(probe_induction.UNITS, pytest.approx(even))
    plan = guidance.Plan((guidance.Guide("induction", "fix", layers=(1,), heads=(1,)),))
    guidance.save(guidance.install(model, plan), folder)
    made = probe_induction.run(folder, config, store=store).artifact
    best = made.counts["best"]["induction"]
    assert (best["layer"], best["head"], best["stack"]) == (1, 1, "decoder")
    assert [best[name] for name in probe_induction.UNITS] == [pytest.approx(1), 0, 0]
    table = table_of(made)
    assert table.rows[0] == ("1-1", "100.0 %", "0.0 %", "0.0 %") and table.rows[-1][0] == "by chance"
    shown = guide("probe", "induction", folder, "--length", 5, "--sequences", 4, "--random", 0)
    assert shown.code == 0 and "100.0 %" not in shown.out, "random weights follow no plan"


def test_a_head_of_an_encoder_that_looks_at_equal_tokens_is_a_duplicate_token_head(
    store: Store, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model", matching())
    config = probe_induction.Config(sequences=3, length=6, batch_size=2)
    made = probe_induction.run(folder, config, store=store).artifact
    rows = {(row["layer"], row["head"]): row for row in pq.read_table(made.path / "heads.parquet").to_pylist()}
    assert [rows[0, 0][name] for name in probe_induction.UNITS] == [pytest.approx(1 / 14)] * 3
    equal = rows[0, 1]
    # it looks at both places of a token alike, and at the 12 other tokens alike
    assert equal["duplicate"] > 2 / 14
    assert [equal["induction"], equal["previous"]] == [pytest.approx((1 - 2 * equal["duplicate"]) / 12, rel=1e-4)] * 2
    with pytest.raises(InputError, match="13 different tokens cannot be drawn from 12 ordinary tokens"):
        probe_induction.run(folder, probe_induction.Config(length=13), store=store)
    with pytest.raises(InputError, match="602 tokens with special ones; the model reads 512") as raised:
        probe_induction.run(folder, probe_induction.Config(length=300), store=store)
    assert raised.value.hint == "--length 255"


def test_settings_for_data_of_another_kind_are_told(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "model", matching())
    text = written(tmp_path, "text.txt", "anna saw the dog .\n" * 3)
    config = probe_distance.Config(sequence_length=8, parser="rules")
    made = probe_distance.run(folder, text, config, store=store).artifact
    assert "has no effect" not in caplog.text
    caplog.clear()
    sequences = made.manifest["inputs"]["sequences"]["recipe"]
    probe_distance.run(folder, sequences, folder, config.model_copy(update={"split": "train"}), store=store)
    assert caplog.text.count("--sequence-length 8 has no effect: it is for datasets and texts") == 1
    assert caplog.text.count("--parser rules has no effect") == 1


def test_heads_are_near_their_counterparts(store: Store, tmp_path: Path) -> None:
    one, other = (saved(tmp_path / name, matching(2, 3)) for name in ("one", "other"))
    text = written(tmp_path, "text.txt", "anna saw anna . she fed the man .\n" * 3)
    alone = probe_distance.run(one, text, store=store).artifact
    rows = {(row["layer"], row["head"]): row for row in pq.read_table(alone.path / "heads.parquet").to_pylist()}
    assert rows[0, 2]["nearest"] > 0.01 and rows[0, 0]["nearest"] == pytest.approx(0, abs=1e-9)
    assert all(row["counterpart"] is None for row in rows.values())
    pairs = pq.read_table(alone.path / "distances.parquet").to_pylist()
    assert len(pairs) == 36
    both = probe_distance.run(one, text, other, store=store).artifact
    found = pq.read_table(both.path / "heads.parquet").to_pylist()
    assert all(row["counterpart"] == pytest.approx(0, abs=1e-9) for row in found)
    assert both.counts["shown"] == "counterpart"
    shown = table_of(both)
    titles, rows_shown = shown.titles, shown.rows
    assert len(rows_shown) == 6 and {len(row) for row in rows_shown} == {len(titles)}
    assert titles == ("head", "nearest", "mean", "counterpart") and not shown.notes
    assert table_of(alone).titles == ("head", "nearest", "mean"), "one model has no counterparts"
    large = probe_distance.run(saved(tmp_path / "large", matching(2, 9)), text, store=store).artifact
    shown = table_of(large)
    assert len(shown.rows) == 16
    assert shown.notes == ("the first 8 and the last 8 of 18 heads; heads.parquet has all",)
    small = probe_distance.run(one, text, saved(tmp_path / "small", matching(1, 2)), store=store).artifact
    assert [row[0] for row in table_of(small).rows] == ["0-0", "0-1"], "the other heads have no counterpart"
    strange = saved(tmp_path / "strange", matching(1, 3))
    names = [*trainings.SPECIAL, *WORDS[::-1]]
    for name, data in trainings.tokenizer_files(names).items():
        (tmp_path / "strange" / name).write_bytes(data)
    with pytest.raises(InputError, match="other tokens"):
        probe_distance.run(one, text, strange, store=store)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_entropy_of_even_attention_is_one(is_causal: bool) -> None:
    valid_BT = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    seen = probe_attack.Watcher(torch.zeros_like(valid_BT), valid_BT, 0, is_causal)
    site = Site("encoder", "self", 0, 1, "layer.0")
    seen(site, even_attention(valid_BT, is_causal=is_causal) * valid_BT[:, None, :, None])
    assert seen.figures[site][:, 0, 0].tolist() == pytest.approx([1, 1])


def test_an_attack_of_the_plan_switches_units_off_and_attention_changes(store: Store, tmp_path: Path) -> None:
    data = finetunings.build(store, tmp_path, {"train": finetunings.reviews(24), "valid": finetunings.reviews(40)})
    plan = '[[guide]]\nmechanism = "random_mask"\nkind = "bernoulli"\nproportion = 0.3\nlayers = [0]\n'
    file = written(tmp_path, "plan.toml", plan)
    trained = finetunings.train(store, data, steps=3, plan=file).reference
    config = probe_attack.Config(batch_size=4)
    made = probe_attack.run(trained, data.reference, config, store=store).artifact
    first, second = made.counts["by_layer"]
    assert made.counts["examples"] == 40
    assert first["masked"] == pytest.approx(0.3, abs=0.05) and second["masked"] is None
    # of rows that are nearly even, three tenths of the keys are gone
    assert first["entropy"] - first["entropy_attacked"] > 0.05
    assert first["highest_attacked"] > 1.2 * first["highest"]
    rows = pq.read_table(made.path / "heads.parquet").to_pylist()
    assert {"entropy", "entropy_attacked", "special", "special_attacked"} <= set(rows[0])
    assert (made.path / "maps.png").read_bytes().startswith(b"\x89PNG")
    again = probe_attack.run(
        trained, data.reference, probe_attack.Config(batch_size=7), store=store, force=True
    ).artifact
    assert again.counts["by_layer"][0]["masked"] == pytest.approx(first["masked"], abs=1e-9), "whatever the batches"
    large = probe_attack.run(trained, data.reference, probe_attack.Config(seed=2**62), store=store).artifact
    assert large.counts["by_layer"][0]["masked"] == pytest.approx(0.3, abs=0.05)
    plain = finetunings.train(store, data, steps=1).reference
    with pytest.raises(InputError, match="attacks nothing"):
        probe_attack.run(plain, data.reference, probe_attack.Config(), store=store)


@pytest.mark.parametrize("by", ["freelb", "smart"])
def test_perturbed_embeddings_change_attention(store: Store, tmp_path: Path, by: Any) -> None:
    data = finetunings.build(store, tmp_path, {"train": finetunings.reviews(24), "valid": finetunings.reviews(6)})
    trained = finetunings.train(store, data, steps=30, learning_rate=0.01).reference
    steps = {"steps": 2} if by == "freelb" else {}
    strong = probe_attack.Config(by=by, rate=3.0, seed=2**62, **steps)
    made = probe_attack.run(trained, data.reference, strong, store=store).artifact
    layers = made.counts["by_layer"]
    assert all(row["masked"] is None for row in layers)
    moved = max(abs(row["entropy"] - row["entropy_attacked"]) for row in layers)
    weak = probe_attack.run(trained, data.reference, probe_attack.Config(by=by, rate=1e-6, start=0.0), store=store)
    still = max(abs(row["entropy"] - row["entropy_attacked"]) for row in weak.artifact.counts["by_layer"])
    assert moved > 1e-3 > still
    with pytest.raises(InputError, match="there is no layer 9: the model has layers 0 to 1"):
        probe_attack.run(trained, data.reference, probe_attack.Config(by=by, layer=9), store=store)
    folder = saved(tmp_path / "model", matching())
    with pytest.raises(InputError):
        probe_attack.run(folder, data.reference, probe_attack.Config(by=by), store=store)


@pytest.mark.parametrize(
    ("stage", "settings", "flag"),
    [
        (probe_attack, {"by": "smart", "steps": 50}, "steps"),
        (probe_attack, {"rate": 0.1}, "rate"),
        (probe_attack, {"start": 0.0}, "start"),
        (probe_importance, {"by": "off", "form": "joint"}, "form"),
        (probe_importance, {"by": "off", "accumulate": "scores"}, "accumulate"),
    ],
)
def test_settings_that_a_probe_does_not_read_are_refused(
    store: Store, stage: Any, settings: dict[str, Any], flag: str
) -> None:
    with pytest.raises(InputError, match=f"--{flag} has no effect: "):
        stage.run("model", "data", stage.Config(**settings), store=store)
