"""The pages of ``docs/`` are true: links lead somewhere, examples run, and no key, option or public name is missing."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

import guidance
from cli import main
from guidance.attention.backends import BACKENDS
from guidance.mechanisms import MECHANISMS
from guidance.models.families import FAMILIES
from guidance.patterns import PATTERNS
from guidance.patterns.features import FEATURES
from guidance.plan import presets

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text_of(name), re.S)


def test_sources_are_papers_that_readers_have_and_have_one_year() -> None:
    folders = ("guidance", "pipelines", "cli", "docs", "benchmarks", "examples")
    files = [file for folder in folders for end in ("py", "md", "toml") for file in (ROOT / folder).rglob(f"*.{end}")]
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            assert not re.search(r"METHODS( [A-Z]\b|$)|Wang et al\.,? 20(?!19|20)", line), f"{file}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_all_lines_of_a_table_have_as_many_cells(page: Path) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", without_code(page.read_text(encoding="utf-8")), re.M):
        sizes = {line: len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(set(sizes.values())) == 1, min(sizes, key=lambda line: sizes[line])


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)\)", text_of("docs/README.md")))
    folders = [DOCS, DOCS / "papers", DOCS / "commands"]
    pages = {page.relative_to(DOCS).as_posix() for folder in folders for page in folder.glob("*.md")}
    assert pages - {"README.md"} <= linked
    assert "results/README.md" in linked


def test_every_package_is_in_the_layout() -> None:
    layout = text_of("CONTRIBUTING.md").split("## Layout")[1].split("\n## ")[0]
    found = {init.parent for root in ("guidance", "pipelines", "cli") for init in (ROOT / root).rglob("__init__.py")}
    assert [name for name in sorted(map(name_of, found)) if name != "pipelines" and f"`{name}/`" not in layout] == []


def test_what_is_generated_of_the_pages_is_up_to_date(tmp_path: Path) -> None:
    """In a process of its own: commands stand in the order of their import."""
    generated = [page.relative_to(DOCS).as_posix() for page in DOCS.glob("commands/*.md")]
    pages = {name: text_of(f"docs/{name}") for name in ("command-line.md", "tables.md", *generated)}
    for name in ("command-line.md", "tables.md"):
        (tmp_path / name).write_text(pages[name], encoding="utf-8")
    subprocess.run([sys.executable, DOCS / "generate.py", tmp_path], check=True)
    for name, text in pages.items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text, "run: python docs/generate.py"
    assert {page.name for page in tmp_path.glob("commands/*")} == {page.name for page in DOCS.glob("commands/*")}


def test_a_table_without_a_section_gets_one_and_an_outdated_column_is_mended() -> None:
    with_tables, page = runpy.run_path(str(DOCS / "generate.py"))["with_tables"], text_of("docs/tables.md")
    start, rest = page.split("### heads.parquet of sinks\n")
    section, _, rest = rest.partition("\n### ")
    made = with_tables(f"{start}### {rest}")
    columns = section[section.index("| column") :]
    assert f"### heads.parquet of sinks\n\nWritten by `guide probe sinks`.\n\n{columns}\nThe commands" in made
    outdated = page.replace("| `special` | double | mean attention", "| `special` | int64 | attention")
    assert with_tables(outdated) == page != outdated


PLANS = [
    (name, number, block)
    for name in ("docs/plans.md", "docs/concepts.md", "docs/your-language.md")
    for number, block in enumerate(blocks(name, "toml"))
]


@pytest.mark.parametrize(("name", "number", "block"), PLANS, ids=[f"{name}-{number}" for name, number, _ in PLANS])
def test_plans_of_the_pages_can_be_read(name: str, number: int, block: str) -> None:
    assert guidance.Plan.parse(block, source=name).guides


SHOWN = [
    (name, *block)
    for name in ("docs/plans.md", "docs/concepts.md")
    for block in re.findall(r"```text\n\$ guide ([^\n]*)\n(.*?)```", text_of(name), re.S)
]


@pytest.mark.parametrize(("name", "command", "output"), SHOWN, ids=[command for _, command, _ in SHOWN])
def test_shown_output_is_what_the_command_prints(
    name: str, command: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(shlex.split(command)) == 0
    assert capsys.readouterr().out == output, name


def said(name: str) -> set[str]:
    """The words that a page has in backticks."""
    spans = re.findall(r"`([^`\n]+)`", without_code(text_of(name)) + " ".join(blocks(name, "toml")))
    return {word for span in spans for word in re.findall(r"[\w-]+", span)}


def test_the_page_of_plans_describes_every_key_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "new"]) == 0
    template = capsys.readouterr().out
    options = re.findall(r"\b([a-z]\w*)(?: = |: .* by default)", template)
    keys = {*options, *re.findall(r"^#   ([a-z]\w*)", template, re.M)}
    added = set(re.findall(r"^(\w+) = ", "".join(b for b in blocks("docs/plans.md", "toml") if "[pal]" in b), re.M))
    assert {"mechanism", "hold_steps", "penalty_weight", "unique", "conflict", "gate", "placement"} <= keys
    assert keys - said("docs/plans.md") - added == set()


def test_the_page_of_plans_lists_every_pattern_and_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["patterns", "list", "--json"]) == 0
    patterns = {pattern["name"] for pattern in json.loads(capsys.readouterr().out)["patterns"]}
    assert patterns - said("docs/plans.md") == set()
    section = text_of("docs/plans.md").split("\n## Presets\n")[1].split("\n## ")[0]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`([\w-]+)`", row)}
    assert listed == set(presets())


REGISTRIES = (PATTERNS, FEATURES, MECHANISMS, FAMILIES, BACKENDS)


@pytest.fixture
def registries() -> Iterator[None]:
    """Whatever a failing page leaves registered would stand in the way of later tests."""
    yield
    for registry in REGISTRIES:
        for name in list(registry.packages):
            registry.remove(name)


@pytest.mark.usefixtures("registries")
def test_the_code_of_the_library_page_runs_and_leaves_nothing_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = types.ModuleType("my_package")
    monkeypatch.setitem(sys.modules, "my_package", page)
    for number, block in enumerate(blocks("docs/library.md", "python")):
        exec(compile(block, f"docs/library.md, block {number}", "exec"), page.__dict__)
    assert not any(registry.packages for registry in REGISTRIES)
    shown = [block for block in blocks("docs/library.md", "toml") if block.startswith("[packages]")]
    assert len(shown) == 1 and shown[0] in capsys.readouterr().out


@pytest.mark.usefixtures("registries")
def test_what_the_page_for_people_from_elsewhere_shows_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the dog saw the man .\nthe man saw it .\n" * 20)
    save_tiny("./bert-base", ["the", "dog", "saw", "man", "and", "it", "barked"])
    (plan,) = blocks("docs/coming-from.md", "toml")
    Path("off.toml").write_text(plan)
    for line in "".join(blocks("docs/coming-from.md", "bash")).splitlines():
        assert main.run(shlex.split(line)[1:]) == 0, line + capsys.readouterr().err
    (code,) = blocks("docs/coming-from.md", "python")
    shown: dict[str, Any] = {}
    exec(compile(code, "docs/coming-from.md", "exec"), shown)
    model, batch = shown["model"], shown["batch"]
    maps = {site.layer: of_heads for site, of_heads in shown["maps"].items()}
    assert not maps[1][:, [0, 3]].any() and (maps[1][:, [1, 2]].sum(-1) - 1).abs().max() < 1e-6
    assert not torch.equal(shown["without_the_heads"], model(**batch).logits)


def test_the_commands_and_the_code_of_the_page_of_decoders_run_on_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but those that train, and those that need a corpus."""
    monkeypatch.chdir(tmp_path)
    page = text_of("docs/decoders.md")
    for name, text in re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", page, re.M | re.S):
        Path(name).write_text(text)
    words = ["the", "dog", "value", "of", "object", *re.findall(r'"answer": "(\w+)"', page.lower())]
    save_tiny("./my-llama", [*words, *map(str, range(50))], decoder=True)
    lines = [line.removeprefix("$ ") for line in page.splitlines() if re.match(r"(\$ )?guide .*(my-llama|steer)", line)]
    asked = [line for line in lines if not re.search(r"my-128|small-llama", line)]
    assert len(asked) == 9
    for line in asked:
        assert main.run(shlex.split(line)[1:]) == 0, line + capsys.readouterr().err
    (code,) = blocks("docs/decoders.md", "python")
    exec(compile(code, "docs/decoders.md", "exec"), {})


def save_tiny(folder: str, words: list[str], *, decoder: bool = False) -> None:
    """A tiny BERT of the given words, or a tiny Llama."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *words]
    split = Tokenizer(WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    split.normalizer, split.pre_tokenizer = Lowercase(), Whitespace()
    split.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    roles = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    transformers.PreTrainedTokenizerFast(tokenizer_object=split, **roles).save_pretrained(folder)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 16}
    sizes |= {"vocab_size": len(vocabulary), "max_position_embeddings": 128, "pad_token_id": 0}
    if decoder:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(bos_token_id=2, eos_token_id=3, **sizes))
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    model.save_pretrained(folder)


def test_the_library_page_names_every_feature_and_family() -> None:
    assert set(FEATURES) - said("docs/library.md") == set()
    models = text_of("docs/library.md").split("\n## Models and limits\n")[1].split("\n## ")[0]
    labels = {label for family in FAMILIES.values() for label in re.split(r" and (?=[A-Z])", family.label)}
    assert {label for label in labels if label not in models} == set()


def test_no_page_has_a_gap_left() -> None:
    assert [name_of(page) for page in PAGES if "<!-- api:" in page.read_text(encoding="utf-8")] == []


def test_tables_of_signatures_name_what_there_is() -> None:
    tables = text_of("docs/library.md").split("\n## Every public name\n")[1]
    for kind, heading in ((guidance.Handle, "of a handle"), (guidance.BatchGuidance, "of a batch's guidance")):
        rows = re.findall(r"^\| (`.*?) \|", tables.split(f"| {heading} |")[1].split("\n\n")[0], re.M)
        spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
        assert spans
        for span in spans:
            name, call, arguments = span.partition("(")
            if not call:
                continue
            known = inspect.signature(getattr(kind, name)).parameters
            given = {argument.strip(" *").partition("=")[0] for argument in arguments.rstrip(")").split(",")} - {""}
            own = {each for each, it in known.items() if it.kind is not inspect.Parameter.VAR_KEYWORD} - {"self"}
            assert own <= given, span
            assert given <= own or any(it.kind is inspect.Parameter.VAR_KEYWORD for it in known.values()), span


def test_the_library_page_names_everything_that_the_package_exports() -> None:
    assert {name for name in guidance.__all__ if f"`guidance.{name}`" not in text_of("docs/library.md")} == set()
