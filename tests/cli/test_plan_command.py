"""`guide plan show`, `check`, `diff` and `new` on the command line."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from guidance.guide import KEYS, Guide
from guidance.mechanisms import MECHANISMS
from guidance.models.families import FAMILIES
from guidance.patterns import PATTERNS
from guidance.plan import Plan, presets
from guidance.sites import stack_of_inputs
from pipelines.views import plans

MIXED = """
[pal]
heads = 2
width = 64
layers = ["first 2"]

[[guide]]
name = "local"
pattern = { or = ["next", { name = "window", size = 5 }] }
mechanism = "mask"
layers = ["first 2"]
heads = ["least important 3"]

[[guide]]
pattern = "dependency"
mechanism = "bias"
layers = [2, 3]
heads = [0, 1]
outside = 0.1

[[guide]]
pattern = "same_segment"
mechanism = "mask"
heads = ["pal:0"]

[[guide]]
mechanism = "off"
layers = [3]
heads = ["last 1"]
enabled = false

[[guide]]
mechanism = "adversary"
weight = { 1 = 2.0, 4 = 0.5 }
schedule = "linear"
hold_steps = 10
"""

SCORES = [(0, 0, 0.5), (0, 1, 0.1), (0, 2, 0.9), (0, 3, 0.2), (1, 0, 0.3), (1, 1, 0.8), (1, 2, 0.7), (1, 3, 0.6)] + [
    (layer, head, 1.0) for layer in (2, 3) for head in range(4)
]


@pytest.fixture
def files(guide):
    """``mixed.toml``, and a table of head scores in every format."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = [{"layer": la, "head": h, "score": s} for la, h, s in SCORES]
    Path("mixed.toml").write_text(MIXED)
    Path("scores.json").write_text(json.dumps(rows))
    Path("nested.json").write_text(json.dumps([[s for la, _, s in SCORES if la == layer] for layer in range(4)]))
    Path("scores.csv").write_text("layer,head,score\n" + "".join(f"{la},{h},{s}\n" for la, h, s in SCORES))
    parquet.write_table(pa.Table.from_pylist(rows), "scores.parquet")


# show


def test_without_a_plan_the_presets_are_listed_with_their_titles(guide):
    lines = guide("plan", "show").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [f"preset:{name}" for name in sorted(presets())]
    assert all(len(line.split()) > 3 for line in lines[1:])
    for name, text in presets().items():
        title, after = text.splitlines()[:2]
        assert title.startswith("# ") and not title.endswith(".") and after in ("", "#"), (
            f"{name}: not a title in one line"
        )
    listed = json.loads(guide("plan", "show", "--json").out)["presets"]
    assert {"name": "preset:ag", "summary": lines[1].split(maxsplit=1)[1]} in listed


@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_shown_and_checked_on_a_suitable_model(guide, name):
    model = "bart:6x8" if "decoder" in presets()[name] else "roberta:12x12"
    shown = guide("plan", "show", f"preset:{name}", "--model", model)
    assert shown.code == 0, shown.err
    plan = Plan.load(f"preset:{name}")
    assert len([line for line in shown.out.splitlines() if re.match(r"\d+  [a-z]", line)]) == len(plan.guides)
    checked = guide("plan", "check", f"preset:{name}", "--model", model)
    assert (checked.code, checked.out.count("\n")) == (0, 1), checked.err
    assert checked.out.startswith(f"ok: {len(plan.guides)} guide")


def test_show_has_one_row_per_guide_with_its_settings(guide, files):
    rows = {row["label"]: row for row in json.loads(guide("plan", "show", "mixed.toml", "--json").out)["guides"]}
    assert list(rows) == ["local", "dependency", "same_segment", "off", "adversary"]
    assert rows["local"]["pattern"] == "next or window(size=5)"
    assert (rows["local"]["layers"], rows["local"]["heads"]) == ("first 2", "least important 3")
    assert rows["dependency"]["rest"] == "outside = 0.1"
    assert (rows["dependency"]["weight"], rows["dependency"]["schedule"]) == ("-", "-")
    assert rows["off"]["rest"] == "enabled = false"
    assert (rows["adversary"]["pattern"], rows["adversary"]["place"]) == ("-", "encoder self")
    assert rows["adversary"]["weight"] == "2; 0.5 from 4 layers on"
    assert rows["adversary"]["schedule"] == "linear, hold 10"
    assert "added heads: width = 64, heads = 2" in guide("plan", "show", "mixed.toml").out


@pytest.mark.parametrize(("model", "weight"), [("llama:12x4", "10"), ("gpt2:2x4", "100")])
def test_rows_for_a_causal_model_show_its_stack_and_the_weight_for_its_depth(guide, model, weight):
    shown = guide("plan", "show", "preset:ag-causal", "--model", model)
    assert shown.code == 0, shown.err
    rows = [re.split(r" {2,}", line) for line in shown.out.splitlines()[1:3]]
    assert [(row[2], row[4], row[7]) for row in rows] == [
        ("previous", "decoder self", weight),
        ("first", "decoder self", weight),
    ]


def test_show_explains_rows_whose_options_make_something_else_of_their_mechanism(guide):
    Path("learned.toml").write_text(
        '[[guide]]\nmechanism = "gate"\ninput = "query"\nelementwise = true\n'
        '[[guide]]\npattern = "first"\nmechanism = "bias"\n'
        '[[guide]]\npattern = "next"\nmechanism = "bias"\nlearn = true\n'
        '[[guide]]\npattern = "self"\nmechanism = "attention_loss"\ndistance = "kl"\nmass = true\naway = true\n'
    )
    answer = guide("plan", "show", "learned.toml")
    assert 'input = "query", elementwise = true' in answer.out
    assert answer.out.splitlines()[5:] == [
        "guide 1: a factor for each token and channel: 2 sigmoid(W x + b) of the token's hidden state x, W = b = 0 at first",
        "guide 3: each head learns how strong its bias is: the logarithms of inside and outside times a number, 1 at first",
        "guide 4: pushes attention away from the pattern: -log(1 - m), where m is what its keys get together",
    ]
    rows = json.loads(guide("plan", "show", "learned.toml", "--json").out)["guides"]
    assert [bool(row["explanation"]) for row in rows] == [True, False, True, True]


@pytest.mark.parametrize("scores", ["scores.json", "nested.json", "scores.csv", "scores.parquet"])
def test_with_a_model_show_lists_the_selected_heads(guide, files, scores):
    answer = guide("plan", "show", "mixed.toml", "--model", "bert:4x4", "--scores", scores)
    assert answer.code == 0, answer.err
    rows = [line for line in answer.out.splitlines() if re.match(r"\d  [a-z]", line)]
    # the three lowest of layers 0 and 1 are 0.1, 0.2 and 0.3
    assert "layer 0: 1, 3; layer 1: 0" in rows[0]
    assert re.search(r"2-3 +0-1 ", rows[1]) and re.search(r"0-1 +added 0 ", rows[2])
    assert re.search(r"none +none", rows[3]) and re.search(r"0-3 +0-3 +0.5 ", rows[4])
    own, added = answer.out.split("the guides on each head, by number\n")[1:]
    assert [line.split() for line in own.splitlines()[:5]] == [
        ["LAYER", "h0", "h1", "h2", "h3"],
        ["0", "5", "1+5", "5", "1+5"],
        ["1", "1+5", "5", "5", "5"],
        ["2", "2+5", "2+5", "5", "5"],
        ["3", "2+5", "2+5", "5", "5"],
    ]
    assert [line.split() for line in added.splitlines()] == [["LAYER", "h0", "h1"], ["0", "3", "."], ["1", "3", "."]]


def test_guides_of_whole_layers_are_shown_on_no_head(guide):
    Path("stream.toml").write_text(
        '[[guide]]\npattern = "previous"\nmechanism = "mix"\nlayers = [0]\n\n'
        '[[guide]]\npattern = "next"\nmechanism = "fix"\nheads = [1]\n'
    )
    answer = guide("plan", "show", "stream.toml", "--model", "bert:2x2")
    assert re.search(r"mix +encoder self +0 +whole layer ", answer.out)
    _, grid = answer.out.split("the guides on each head, by number\n")
    assert [line.split() for line in grid.splitlines()] == [
        ["LAYER", "whole", "h0", "h1"],
        ["0", "1", ".", "2"],
        ["1", ".", ".", "2"],
    ]


def test_reach_as_json_names_stack_attention_layer_and_heads(guide):
    guides = json.loads(guide("plan", "show", "preset:ag", "--model", "roberta:2x4", "--json").out)["guides"]
    assert guides[1]["reach"] == [
        {"stack": "encoder", "attention": "self", "layer": layer, "heads": [1]} for layer in range(2)
    ]
    assert guides[2]["reach"] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_the_requested_numbers_of_layers_and_heads(store, family):
    for name in (family, family.replace("_", "-")):
        shape = plans.read_shape(f"{name}:3x5", store)
        of_inputs = (stack_of_inputs(shape.sites), "self")
        assert [s.layer for s in shape.sites if (s.stack, s.attention) == of_inputs] == [0, 1, 2]
        assert {site.num_heads for site in shape.sites} == {5}
        assert all(parameter.is_meta for parameter in shape.model.parameters())


def test_a_model_may_be_a_folder_a_configuration_an_artifact_or_a_family(guide):
    from transformers import BertConfig

    BertConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=32).save_pretrained("folder")
    for model in ("folder", "folder/config.json", "bert:2x4"):
        assert "of the 8 heads" in guide("plan", "check", "preset:ag", "--model", model).out
    Path("text.txt").write_text("The dog ran. It barked and ran home.\n" * 40)
    corpus = guide("build-corpus", "text.txt").out.strip()
    tokenizer = guide("build-tokenizer", corpus, "--vocab-size", 300).out.strip()
    sequences = guide("build-sequences", corpus, tokenizer, "--max-length", 16).out.strip()
    shape = ["--layers", 2, "--hidden", 16, "--heads", 2, "--ffn", 16]
    trained = guide("pretrain", sequences, "--steps", 1, "--batch-size", 2, *shape, "--name", "small")
    assert trained.code == 0, trained.err
    assert "of the 4 heads of small" in guide("plan", "check", "preset:ag", "--model", "small").out
    config = Path("artifacts", trained.out.strip(), "config.json")
    config.write_text(config.read_text().replace('"num_attention_heads": 2', '"num_attention_heads": 1'))
    answer = guide("plan", "show", "preset:ag", "--model", "small")
    assert answer.code == 2
    assert "config.json: damaged" in answer.err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("num_attention_heads", 2**33),
    ],
)
def test_a_configuration_that_no_model_can_have_is_refused_at_once(guide, key, value):
    settings = {"model_type": "bert", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, key: value}
    Path("config.json").write_text(json.dumps(settings))
    answer = guide("plan", "show", "preset:ag", "--model", "config.json")
    assert answer.code == 2
    assert f"config.json: not a configuration of bert ({key} is {value}, not " in answer.err


def test_added_heads_of_layers_that_share_a_module_are_shown_for_each_layer(guide):
    Path("plan.toml").write_text('[pal]\nheads = 2\nlayers = ["last 2"]\nwidth = 8\n')
    answer = guide("plan", "check", "plan.toml", "--model", "albert:4x2")
    assert answer.code == 2
    assert "[pal]: layer 2 shares its module with layers that get no added heads" in answer.err
    Path("plan.toml").write_text(
        '[pal]\nheads = 2\nwidth = 8\n[[guide]]\npattern = "next"\nmechanism = "mask"\nheads = ["pal:0"]'
    )
    answer = guide("plan", "check", "plan.toml", "--model", "albert:4x2")
    assert answer.code == 0, answer.err
    assert answer.out == "ok: 1 guide, on 0 of the 8 heads of albert:4x2 and 4 added ones\n"


# check


def test_check_says_which_data_the_guides_need_and_which_command_builds_it(guide, files):
    answer = guide("plan", "check", "mixed.toml", "--model", "bert:4x4", "--scores", "scores.csv")
    assert answer.out == "ok: 5 guides, on 16 of the 16 heads of bert:4x4 and 2 added ones\n"
    assert (
        "guide 2 (dependency) reads word, head: it is a column of the artifact that `guide build-masks`" in answer.err
    )
    assert "guide off is disabled, or selects no head" in answer.err
    needs = json.loads(guide("plan", "check", "mixed.toml", "--json").out)["needs"]
    assert [(need["label"], need["name"]) for need in needs] == [
        ("local", "scores of heads"),
        ("dependency", "word"),
        ("dependency", "head"),
        ("same_segment", "segment"),
    ]
    needs = json.loads(guide("plan", "check", "preset:mcmisp", "--json").out)["needs"]
    assert {need["name"] for need in needs} == {"cooccurrence", "mispredicted"}


ROW = '[[guide]]\npattern = "next"\nmechanism = "{}"\nheads = [{}]\n'


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ("", None, "this plan has no guides"),
        ("[[guide", None, "not a plan"),
        (
            ROW.format("attention_los", 0),
            None,
            "guide 1: unknown mechanism 'attention_los'; did you mean 'attention_loss'?",
        ),
        (ROW.format("mask", 0).replace("next", "nxt"), None, "guide 1: unknown pattern 'nxt'; did you mean 'next'?"),
        (ROW.format("mask", 0) + "hads = [1]", None, "did you mean 'heads'?"),
        (ROW.format("mask", 2), "roberta:2x2", "plan.toml: guide 1 (next): head 2 does not exist"),
        (ROW.format("mask", 0) + "layers = [2]", "roberta:2x2", "plan.toml: guide 1 (next): layer 2 does not exist"),
        (
            ROW.format("mask", 0) + 'stack = "decoder"',
            "roberta:2x2",
            "plan.toml: guide 1 (next): the model has no decoder",
        ),
        (
            ROW.format("fix", 0) + ROW.format("mask", 0),
            "roberta:2x2",
            "plan.toml: guide 1 (next) replaces the attention",
        ),
        (ROW.format("mask", '"pal:0"'), "roberta:2x2", "plan.toml: guide 1 (next): it is about added heads"),
        (ROW.format("mask", '"least important 1"'), "roberta:2x2", "needs a table of scores"),
        (ROW.format("mask", '"fraction 0.1"'), "roberta:2x2", "plan.toml: guide 1 (next) selects no head"),
        ("[pal]\nlayers = [5]", "roberta:2x2", "plan.toml: [pal]: layer 5 does not exist"),
        (ROW.format("mask", 0), "robreta:2x2", "did you mean 'roberta'?"),
        (ROW.format("mask", 0), "gptj:2x2", "unknown family of models 'gptj'"),
        (ROW.format("mask", 0), "gpt2:2x2", "guide 1 (next): the pattern 'next' names later tokens only"),
        (ROW.format("mask", 0), "roberta:0x2", "roberta:0x2 has no heads"),
        (ROW.format("mask", 0), "nowhere", "nowhere: no such model"),
        (ROW.format("mask", 0), ".", "not a model folder (no config.json)"),
        (ROW.format("mask", 0), "plan.toml", "plan.toml: not a model configuration"),
    ],
    ids=range(20),
)
def test_a_plan_that_is_wrong_or_does_not_fit_the_model_is_refused_and_its_row_named(guide, text, model, message):
    Path("plan.toml").write_text(text)
    answer = guide("plan", "check", "plan.toml", *(["--model", model] if model else []))
    assert answer.code == 2, answer.err
    assert message in answer.err
    assert answer.out == ""
    assert len(answer.err.splitlines()) <= 20


def test_a_model_of_a_family_that_cannot_be_guided_is_refused(guide):
    from transformers import GPTJConfig

    GPTJConfig(n_layer=1, n_head=2, n_embd=8, rotary_dim=4).save_pretrained("gpt")
    answer = guide("plan", "check", "preset:ag", "--model", "gpt")
    assert answer.code == 2
    assert "no attention module that can be guided" in answer.err and "supported: " in answer.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not a table of scores"),
        ("[]", "no scores found"),
        ('[{"layer": 0, "head": 0}]', "not a table of scores (row 1 has no column score)"),
        ('[[1, 2], {"layer": 0}]', "row 1 is not a table"),
        ('{"layer": [0], "head": [0], "score": [1]}', "it is no list of rows"),
        ('[{"layer": 0, "head": 0, "score": ""}]', "row 1 has no score"),
        ('[{"layer": 0, "head": 0, "score": [1]}]', "row 1: float() argument must be"),
        ('[{"layer": 0, "head": 0, "score": 1}, {"layer": 0, "head": 0, "score": 2}]', "occurs twice"),
        ('[{"layer": 0, "head": 0, "score": 1}]', "no score for layer 0, head 1"),
        ("7", "not a table of scores"),
        ('[[1, "x"]]', "not a table of scores"),
        (f"[[{'9' * 5000}]]", "not a table of scores (a number has too many digits)"),
        ("[[NaN, 1], [1, 1]]", "NaN for layer 0, head 0"),
        ('[{"layer": true, "head": 0, "score": 1}]', "True is not a whole number"),
        ('[{"layer": 0, "head": 1.7, "score": 1}]', "1.7 is not a whole number"),
    ],
)
def test_scores_that_do_not_fit_the_model_are_refused(guide, text, message):
    Path("plan.toml").write_text(ROW.format("mask", '"least important 1"'))
    Path("scores.json").write_text(text)
    answer = guide("plan", "check", "plan.toml", "--model", "roberta:2x2", "--scores", "scores.json")
    assert answer.code == 2, answer.out
    assert message in answer.err
    Path("twice.csv").write_text("layer,head,score,score\n0,0,1,2\n")
    twice = guide("plan", "check", "plan.toml", "--model", "roberta:2x2", "--scores", "twice.csv")
    assert (twice.code, "two columns are called score" in twice.err) == (2, True)
    missing = guide("plan", "check", "plan.toml", "--model", "roberta:2x2", "--scores", "none.csv")
    assert (missing.code, "none.csv: cannot be read" in missing.err) == (2, True)
    assert "give --model too" in guide("plan", "check", "plan.toml", "--scores", "scores.json").err


@pytest.mark.parametrize(("heads", "read"), [("0", False), ('"least important 1"', True)])
def test_scores_that_select_no_head_are_named(guide, heads, read):
    Path("plan.toml").write_text(ROW.format("mask", heads))
    Path("scores.json").write_text("[[1, 2], [3, 4]]")
    for command in ("show", "check"):
        answer = guide("plan", command, "plan.toml", "--model", "roberta:2x2", "--scores", "scores.json")
        assert (answer.code, "no guide of the plan selects heads by them" in answer.err) == (0, not read)


def test_a_preset_without_its_prefix_gets_a_suggestion(guide):
    for command in ("show", "check"):
        answer = guide("plan", command, "ag")
        assert (answer.code, "did you mean preset:ag?" in answer.err) == (2, True)
    assert "did you mean 'ag'?" in guide("plan", "show", "preset:agg").err


# diff


def test_equal_plans_do_not_differ_however_they_are_formatted(guide):
    Path("copy.toml").write_text(Plan.load("preset:ag").dumps())
    answer = guide("plan", "diff", "preset:ag", "copy.toml", "--fail-if-different")
    assert (answer.code, answer.out) == (0, "")
    assert "the plans are equal" in answer.err
    assert json.loads(guide("plan", "diff", "preset:ag", "copy.toml", "--json").out)["equal"]


def test_rows_are_matched_by_label_and_compared_key_by_key(guide):
    Path("a.toml").write_text(ROW.format("mask", 0) + '[[guide]]\nmechanism = "off"\nheads = [1]\n')
    Path("b.toml").write_text(
        '[pal]\nheads = 2\n[[guide]]\nmechanism = "gate"\n' + ROW.format("mask", 3) + "layers = [1]\n"
    )
    answer = guide("plan", "diff", "a.toml", "b.toml")
    assert answer.code == 0
    assert answer.out.splitlines()[:7] == [
        "~ next",
        "    heads: [0] -> [3]",
        "    layers: default -> [1]",
        "- off",
        '    mechanism: "off"',
        "    heads: [1]",
        "+ gate",
    ]
    assert "+ [pal]" in answer.out and "    heads: 2" in answer.out
    found = json.loads(guide("plan", "diff", "a.toml", "b.toml", "--json").out)["differences"]
    assert [(entry["row"], entry["change"]) for entry in found] == [
        ("next", "changed"),
        ("off", "removed"),
        ("gate", "added"),
        ("[pal]", "added"),
    ]


def test_a_different_order_of_rows_is_a_difference(guide):
    first, second = ROW.format("mask", 0), ROW.format("mask", 1).replace("next", "previous")
    Path("a.toml").write_text(first + second)
    Path("b.toml").write_text(second + first)
    assert guide("plan", "diff", "a.toml", "b.toml").out == "~ order\n    rows: next, previous -> previous, next\n"


def test_a_difference_is_an_error_only_with_fail_if_different(guide):
    assert guide("plan", "diff", "preset:ag", "preset:roles").code == 0
    answer = guide("plan", "diff", "preset:ag", "preset:roles", "--fail-if-different")
    assert answer.code == 5
    assert "differ in 8 rows" in answer.err


# new


def test_a_new_plan_is_valid_and_explains_every_key_pattern_and_mechanism(guide):
    text = guide("plan", "new").out
    assert [guide.label for guide in Plan.parse(text).guides] == ["next", "previous"]
    assert {*KEYS, "options"} == {item.name for item in dataclasses.fields(Guide)}
    for name in (*PATTERNS, *MECHANISMS, *KEYS):
        assert re.search(rf"^#   {name}\*?( |$)", text, re.M), name
    Path("new.toml").write_text(text)
    assert guide("plan", "check", "new.toml", "--model", "roberta:4x4").code == 0


def test_every_commented_row_is_valid_once_uncommented(guide):
    spare = guide("plan", "new").out.split("Remove the # to use one.\n")[1]
    rows = [re.sub(r"^# ", "", block, flags=re.M) for block in spare.split("#\n") if block.strip()]
    read = [Plan.parse(row) for row in rows]
    assert [plan.guides[0].mechanism for plan in read if plan.guides] == list(MECHANISMS)
    assert sum(plan.pal is not None for plan in read) == 1
    for plan in read:
        for one in plan.guides:
            assert one.bound_mechanism == MECHANISMS[one.mechanism]()


@pytest.mark.parametrize("name", presets())
def test_a_new_plan_from_a_preset_equals_the_preset(guide, name):
    for given in (name, f"preset:{name}"):
        assert Plan.parse(guide("plan", "new", "--preset", given).out) == Plan.load(f"preset:{name}")


def test_an_existing_file_is_overwritten_only_with_force(guide):
    answer = guide("plan", "new", "--output", "plan.toml")
    assert (answer.code, answer.out) == (0, "plan.toml\n")
    Path("plan.toml").write_text("mine")
    answer = guide("plan", "new", "--output", "plan.toml")
    assert (answer.code, "--force" in answer.err, Path("plan.toml").read_text()) == (2, True, "mine")
    assert guide("plan", "new", "--output", "plan.toml", "--force", "--preset", "roles").code == 0
    assert Plan.load("plan.toml") == Plan.load("preset:roles")
    assert guide("plan", "new", "--output", "no/plan.toml").code == 2
    assert guide("plan", "new", "--preset", "rolse").code == 2
