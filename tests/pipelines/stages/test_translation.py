"""Translation from files to BLEU: losses, plans, the files of the model, and evaluation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import guidance
from guidance.errors import InputError, PlanError
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.stages import (
    dataset,
    evaluate,
    idf,
    masks,
    pretrain,
    probe_importance,
    probe_relevance,
    sequences,
    tokenizer,
)
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.batches import Examples
from pipelines.training.learner import Setup
from pipelines.training.learners.translation import TranslationLearner, build_model
from pipelines.training.models import read_tokenizer
from pipelines.training.objectives.translation import Translation
from tests import trainings
from tests.trainings import one_thread  # noqa: F401

WORDS = [f"{a}{b}" for a in "bdfg" for b in "aei"]
SHAPE: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "dropout": 0.0, "attention_dropout": 0.0}


def translation_of(source: str) -> str:
    """The language of these tests: every word spelled backwards."""
    return " ".join(word[::-1] for word in source.split())


def parallel(folder: Path, numbers: dict[str, int]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Files of sentences of two to four words, and of their translations."""
    drawn = random.Random(1)
    files: dict[str, list[str]] = {}
    pairs: dict[str, list[str]] = {}
    for split, number in numbers.items():
        rows = [" ".join(drawn.choices(WORDS, k=drawn.randint(2, 4))) + " ." for _ in range(number)]
        for where, side, texts in ((files, "a", rows), (pairs, "b", map(translation_of, rows))):
            path = folder / f"{split}.{side}"
            path.write_text("\n".join(texts) + "\n")
            where[split] = [str(path)]
    return files, pairs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Artifact, Artifact]:
    """A store, sequences with one vocabulary, and sequences with two."""
    folder = tmp_path_factory.mktemp("translation")
    store = Store(folder / "artifacts")
    files, pairs = parallel(folder, {"train": 300, "valid": 20, "test": 12})
    text = dataset.run(files, dataset.Config(), pairs=pairs, store=store).reference

    def learned(**settings: Any) -> str:
        config = tokenizer.Config(kind="word", vocab_size=200, min_frequency=1, **settings)
        return tokenizer.run(text, config, store=store).reference

    config = sequences.Config(packing="pairs", max_length=12)
    joint = sequences.run(text, learned(), config, store=store).artifact
    source, target = learned(column="text"), learned(column="pair")
    return store, joint, sequences.run(text, source, config, target_tokenizer=target, store=store).artifact


def config(**changes: Any) -> pretrain.Config:
    defaults = {**SHAPE, "objective": "translation", "steps": 4, "batch_size": 8, "evaluate_every": 2, "save_every": 4}
    return pretrain.Config(**(defaults | {"learning_rate": 1e-3} | changes))


def given(sequences: Artifact, plan: Plan | None = None, **changes: Any) -> Setup:
    wrapped = read_tokenizer(sequences)
    train, valid = (Examples.read(sequences, split, len(wrapped)) for split in ("train", "valid"))
    found = Setup(
        config=config(**changes), plan=plan or Plan(), sequences=sequences, tokenizer=wrapped, train=train, valid=valid
    )
    return found


def prepared(found: Setup) -> TranslationLearner:
    learner = Translation.prepare(found)
    assert isinstance(learner, TranslationLearner)
    return learner


def train(store: Store, sequences: Artifact, **changes: Any) -> Artifact:
    result = pretrain.run(sequences.reference, config(**changes), store=store)
    assert result is not None
    return result.artifact


def log(artifact: Artifact) -> list[dict[str, float]]:
    return [json.loads(line) for line in artifact.read("metrics.jsonl").splitlines()]


def plan_file(folder: Path, *guides: Guide) -> str:
    path = folder / "plan.toml"
    path.write_text(Plan(guides).dumps())
    return str(path)


# losses


def by_hand(learner: TranslationLearner, indices: list[int], smoothing: float) -> tuple[float, float]:
    """The losses of some examples, each computed alone and without padding."""
    smoothed = plain = 0.0
    pairs, model = learner.splits["train"], learner.model
    for index in indices:
        source, target = (torch.from_numpy(side[index])[None] for side in (pairs.sources, pairs.targets))
        start = torch.full((1, 1), model.config.decoder_start_token_id)
        logits = model(input_ids=source, decoder_input_ids=torch.cat([start, target[:, :-1]], 1)).logits[0]
        for total, epsilon in (("smoothed", smoothing), ("plain", 0.0)):
            loss = torch.nn.functional.cross_entropy(logits, target[0], label_smoothing=epsilon, reduction="sum").item()
            smoothed, plain = (smoothed + loss, plain) if total == "smoothed" else (smoothed, plain + loss)
    return smoothed, plain


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_are_sums_over_target_tokens(data: tuple[Store, Artifact, Artifact], smoothing: float) -> None:
    objective = prepared(given(data[1], label_smoothing=smoothing))
    objective.model.eval()
    indices = [3, 0, 7, 11]
    batch = objective.prepare([(0, index) for index in indices])
    losses = objective.losses(objective.model, batch, 0)
    smoothed, plain = by_hand(objective, indices, smoothing)
    assert losses["translation"].item() == pytest.approx(smoothed, rel=1e-5)
    assert losses["loss/nll"].item() == pytest.approx(plain, rel=1e-5)
    parts = [objective.losses(objective.model, objective.prepare([(0, index)]), 0)["translation"] for index in indices]
    assert sum(parts).item() == pytest.approx(smoothed, rel=1e-5)  # type: ignore[union-attr]


def test_denominators_count_targets_and_tokens_count_both_sides(data: tuple[Store, Artifact, Artifact]) -> None:
    objective = prepared(given(data[1], Plan((Guide("next", "attention_loss"),))))
    rows = pq.read_table(data[1].path / "train.parquet").to_pylist()
    counts = objective.counts(objective.prepare([(0, 5), (1, 9)]))
    targets = sum(len(rows[n]["target"]) for n in (5, 9))
    sources = sum(len(rows[n]["id"]) for n in (5, 9))
    assert counts == {"translation": targets, "loss/nll": targets, "guidance/next": 2, "tokens": targets + sources}
    assert objective.lengths.tolist() == [max(len(row["id"]), len(row["target"])) for row in rows]
    assert objective.weights(0) == {"translation": 1.0, "guidance/next": 1.0}


def test_guides_of_encoder_and_decoder_use_the_lengths_of_their_side(data: tuple[Store, Artifact, Artifact]) -> None:
    """``first`` with all heads uniform: a row of n keys is (1 - 1/n)^2 + (n - 1)/n^2 away, times n rows, over n^2; in the
    decoder query q sees q + 1 keys."""
    rows = (Guide("first", "attention_loss", name="e"), Guide("first", "attention_loss", stack="decoder", name="d"))
    objective = prepared(given(data[1], Plan(rows)))
    objective.model.eval()
    with torch.no_grad():
        for name, parameter in objective.model.named_parameters():
            if ".q_proj." in name:
                parameter.zero_()
    losses = objective.losses(objective.model, objective.prepare([(0, 0)]), 0)
    pairs = objective.splits["train"]
    n, m = len(pairs.sources[0]), len(pairs.targets[0])

    def row(keys: int) -> float:
        return (1 - 1 / keys) ** 2 + (keys - 1) / keys**2

    assert losses["guidance/e"].item() == pytest.approx(n * row(n) / n**2, rel=1e-5)
    assert losses["guidance/d"].item() == pytest.approx(sum(row(q + 1) for q in range(m)) / m**2, rel=1e-5)


def test_the_size_of_a_new_model_is_that_of_the_flags(data: tuple[Store, Artifact, Artifact]) -> None:
    changes = {"layers": 2, "decoder_layers": 3, "hidden": 24, "heads": 3, "ffn": 40, "dropout": 0.2}
    model = prepared(given(data[1], **changes, attention_dropout=0.3)).model
    found = model.config
    assert (found.encoder_layers, found.decoder_layers, found.d_model) == (2, 3, 24)
    assert (found.encoder_attention_heads, found.decoder_attention_heads) == (3, 3)
    assert (found.encoder_ffn_dim, found.decoder_ffn_dim, found.dropout, found.attention_dropout) == (40, 40, 0.2, 0.3)
    assert model.model.encoder.embed_tokens.weight is model.lm_head.weight
    assert prepared(given(data[1])).model.config.decoder_layers == 1


def test_two_vocabularies_have_two_embeddings(data: tuple[Store, Artifact, Artifact]) -> None:
    objective = prepared(given(data[2]))
    config = objective.model.config
    assert (config.vocab_size, config.decoder_vocab_size) == (
        data[2].counts["vocab_size"],
        data[2].counts["target_vocab_size"],
    )
    model = objective.model
    assert model.model.decoder.embed_tokens.weight is model.lm_head.weight
    assert model.model.encoder.embed_tokens.weight is not model.lm_head.weight
    special = data[2].counts["target_special_tokens"]
    assert (config.decoder_start_token_id, config.eos_token_id) == (special["cls"], special["sep"])


# plans


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (Guide(mechanism="adversary"), "needs a second pass, which translation does not have"),
        (Guide("conflict", "logit_loss"), "translation has none"),
        (Guide("next", "attention_loss", part="generator"), "it is for a generator"),
        (Guide("first", "mask", stack="decoder", attention="cross"), "could not act while the model decodes"),
        (Guide("rare", "mask", stack="decoder"), "the tokens that the decoder writes have no such features"),
        (Guide("next", "attention_loss", stack="decoder"), "next names only later tokens"),
    ],
)
def test_guides_that_cannot_work_are_refused_with_the_reason(guide: Guide, reason: str) -> None:
    with pytest.raises(PlanError, match=rf"a.toml, guide 1 \({guide.label}\): .*{reason}"):
        Translation.check_plan(Plan((guide,)), config(), "a.toml")


@pytest.mark.parametrize(
    "guide",
    [
        *(Guide("self", m, stack=s) for m in ("mask", "bias", "fix", "attention_loss") for s in ("encoder", "decoder")),
        *(Guide(mechanism=m, stack=s) for m in ("gaussian", "gate", "off") for s in ("encoder", "decoder")),
        Guide("first", "attention_loss", stack="decoder", attention="cross"),
        Guide("rare", "mask"),
        Guide("delimiter", "mask", stack="decoder"),
    ],
)
def test_guides_that_can_work_are_accepted(guide: Guide) -> None:
    Translation.check_plan(Plan((guide,)), config(), "a.toml")


def test_a_preset_of_the_paper_guides_only_the_encoder(data: tuple[Store, Artifact, Artifact]) -> None:
    rows = log(train(*data[:2], plan="preset:ag-translation"))
    assert {"loss/translation", "loss/nll", "loss/guidance/next", "loss/guidance/previous"} <= set(rows[0])
    assert [row["step"] for row in rows if "valid/nll" in row] == [2, 4]
    assert all(row["loss/translation"] > 0 for row in rows)


def test_heads_that_are_all_gaussian_need_neither_queries_nor_keys(data: tuple[Store, Artifact, Artifact]) -> None:
    artifact = train(*data[:2], plan="preset:gaussian")
    model, handle = guidance.load(artifact.path)
    still = {
        name.split(".layers.0.")[1]
        for name, p in model.named_parameters()
        if ".layers." in name and not p.requires_grad
    }
    assert still == {f"self_attn.{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias")}
    assert {site.stack for site in handle.site_plans} == {"encoder", "decoder"}
    found = evaluate.run(artifact.reference, data[1].reference, evaluate.Config(beams=2), store=data[0])
    assert found.artifact.counts["examples"] == 12


# refusals


def test_sequences_without_targets_are_refused(store: Store) -> None:
    plain = trainings.sequences(store)
    with pytest.raises(InputError, match="has no targets to translate into"):
        train(store, plain)


def test_tokenizers_that_pad_differently_are_refused(data: tuple[Store, Artifact, Artifact]) -> None:
    other = read_tokenizer(data[2], "target-tokenizer")
    other.pad_token = "[UNK]"
    with pytest.raises(InputError, match="but a model has one padding id"):
        build_model(given(data[2]), Translation, other)


def test_a_model_to_start_from_must_know_the_targets(data: tuple[Store, Artifact, Artifact], tmp_path: Path) -> None:
    store, joint, separate = data
    first = train(store, joint)
    again = train(store, joint, init=first.reference, steps=2)
    assert log(again)[0]["loss/nll"] < log(first)[0]["loss/nll"]
    with pytest.raises(InputError, match=r"its tokenizer .* is not that of the sequences"):
        train(store, separate, init=first.reference)


# evaluation


@pytest.fixture(scope="module")
def trained(data: tuple[Store, Artifact, Artifact]) -> Artifact:
    """A model with two vocabularies that has learned to translate."""
    changes: dict[str, Any] = {"hidden": 32, "heads": 4, "ffn": 64, "batch_size": 32, "learning_rate": 1e-2}
    return train(data[0], data[2], steps=100, schedule="linear", warmup_steps=10, evaluate_every=100, **changes)


def test_it_learns_to_translate(data: tuple[Store, Artifact, Artifact], trained: Artifact) -> None:
    result = evaluate.run(trained.reference, data[2].reference, evaluate.Config(), store=data[0]).artifact
    found = json.loads(result.read("metrics.json"))
    assert found["metrics"]["nll"] < 0.8 and found["metrics"]["bleu"] > 30 and found["metrics"]["chrf"] > 40
    assert found["counts"]["examples"] == 12
    rows = pq.read_table(result.path / "predictions.parquet").to_pylist()
    assert all(row["reference"] == translation_of(row["source"]) for row in rows)
    assert sum(row["hypothesis"] == row["reference"] for row in rows) >= 3


def test_search_settings_and_the_bleu_tokenizer_have_an_effect(
    data: tuple[Store, Artifact, Artifact], trained: Artifact
) -> None:
    import sacrebleu

    def hypotheses(**changes: Any) -> tuple[list[str], dict[str, Any]]:
        settings = evaluate.Config(**{"beams": 4, **changes})
        result = evaluate.run(trained.reference, data[2].reference, settings, store=data[0]).artifact
        columns = pq.read_table(result.path / "predictions.parquet").to_pydict()
        return columns["hypothesis"], json.loads(result.read("metrics.json")) | {"references": columns["reference"]}

    cut, found = hypotheses(max_length=2, bleu_tokenizer="char")
    whole, _ = hypotheses()
    assert max(len(text.split()) for text in cut) <= 2 < max(len(text.split()) for text in whole)
    assert "tok:char" in found["signatures"]["bleu"]
    score = sacrebleu.corpus_bleu(cut, [found["references"]], tokenize="char").score
    assert found["metrics"]["bleu"] == pytest.approx(score)
    shortest, longest = (sum(map(len, hypotheses(length_penalty=p, max_length=8)[0])) for p in (-10.0, 10.0))
    assert shortest < longest


def test_scores_are_those_of_sacrebleu_with_its_signature(
    data: tuple[Store, Artifact, Artifact], trained: Artifact
) -> None:
    import sacrebleu

    result = evaluate.run(trained.reference, data[2].reference, evaluate.Config(beams=1), store=data[0]).artifact
    found = json.loads(result.read("metrics.json"))
    columns = pq.read_table(result.path / "predictions.parquet").to_pydict()
    bleu = sacrebleu.corpus_bleu(columns["hypothesis"], [columns["reference"]]).score
    chrf = sacrebleu.corpus_chrf(columns["hypothesis"], [columns["reference"]]).score
    assert (found["metrics"]["bleu"], found["metrics"]["chrf"]) == (pytest.approx(bleu), pytest.approx(chrf))
    version = sacrebleu.__version__
    assert found["signatures"]["bleu"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    assert found["signatures"]["chrf"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}"


def test_a_dataset_of_pairs_is_measured_as_its_sequences_are(
    data: tuple[Store, Artifact, Artifact], trained: Artifact
) -> None:
    store, _, sequences = data
    with store.load_input(sequences, "corpus") as pairs:
        short = evaluate.Config(beams=1, sequence_length=12)
        by_dataset = evaluate.run(trained.reference, pairs.reference, short, store=store).artifact
    by_sequences = evaluate.run(trained.reference, sequences.reference, evaluate.Config(beams=1), store=store).artifact
    assert by_dataset.counts["metrics"] == by_sequences.counts["metrics"]


def test_examples_that_the_model_was_trained_on_are_told(
    trained: Artifact, data: tuple[Store, Artifact, Artifact], caplog: pytest.LogCaptureFixture
) -> None:
    settings = evaluate.Config(split="train", beams=1, limit=5)
    evaluate.run(trained.reference, data[2].reference, settings, store=data[0])
    assert "examples have the text of an example that the model was trained on" in caplog.text


def test_probes_of_heads_read_no_translator(data: tuple[Store, Artifact, Artifact], trained: Artifact) -> None:
    store, sequences, _ = data
    for stage in (probe_importance, probe_relevance):
        with pytest.raises(InputError, match="an encoder-decoder; probes read models with one stack"):
            stage.run(trained.reference, sequences.reference, store=store)


def test_the_evaluated_likelihood_equals_that_of_validation(
    data: tuple[Store, Artifact, Artifact], trained: Artifact
) -> None:
    settings = evaluate.Config(split="valid", beams=1, batch_size=7)
    result = evaluate.run(trained.reference, data[2].reference, settings, store=data[0]).artifact
    assert result.counts["metrics"]["nll"] == pytest.approx(log(trained)[-1]["valid/nll"], rel=1e-5)
    best = settings.model_copy(update={"weights": "best"})
    assert evaluate.run(trained.reference, data[2].reference, best, store=data[0]).artifact.counts["metrics"] == (
        pytest.approx(result.counts["metrics"])
    )


def test_a_limit_takes_the_first_examples_and_keeps_their_order(
    data: tuple[Store, Artifact, Artifact], trained: Artifact
) -> None:
    few, all_ = (
        pq.read_table(
            evaluate.run(
                trained.reference, data[2].reference, evaluate.Config(beams=1, limit=n), store=data[0]
            ).artifact.path
            / "predictions.parquet"
        ).to_pylist()
        for n in (5, 0)
    )
    assert few == all_[:5]


def test_a_model_with_two_vocabularies_opens_with_transformers_alone(
    data: tuple[Store, Artifact, Artifact], trained: Artifact
) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(trained.path)
    source, target = (AutoTokenizer.from_pretrained(trained.path / place) for place in ("", "target-tokenizer"))
    inputs = source(["ba de fi ."], return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, num_beams=3, max_new_tokens=10)
    assert target.decode(ids[0], skip_special_tokens=True).split()[-1] == "."


def test_sequences_of_other_tokenizers_are_refused(data: tuple[Store, Artifact, Artifact], trained: Artifact) -> None:
    with pytest.raises(InputError, match=r"its tokenizer .* is not that of the sequences"):
        evaluate.run(trained.reference, data[1].reference, evaluate.Config(), store=data[0])


def test_a_missing_split_is_refused(store: Store, tmp_path: Path) -> None:
    files, pairs = parallel(tmp_path, {"train": 30})
    text = dataset.run(files, dataset.Config(valid_fraction=0.0), pairs=pairs, store=store).reference
    made = tokenizer.run(text, tokenizer.Config(kind="word", vocab_size=99, min_frequency=1), store=store).reference
    rows = sequences.run(text, made, sequences.Config(packing="pairs", max_length=12), store=store).artifact
    model = train(store, rows, steps=1)
    with pytest.raises(InputError, match="has no sequences in 'test'") as raised:
        evaluate.run(model.reference, rows.reference, evaluate.Config(), store=store)
    assert raised.value.hint.startswith("--split train; `guide build-corpus --test 0.05`")
    with pytest.raises(InputError, match="has no best model, because there was no validation"):
        evaluate.run(model.reference, rows.reference, evaluate.Config(split="train", weights="best"), store=store)


def test_a_tokenizer_without_mask_translates(store: Store, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    files, pairs = parallel(tmp_path, {"train": 30, "valid": 4})
    text = dataset.run(files, dataset.Config(), pairs=pairs, store=store).reference
    words = sorted({*WORDS, *(word[::-1] for word in WORDS)})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", ".", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(tmp_path / "maskless")
    settings = sequences.Config(packing="pairs", max_length=12)
    rows = sequences.run(text, str(tmp_path / "maskless"), settings, store=store).artifact
    model = train(store, rows, steps=1)
    scores = evaluate.run(model.reference, rows.reference, evaluate.Config(split="valid"), store=store).artifact
    assert 0 <= json.loads(scores.read("metrics.json"))["metrics"]["bleu"] <= 100
    with pytest.raises(InputError, match=f"the tokenizer of {rows.reference} has no mask token"):
        trainings.train(store, rows)


def test_role_masks_of_the_encoder_are_needed_and_used_in_evaluation(
    data: tuple[Store, Artifact, Artifact], tmp_path: Path
) -> None:
    store, joint, _ = data
    text = joint.manifest["inputs"]["corpus"]
    rare = idf.run(f"corpus/{text['recipe'][:16]}", None, idf.Config(), store=store)
    assert rare is not None
    made = masks.run(joint.reference, masks.Config(idf=rare.reference), store=store)
    assert made is not None
    plan = plan_file(tmp_path, Guide("rare", "mask", heads=(0,)), Guide("window", "mask", heads=(1,)))
    model = train(store, joint, plan=plan, masks=made.reference, steps=2)
    with pytest.raises(PlanError, match="it needs the features word, idf"):
        evaluate.run(model.reference, joint.reference, evaluate.Config(), store=store)
    loss_alone = train(store, joint, plan=plan_file(tmp_path, Guide("rare", "attention_loss")), masks=made.reference)
    evaluate.run(loss_alone.reference, joint.reference, evaluate.Config(split="valid", limit=2), store=store)
    (measured, *_) = pretrain._next(model, store)
    assert measured == f"guide evaluate {{}} {{sequences}} --masks {made.reference}", "a command that can run"
    settings = evaluate.Config(masks=made.reference, split="valid", beams=2)
    found = evaluate.run(model.reference, joint.reference, settings, store=store).artifact
    assert found.counts["metrics"]["nll"] == pytest.approx(log(model)[-1]["valid/nll"], rel=1e-5)


def test_the_command_prints_the_metrics_and_their_signatures(
    guide: Callable[..., Any], data: tuple[Store, Artifact, Artifact], trained: Artifact
) -> None:
    said = guide("evaluate", trained.reference, data[2].reference, "--beams", 1, "--store", data[0].root)
    assert said.code == 0, said.err
    assert said.out.startswith("evaluation/")
    assert "bleu " in said.err and "nrefs:1|case:mixed" in said.err and "nats per token" in said.err
