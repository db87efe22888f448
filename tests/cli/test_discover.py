"""``guide attention`` and the commands of ``guide discover``, as a person with a folder and a text file uses them."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import guidance
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.probing.one_text import look
from pipelines.probing.sequences import token_labels
from tests.pipelines.stages.test_probes import matching, saved, written
from tests.shared import shared

TEXT = "anna saw anna . the dog saw the man ."


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return saved(tmp_path / "model", matching(2, 6))


def test_attention_names_the_patterns_that_heads_come_close_to(guide: Callable[..., Any], folder: str) -> None:
    done = guide("attention", folder, "--text", TEXT)
    assert done.code == 0, done.err
    rows = done.out.splitlines()
    (line,) = [row for row in rows if row.startswith("0-5")]
    assert "matching_token" in line and len(rows) == 13
    assert all("–" in row for row in rows[1:] if not row.startswith("0-5")), "even attention is close to nothing"
    assert " self " not in line, "heads rest there"
    done = guide("attention", folder, "--text", TEXT, "--sinks")
    (line,) = [row for row in done.out.splitlines() if row.startswith("0-5")]
    assert " self " in line and "matching_token" in line
    done = guide("attention", folder, "--text", TEXT, "--layer", 0, "--head", 5, "--ascii")
    assert done.code == 0 and done.out.startswith("layer 0, head 5\n") and "the darkest is" in done.out
    both = guide("attention", folder, "--text", TEXT, "--layer", 0, "--head", 5, "--ascii", "--sinks")
    title, listed, *drawn = both.out.splitlines()
    assert title.startswith("HEAD") and listed == line and drawn == ["", *done.out.splitlines()]


def test_attention_with_a_parser_names_patterns_of_syntax_and_opens_plans_that_read_it(
    guide: Callable[..., Any], folder: str, tmp_path: Path
) -> None:
    parser = f"spacy:{shared('models/spacy-en_ud_ewt_sm')}"
    call = ("attention", folder, "--text", TEXT, "--json")

    def names(*flags: object) -> set[str]:
        done = guide(*call, *flags)
        assert done.code == 0, done.err
        return {each["pattern"] for head in json.loads(done.out)["heads"] for each in head["closest"]}

    assert "dependency" in names("--parser", parser) and "dependency" not in names()
    model = matching(2, 6)
    plan = Plan((Guide("dependency", "mask", layers=(0,), heads=(0,)),))
    guidance.save(guidance.install(model, plan), folder)
    done = guide(*call)
    assert done.code == 2 and "it needs the features head, which a parser finds" in done.err
    told = json.loads(guide(*call, "--parser", parser).out)
    shares = {each["pattern"]: each["share"] for each in told["heads"][0]["closest"]}
    assert shares["dependency"] == pytest.approx(1, abs=1e-5), "the head sees nothing else"


def test_attention_is_that_of_the_model_as_json_and_pictures(
    guide: Callable[..., Any], folder: str, tmp_path: Path
) -> None:
    done = guide("attention", folder, "--text", TEXT, "--layer", 0, "--head", 5, "--json", "--png", "one.png")
    told = json.loads(done.out)
    attention = np.array(told["heads"][0]["attention"])
    assert attention.shape == (12, 12) and np.allclose(attention.sum(-1), 1, atol=1e-5)
    assert told["tokens"] == ["<s>", *TEXT.split(), "</s>"]
    assert attention[1, 3] > 2 * attention[1, 2]
    found = look(Path(folder), TEXT)
    assert np.allclose(found.map(0, 5), attention, atol=1e-6)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    flags = ("--png", "all.png", "--svg", "all.svg", "--pdf", "all.pdf")
    done = guide("attention", folder, "--text", TEXT, *flags, "--html", "page.html")
    assert done.code == 0, done.err
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "all.pdf").read_bytes().startswith(b"%PDF")
    assert b"<svg" in (tmp_path / "all.svg").read_bytes()
    assert b"guide-data" in (tmp_path / "page.html").read_bytes()
    assert [line.split(":")[0] for line in done.err.splitlines()] == ["drawn", "drawn", "drawn", "written"]


def test_a_model_that_reads_idf_finds_that_of_its_training_in_a_text(guide: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("".join(f"the dog saw the {word} .\n" for word in ("cat", "man", "cat", "dog")))
    (tmp_path / "text.txt").write_text("the cat saw the man .\n")
    (tmp_path / "plan.toml").write_text('[[guide]]\npattern = "rare"\nmechanism = "mask"\nheads = [0]\n')
    for line in (
        "build-corpus train.txt --documents line --sentences line --valid 0 --name text",
        "build-tokenizer text --kind word --min-frequency 1 --name words",
        "build-sequences text words --max-length 16 --name text-16",
        "build-idf text --name idf",
        "build-masks text-16 --idf idf --name roles",
        "pretrain text-16 --masks roles --plan plan.toml --layers 1 --hidden 16 --heads 2 --steps 1 --name model",
        "pretrain text-16 --layers 1 --hidden 16 --heads 2 --steps 1 --name plain",
    ):
        done = guide(*line.split())
        assert done.code == 0, (line, done.err)
    found = guide("probe", "relevance", "model", "text.txt")
    assert found.code == 0 and "rare" in found.out + found.err, found.err
    drawn = guide("attention", "model", "--text", "the cat saw the man .", "--html", "page.html")
    assert drawn.code == 0 and b"guide-data" in (tmp_path / "page.html").read_bytes(), drawn.err
    free = guide("probe", "relevance", "model", "text.txt", "--random", "0")
    assert free.code == 0 and "masks: " not in free.err, "random weights follow no plan"
    (tmp_path / "lines.txt").write_text("the cat saw the man .\nthe man saw the dog .\n" * 5)
    page = guide("discover", "export", "model", "lines.txt", "--to", "lines.html")
    assert page.code == 0 and b"guide-data" in (tmp_path / "lines.html").read_bytes(), page.err
    for one, other in (("model", "plain"), ("plain", "model")):
        said = guide("probe", "distance", one, "text.txt", "--from", other)
        assert said.code == 0, said.err
    assert len([*(tmp_path / "artifacts" / "idf").iterdir()]) == 1, "no idf is counted in the text"


def test_a_caption_runs_from_left_to_right_whatever_the_text_is_written_in(
    guide: Callable[..., Any], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captions: list[str] = []

    def drawn(*args: Any, caption: str, **more: Any) -> bytes:
        captions.append(caption)
        return b"picture"

    monkeypatch.setattr("pipelines.drawing.attention_grid", drawn)
    assert guide("attention", folder, "--text", "שלום", "--png", "one.png").code == 0
    assert captions[0].startswith("\N{LEFT-TO-RIGHT MARK}“שלום” Most on ")


def test_the_page_of_attention_shows_a_text_of_several_lines_as_one(
    guide: Callable[..., Any], folder: str, tmp_path: Path
) -> None:
    lines = "anna saw anna .\nthe dog saw the man ."
    assert guide("attention", folder, "--text", lines, "--html", "page.html").code == 0
    _, _, data = (tmp_path / "page.html").read_text().partition('id="guide-data">')
    answers = json.loads(data.partition("</script>")[0])
    assert answers["api/overview"]["models"][0]["examples"] == 1
    assert answers["api/example?model=0&example=0"]["tokens"] == ["<s>", *lines.split(), "</s>"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text", ""], "the text is empty"),
        (["--text", "a", "--head", "1"], "--head without --layer"),
        (["--text", "a", "--layer", "9"], "there is no layer 9: the model has layers 0 to 1"),
        (
            ["--text", "a", "--layer", "1", "--head", "9"],
            "there is no head 1-9: the model has layers 0 to 1 with heads 0 to 5",
        ),
        (["--text", "a", "--png", "x.gif"], "--png"),
        (["--text", "a", "--pdf", "x.png"], "--pdf"),
        (["--text", "caf\udce9"], "the text is not UTF-8"),
        (["--text", "a", "--device", "gpu"], "'gpu'"),
    ],
)
def test_attention_refuses(guide: Callable[..., Any], folder: str, flags: list[str], message: str) -> None:
    done = guide("attention", folder, *flags)
    assert done.code == 2 and message in done.err


def test_a_model_and_data_in_the_wrong_order_are_told_apart(
    guide: Callable[..., Any], folder: str, tmp_path: Path
) -> None:
    text = written(tmp_path, "text.txt", TEXT)
    for command in (("discover", "score"), ("probe", "sinks"), ("evaluate",)):
        done = guide(*command, text, folder)
        assert done.code == 2 and "a file, not a model" in done.err and "folder with config.json" in done.err
    (tmp_path / "named").write_text("a file of the same name")
    made = guide("discover", "score", folder, text, "--limit", 1, "--name", "named")
    assert made.code == 0 and guide("show", "named").code == 0, "a name in the store goes before a file"
    done = guide("evaluate", "named", text)
    assert done.code == 2 and "an artifact of kind discovery; expected: model" in done.err
    done = guide("probe", "relevance", folder, folder)
    assert done.code == 2 and "a model folder, not a guide artifact" in done.err and "MODEL" in done.err


def test_attention_reads_the_text_before_the_model(guide: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" ")))
    done = guide("attention", "nowhere")
    assert done.code == 2 and "the text is empty" in done.err


def test_other_bytes_than_utf8_are_refused_with_advice_that_can_be_followed(
    guide: Callable[..., Any], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 is bad")))
    done = guide("attention", folder)
    assert done.code == 2 and "the text is not UTF-8" in done.err and "iconv" in done.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a" + "é ".encode() * 500_000)))
    done = guide("attention", folder)
    assert done.code == 0, "a text is cut between characters, not between bytes"
    done = guide("discover", "score", folder, written(tmp_path, "good.txt", TEXT), "--patterns", "caf\udce9")
    assert done.code == 2 and "the pattern is not UTF-8" in done.err
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 is bad")
    done = guide("discover", "score", folder, tmp_path / "bad.txt")
    assert done.code == 2 and "bad.txt', line 1, byte 3 of the file: not utf-8" in done.err
    assert "guide build-corpus" in done.err and "--encoding latin-1" in done.err


def test_tokens_that_continue_a_word_are_marked() -> None:
    vocabulary = {name: n for n, name in enumerate(["<s>", "the", "Ġdog", "s", ",", "Ġ", "T", "he", "</s>", "Ã"])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<s>"))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    labels = token_labels(tokenizer, np.arange(9))
    assert labels == ["<s>", "the", "dog", "##s", ",", "␣", "T", "##he", "</s>"]


def test_from_a_folder_and_a_text_file_to_a_plan(guide: Callable[..., Any], folder: str, tmp_path: Path) -> None:
    text = written(tmp_path, "text.txt", f"{TEXT}\n" * 30)
    condition = "matching_token and not self"
    done = guide(
        "discover", "score", folder, text, "--patterns", condition, "--patterns", "next", "--sequence-length", 24
    )
    assert done.code == 0, done.err
    assert "0-5" in done.err and "proposed" in done.err and "discover accept" in done.err
    number = re.search(r"measured on (\d+) sequences of the split train\n", done.err)
    assert number and f"only {number[1]} sequences of the split train are read, so what stands out" in done.err
    told = guide("discover", "score", folder, text, "--sequence-length", 24, "--most", 1).err
    reasons = {line.split()[0]: line.partition("proposed")[2] for line in told.splitlines() if "proposed" in line}
    assert set(reasons.values()) - {""}, "a row that is not proposed says why"
    reference = done.out.strip()
    done = guide("discover", "accept", reference, "--into", "found", "--to", "plan.toml")
    assert done.code == 0, done.err
    assert condition in (tmp_path / "plan.toml").read_text()
    assert guide("plan", "check", "plan.toml").code == 0
    done = guide("discover", "accept", reference, "--into", "least-important")
    assert done.code == 2 and "does not say how important heads are" in done.err, "the model has no loss"
    assert "guide discover score measures it" in done.err
    assert "--scores" not in guide("discover", "accept", reference, "--into", "least-important", "--pal").err
    none = guide("discover", "score", folder, text, "--patterns", "next", "--sequence-length", 24, "--deviations", 99)
    assert none.code == 0 and "no head stands out" in none.err and "next: " not in none.err
    done = guide("discover", "export", folder, text, "--to", "heads.html", "--examples", 1, "--sequence-length", 24)
    assert done.code == 0 and done.out.strip() == "heads.html", done.err
    assert b"default-src 'none'" in (tmp_path / "heads.html").read_bytes()


def test_a_page_that_cannot_be_saved_says_why_once(guide: Callable[..., Any], folder: str, tmp_path: Path) -> None:
    text = written(tmp_path, "text.txt", TEXT)
    done = guide("discover", "export", folder, text, "--to", "heads.html", "--masks", "nowhere")
    assert done.code == 2 and done.err.count("no artifact 'nowhere'") == 1, done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "text.txt"], "no artifact 'nothing'"),
        (["MODEL", "nofile.txt"], "no artifact 'nofile.txt'"),
        (["MODEL", "text.txt", "--patterns", "nxt"], "unknown pattern 'nxt'"),
        (["MODEL", "text.txt", "--beside", "MODEL"], "--beside names the same model"),
        (["MODEL", "text.txt", "--port", "1"], "port 1"),
    ],
)
def test_serve_refuses_before_it_listens(
    guide: Callable[..., Any], folder: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    written(tmp_path, "text.txt", TEXT)
    done = guide("discover", "serve", *(folder if each == "MODEL" else each for each in arguments), "--host", "8.8.8.8")
    assert done.code in (2, 3) and (message in done.err or "cannot be used" in done.err)


def test_serve_prints_its_address_alone_and_ends_with_ctrl_c(folder: str, tmp_path: Path) -> None:
    text = written(tmp_path, "text.txt", f"{TEXT}\n" * 5)
    command = [sys.executable, "-m", "cli", "discover", "serve", folder, text, "--store", str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:") and "#token=" in address
        for _ in range(100):
            try:
                page = urllib.request.urlopen(address.partition("#")[0], timeout=5).read()
                break
            except OSError:
                time.sleep(0.1)
        assert b"guide discover" in page
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        told = process.stderr.read()
        assert process.stdout.read() == "" and address.partition("#token=")[2] not in told
        assert "Traceback" not in told, told
