"""``guide translate`` and ``guide fill``: in a pipe, with plans, with ordinary folders, and with wrong inputs."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

import guidance
from guidance.errors import InputError
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.stages import dataset, dependencies, evaluate, idf, masks, missing, pretrain, sequences, tokenizer
from pipelines.storage.store import Store
from pipelines.training.live_text import Filler, Translator, read_lines, without_controls
from pipelines.training.text_words import TextWords, lines_of
from tests import trainings
from tests.shared import shared
from tests.trainings import one_thread  # noqa: F401

WORDS = [f"{a}{b}" for a in "bdfg" for b in "aei"]
SEARCH: dict[str, Any] = {"beams": 2, "length_penalty": 1.0, "max_length": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A store with a translator, and with masked language models: plain, with masked heads, and with heads that read idf."""
    folder = tmp_path_factory.mktemp("live")
    store = Store(folder / "artifacts")
    rows = [f"{a} {b} {c} ." for a in WORDS for b in WORDS[:4] for c in WORDS[4:7]]
    files: dict[str, list[str]] = {}
    pairs: dict[str, list[str]] = {}
    for split, some in {"train": rows[:100], "test": rows[100:106]}.items():
        for side, where in (("a", files), ("b", pairs)):
            path = folder / f"{split}.{side}"
            path.write_text("".join(f"{row if side == 'a' else row[::-1]}\n" for row in some))
            where[split] = [str(path)]
    text = dataset.run(files, dataset.Config(), pairs=pairs, store=store).reference
    words = tokenizer.Config(kind="word", vocab_size=200, min_frequency=1)
    pieces = tokenizer.run(text, words, store=store).reference
    packed = sequences.run(text, pieces, sequences.Config(packing="pairs", max_length=12), store=store)
    shape: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "steps": 8, "learning_rate": 1e-2}
    plan = folder / "window.toml"
    plan.write_text(Plan((Guide("window", "mask", heads=(0,)),)).dumps())
    config = pretrain.Config(objective="translation", plan=str(plan), **shape)
    trained = pretrain.run(packed.reference, config, store=store)
    assert trained is not None
    guided = {}
    for name, guide in {
        "self": Guide("self", "mask", heads=(0, 1)),
        "same_segment": Guide("same_segment", "mask", heads=(0,)),
    }.items():
        path = folder / f"{name}.toml"
        path.write_text(Plan((guide,)).dumps())
        guided[name] = trainings.train(store, plan=str(path)).artifact
    plain = trainings.train(store).artifact
    return SimpleNamespace(store=store, pairs=packed.artifact, translator=trained.artifact, plain=plain, **guided)


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Let stdin hold some bytes."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# translate


def test_translations_are_those_of_the_evaluation(
    work: SimpleNamespace, guide: Callable[..., Any], tmp_path: Path
) -> None:
    config = evaluate.Config(beams=2)
    found = evaluate.run(work.translator.reference, work.pairs.reference, config, store=work.store).artifact
    rows = pq.read_table(found.path / "predictions.parquet").to_pydict()
    Path("in.txt").write_text("\n".join([rows["source"][0], "", *rows["source"][1:]]))
    call = ("translate", work.translator.reference, "in.txt", "--beams", 2, "--store", work.store.root)
    said = guide(*call)
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines == [rows["hypothesis"][0], "", *rows["hypothesis"][1:]]
    assert guide(*call, "--batch-size", 1).out == said.out
    objects = [json.loads(line) for line in guide(*call, "--json").out.splitlines()]
    assert objects[2] == {"source": rows["source"][1], "translation": rows["hypothesis"][1]}


def test_a_plan_that_reads_trees_and_idf_finds_them_in_each_line(
    work: SimpleNamespace, guide: Callable[..., Any], monkeypatch: Any
) -> None:
    """The translations are those of the evaluation, where the trees and the idf come from ``guide build-masks``."""
    parser, store = f"spacy:{shared('models/spacy-en_ud_ewt_sm')}", work.store
    with store.load_input(work.pairs, "corpus") as captions:
        counted = idf.run(captions.reference, idf.Config(column="text", unit="sentence"), store=store)
        trees = dependencies.run(captions.reference, dependencies.Config(parser=parser, column="text"), store=store)
    assert counted is not None and trees is not None
    joined = masks.run(work.pairs.reference, masks.Config(idf=counted.reference, deps=trees.reference), store=store)
    assert joined is not None
    plan = store.root.parent / "roles.toml"
    plan.write_text(Plan((Guide("dependency", "mask", heads=(0,)), Guide("rare", "mask", heads=(1,)))).dumps())
    shape: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "steps": 8, "learning_rate": 1e-2}
    config = pretrain.Config(objective="translation", plan=str(plan), masks=[joined.reference], **shape)
    trained = pretrain.run(work.pairs.reference, config, store=store)
    assert trained is not None
    made = evaluate.Config(beams=2, masks=joined.reference)
    found = evaluate.run(trained.reference, work.pairs.reference, made, store=store).artifact
    rows = pq.read_table(found.path / "predictions.parquet").to_pydict()
    lines = "".join(f"{source}\n" for source in rows["source"]).encode()
    call = ("translate", trained.reference, "--beams", 2, "--store", store.root)
    feed(monkeypatch, lines)
    said = guide(*call, "--parser", parser)
    assert said.code == 0, said.err
    assert said.out.splitlines() == rows["hypothesis"]
    said = guide(*call)
    assert said.code == 2 and "it needs the features head, which a parser finds" in said.err, said.err
    assert f"--parser {parser}, with which it was trained" in said.err
    for wrong, message in (
        ("conllu:x", "parses no other text"),
        ("udpipe:en", "unknown parser"),
        ("spacy:", "unknown"),
    ):
        said = guide(*call, "--parser", wrong)
        assert said.code == 2 and message in said.err and "stanza:LANG" in said.err, said.err
    folder = trained.artifact.path
    words = missing.text_words(trained.reference, folder, parser, "cpu", store)
    columns = Translator(folder, **SEARCH, words=words).read(rows["source"]).columns
    known = pq.read_table(joined.artifact.path / "test.parquet").to_pydict()
    for name in ("head", "idf"):
        lists = [row[: len(own)] for row, own in zip(columns[name].tolist(), known[name], strict=True)]
        assert lists == known[name] and len({*itertools.chain(*lists)}) > 2
    two = Translator(folder, **SEARCH, words=words).read(["Ba be bo. Bu bi ba."]).columns["segment"]
    assert {*two[0].tolist()} - {-1} == {0}, "a line of parallel text is a sentence, whatever stands in it"
    prose = TextWords(idf={"ba": 1.0})
    encoding = Translator(folder, **SEARCH, words=words).tokenizer.encode("Ba be bo. Bu bi ba.")
    split = prose.features(BatchEncoding(encoding=[encoding]), "Ba be bo. Bu bi ba.")["segment"]
    assert {*split[0].tolist()} >= {0, 1}, "rules would find two"
    assert lines_of("  a b \n\n c. d\r\ne ") == [(2, 5), (9, 13), (15, 16)]
    without = Translator(folder, **SEARCH, words=words).read(["ba " * 600]).columns
    assert set(without["head"][0].tolist()) == {-1}, "a sentence that is too long has no tree"


def test_long_lines_are_cut_and_counted(work: SimpleNamespace, guide: Callable[..., Any], monkeypatch: Any) -> None:
    feed(monkeypatch, ("ba " * 40 + "\nbe .\n").encode())
    said = guide("translate", work.translator.reference, "--beams", 1, "--store", work.store.root)
    assert said.code == 0 and len(said.out.splitlines()) == 2
    assert "warning: 1 line was longer than the 12 tokens of the model, and cut" in said.err


def spawn(*arguments: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    restore = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from cli.main import main; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", restore, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def test_a_line_is_answered_before_the_next_one_comes_and_ctrl_c_ends_it(work: SimpleNamespace) -> None:
    process = spawn("translate", work.translator.reference, "--beams", 1, "--store", work.store.root)
    assert process.stdin and process.stdout and process.stderr
    for line in (b"ba be .\n", b"\n"):
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()  # would wait for ever if it came only at the end
        assert answer.endswith(b"\n") and (answer == b"\n") == (line == b"\n")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, b"")
    assert err.decode().splitlines()[-1] == "guide: interrupted" and b"Traceback" not in err


@pytest.mark.every
def test_a_reader_that_goes_away_ends_it_with_141(work: SimpleNamespace) -> None:
    process = spawn("fill", work.plain.reference, "--json", "--store", work.store.root)
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(b"w3 <mask> w5\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["text"] == "w3 <mask> w5"
    process.stdout.close()
    process.stdin.write(b"w3 <mask> w5\n")
    process.stdin.close()
    end = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert process.returncode == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_an_ordinary_translation_folder_translates_with_its_own_layout(tmp_path: Path) -> None:
    vocabulary = {token: n for n, token in enumerate(["<pad>", "</s>", "<unk>", "<s>", "a", "b", "c"])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"})
    )
    torch.manual_seed(0)
    sizes = {
        f"{side}_{name}": 8 if "dim" in name else 1
        for side in ("encoder", "decoder")
        for name in ("layers", "attention_heads", "ffn_dim")
    }
    config = MarianConfig(
        vocab_size=7,
        d_model=8,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        max_position_embeddings=12,
        **sizes,
    )
    model = MarianMTModel(config).eval()
    model.save_pretrained(tmp_path)
    found = Translator(tmp_path, **SEARCH)
    batch = found.read(["a b", "a </s> x"])
    assert batch.inputs["input_ids"].tolist() == [[4, 5, 1, 0], [4, 2, 2, 1]]  # no text becomes a special token
    plain: Any = model
    ids = plain.generate(torch.tensor([[4, 5, 1]]), num_beams=2, do_sample=False, max_new_tokens=12)[0].tolist()
    expected = own.decode([i for i in ids if i > 1], skip_special_tokens=True)
    assert found.translate(["a b"]) == [expected]


def test_a_tokenizer_like_that_of_t5_begins_a_text_with_no_token(tmp_path: Path) -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    model: Any = T5ForConditionalGeneration(T5Config(vocab_size=5, decoder_start_token_id=0, **sizes)).eval()
    guidance.save(guidance.install(model, Plan((Guide("next", "mask", heads=(0,)),))), tmp_path)
    words = {token: n for n, token in enumerate(["<pad>", "</s>", "<unk>", "a", "b"])}
    own = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "</s>"}))
    found = Translator(tmp_path, **{**SEARCH, "max_length": 6})
    assert found.read(["a b"]).inputs["input_ids"].tolist() == [[3, 4, 1]]
    ids = model.generate(torch.tensor([[3, 4, 1]]), num_beams=2, do_sample=False, max_new_tokens=6)[0].tolist()
    assert found.translate(["a b"]) == [own.decode([i for i in ids if i > 1], skip_special_tokens=True)]


def test_wrong_inputs_of_translate_are_refused(
    work: SimpleNamespace, guide: Callable[..., Any], monkeypatch: Any
) -> None:
    store = ("--store", work.store.root)
    said = guide("translate", work.plain.reference, *store)
    assert said.code == 2 and "a modernbert model, which does not translate" in said.err
    said = guide("translate", work.translator.reference, "no-such-file", *store)
    assert said.code == 2 and "'no-such-file': cannot be read" in said.err
    assert guide("translate", "no-such-model", *store).code == 2
    feed(monkeypatch, b"ba .\n\xff\xfe\n")
    said = guide("translate", work.translator.reference, "--beams", 1, *store)
    assert said.code == 2 and "stdin, line 2: not UTF-8" in said.err
    assert len(said.out.splitlines()) == 1  # the line before it was translated


def test_lines_end_only_with_line_feeds() -> None:
    text = "\ufeffone\x0b\u2028still one\r\n\nthree".encode()
    assert list(read_lines(io.BytesIO(text), "x")) == ["one\x0b\u2028still one", "", "three"]
    with pytest.raises(InputError, match="line 1: longer than 1 MiB"):
        list(read_lines(io.BytesIO(b"a" * (1 << 21)), "x"))


# fill


def test_scores_are_the_probabilities_of_the_model_with_its_plan(work: SimpleNamespace) -> None:
    text = "w3 <mask> w5 <mask> w9"
    for artifact in (work.plain, work.self):
        model, handle = guidance.load(artifact.path)
        filler = Filler(artifact.path, "cpu")
        ids = torch.tensor([[0, *(7 + n if n is not None else 4 for n in (3, None, 5, None, 9)), 2]])
        assert filler.read([text]).inputs["input_ids"].tolist() == ids.tolist()
        with torch.no_grad():
            logits = model(ids, **handle.at_inference(input_ids=ids)).logits[0]
        found = filler.fill(text, 3)
        assert len(found) == 2
        for place, mask in zip((2, 4), found, strict=True):
            probabilities = logits[place].softmax(-1)
            ordinary = probabilities[5:].topk(3)
            assert [candidate.id for candidate in mask] == (ordinary.indices + 5).tolist()
            assert [candidate.score for candidate in mask] == pytest.approx(ordinary.values.tolist(), rel=1e-5)
        assert found[0][0].text == f"w3 {found[0][0].token} w5 <mask> w9"
    assert handle.plan.shapes_outputs


def test_features_that_need_no_parser_are_computed(work: SimpleNamespace) -> None:
    filler = Filler(work.same_segment.path, "cpu")
    batch = filler.read(["w1 w2 . W3 w4 ."])
    assert filler.needed == ("segment",)
    assert batch.columns["segment"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]


def test_features_that_a_text_does_not_have_are_refused_by_name(guide: Callable[..., Any], tmp_path: Path) -> None:
    model = bert()
    guidance.save(guidance.install(model, Plan((Guide("rare", "mask", heads=(0,)),))), tmp_path / "model")
    for name, data in trainings.tokenizer_files().items():
        (tmp_path / "model" / name).write_bytes(data)
    for call in (("fill", tmp_path / "model", "w1 <mask>"), ("attention", tmp_path / "model", "--text", "w1 w2")):
        said = guide(*call)
        assert said.code == 2 and "reads idf, and that of its training text is not in this store" in said.err, said.err
        assert "guide import the masks that the model was trained with" in said.err


def bert(vocab_size: int = 64) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=vocab_size, max_position_embeddings=8)).eval()


@pytest.fixture
def wordpieces(tmp_path: Path) -> Path:
    """An ordinary folder with word pieces."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "ran"]
    own = Tokenizer(models.WordPiece({token: n for n, token in enumerate(tokens)}, unk_token="[UNK]"))
    own.pre_tokenizer, own.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    own.add_special_tokens(tokens[:5])
    own.save(str(tmp_path / "tokenizer.json"))
    bert(len(tokens)).save_pretrained(tmp_path)
    return tmp_path


def test_an_ordinary_folder_fills_in(wordpieces: Path, guide: Callable[..., Any]) -> None:
    for text in ("the [MASK] ran", "the <mask> ran"):
        said = guide("fill", wordpieces, text, "--top", 4, "--json")
        assert said.code == 0, said.err
        (mask,) = json.loads(said.out)["masks"]
        texts = {candidate["token"]: candidate["text"] for candidate in mask}
        assert len(texts) == 4 and "[PAD]" not in texts
        assert {texts.get("cat"), texts.get("##s")} <= {"the cat ran", "thes ran", None}
    for text in ("the [MASK] [MASK]", "the [MASK] <mask>"):
        rows = guide("fill", wordpieces, text, "--top", 2).out.splitlines()
        assert rows[0].split() == ["mask", "score", "token", "text"]
        assert [row.split()[0] for row in rows[1:]] == ["1", "1", "2", "2"]


def test_the_space_before_a_mask_stays(wordpieces: Path) -> None:
    """Some tokenizers count the white space before their mask token as a part of it."""
    own = Tokenizer.from_file(str(wordpieces / "tokenizer.json"))
    own.add_special_tokens([AddedToken("[MASK]", lstrip=True, special=True, normalized=False)])
    own.save(str(wordpieces / "tokenizer.json"))
    assert own.encode("the [MASK] ran").offsets[1] == (3, 10)
    (found,) = Filler(wordpieces, "cpu").fill("the [MASK] ran", 4)
    assert {one.text for one in found if one.token == "cat"} <= {"the cat ran"}
    assert all(one.text.startswith("the ") or one.token.startswith("##") for one in found)


def test_special_tokens_never_fill_a_mask(wordpieces: Path) -> None:
    own = Tokenizer.from_file(str(wordpieces / "tokenizer.json"))
    own.add_special_tokens([AddedToken("cat", special=True, normalized=False)])
    own.save(str(wordpieces / "tokenizer.json"))
    (found,) = Filler(wordpieces, "cpu").fill("the [MASK] ran", 99)
    assert found
    assert not {"cat", "[PAD]", "[CLS]"} & {one.token for one in found}


def test_control_characters_of_a_model_never_reach_a_terminal() -> None:
    assert without_controls("a\x1b[31mb\r\n\tc\x00") == "a[31mb\n\tc"


def test_wrong_inputs_of_fill_are_refused(
    work: SimpleNamespace, wordpieces: Path, guide: Callable[..., Any], monkeypatch: Any
) -> None:
    for text, message in (("the cat", "the text has no mask"), ("the [MASK]" * 9, "longer than the 8 tokens")):
        said = guide("fill", wordpieces, text)
        assert said.code == 2 and message in said.err, said.err
    filler = Filler(wordpieces, "cpu")
    with pytest.raises(InputError, match="longer than the 8 tokens"):
        filler.fill("the [MASK]" * 9, 1)
    assert filler.fill("the [MASK]", 1), "one text that was cut is no reason to refuse the next"
    feed(monkeypatch, b"the [MASK]\nthe cat\n")
    said = guide("fill", wordpieces, "--json")
    assert said.code == 2 and "stdin, line 2: the text has no mask" in said.err
    assert len(said.out.splitlines()) == 1
    feed(monkeypatch, b"the [MASK]\n\nthe [MASK]\n")
    said = guide("fill", wordpieces, "--json")
    assert said.code == 0 and "an empty line has an empty answer" in said.err
    assert [len(json.loads(line)["masks"]) for line in said.out.splitlines()] == [1, 0, 1]
    said = guide("fill", work.translator.reference, "ba <mask>", "--store", work.store.root)
    assert said.code == 2 and "MarianMTModel, which predicts no masked words" in said.err
    assert guide("fill", wordpieces / "nothing", "x").code == 2
    weights = next(wordpieces.glob("*.safetensors"))
    (wordpieces / "tokenizer.json").unlink()
    said = guide("fill", wordpieces, "the [MASK]")
    assert said.code == 2 and "has no tokenizer.json" in said.err
    assert weights.exists()


def test_the_generator_of_a_discriminator_fills_in(work: SimpleNamespace, guide: Callable[..., Any]) -> None:
    model = trainings.train(work.store, objective="electra").artifact
    said = guide("fill", model.path, "w1 <mask>")
    assert said.code == 2 and f"guide fill {model.path / 'generator'}" in said.err
