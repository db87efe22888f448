"""Reports: their figures are those of `guide compare`, pages are well formed, escaped and load nothing, bytes are equal twice."""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import io
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from guidance.errors import InputError
from pipelines import papers
from pipelines.metrics.significance import holm, paired_t
from pipelines.report import make, origin, published, results, training
from pipelines.report.blocks import Grid, Items, Picture, Report, Section, as_latex, as_markdown, file_name
from pipelines.report.given import open_all
from pipelines.report.page import as_html
from pipelines.stages import evaluate, probe_importance
from pipelines.stages.search import run_schema
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.views import comparison, comparison_tables
from pipelines.views.comparison_tables import Table, markdown_table
from tests import finetunings, runs, trainings
from tests.tiny import flags
from tests.trainings import one_thread  # noqa: F401

Guide = Callable[..., SimpleNamespace]
UNSAFE = "<b>&\"'</b>"


def losses(start: float, seed: int) -> list[float]:
    return [start - 0.1 * step - 0.01 * seed**2 for step in range(8)]


def four_runs(store: Store) -> list[str]:
    """Two plans with two seeds each; guided runs are lower by 0.5 and 0.6 at every step."""
    names = []
    for plan, gain in (("plain", 0.0), ("guided", 0.5)):
        for seed in (0, 1):
            rows = runs.metrics(
                losses(5 - gain - 0.1 * seed * bool(gain), seed), more={"valid/mlm": {8: 4 - gain - 0.02 * seed}}
            )
            made = runs.finished(store, rows, seed=seed, plan=plan, counts={"steps": 8, "parameters": 1234})
            store.add_name(f"{plan}-{seed}", made)
            names.append(f"{plan}-{seed}")
    return names


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def names(store: Store) -> list[str]:
    return four_runs(store)


@pytest.fixture(scope="module")
def report(store: Store, names: list[str]) -> Report:
    return make.make(names, store, paper="a-table3", title=UNSAFE)[0]


def grid(report: Report, name: str) -> Table:
    blocks = (block for section in report.sections for block in section.blocks)
    return next(block.table for block in blocks if isinstance(block, Grid) and block.name == name)


def test_the_tables_of_training_are_those_of_compare(store: Store, names: list[str], report: Report) -> None:
    expected = comparison_tables.tables(comparison.run(names, store, group=True))
    assert [grid(report, f"training-{table.name}") for table in expected] == expected


def test_differences_of_losses_are_tested_over_seeds_and_corrected_for_their_number(report: Report) -> None:
    found = grid(report, "training-test-1")
    tests = {"mean training loss": [-0.5, -0.6], "final training loss": [-0.5, -0.6], "validation loss": [-0.5, -0.5]}
    del tests["validation loss"]  # equal differences have no p-value
    corrected = holm([paired_t(values).p for values in tests.values()])
    assert [row[0] for row in found.cells] == list(tests)
    for row, values, p in zip(found.cells, tests.values(), corrected, strict=True):
        assert row[3] == f"{sum(values) / 2:+.4f}"
        assert row[5:7] == [f"{paired_t(values).p:.4f}", f"{p:.4f}"]


def test_means_beside_a_difference_are_those_of_its_pairs(store: Store, names: list[str]) -> None:
    third = runs.finished(
        store, runs.metrics(losses(7, 2)), seed=2, plan="plain", counts={"steps": 8, "parameters": 1234}
    )
    found = grid(make.make([*names, third.reference], store)[0], "training-test-1")
    assert [row[0] for row in found.cells] == ["mean training loss", "final training loss"]
    for row in found.cells:
        assert float(row[2]) - float(row[1]) == pytest.approx(float(row[3]), abs=2e-4)


def test_the_numbers_of_the_paper_stand_beside_ours_with_their_gains(report: Report) -> None:
    beside, gains = grid(report, "paper-table"), grid(report, "paper-other-gains")
    assert ["paper", "RoBERTa-16-MLM", "English", "6.40", "7.28", "6.67"] in beside.cells
    ours = {row[1]: row for row in beside.cells if row[0] == "ours"}
    assert ours["plain-*"][4] == "3.990 ± 0.014"
    assert "1,234 parameters" in ours["plain-*"][2]
    assert ["paper", "RoBERTa-16-MLM", "RoBERTa-16-AG", "English", "-4.59", "-4.82", "-4.43"] in gains.cells
    final = next(row for row in gains.cells if row[0] == "ours")
    assert final[4].startswith("-0.550 ± 0.071 (p ")


def test_a_loss_of_fine_tuning_is_not_beside_a_loss_of_masked_words(store: Store, names: list[str]) -> None:
    compared = comparison.run(names, store, group=True)
    table = papers.table("a-table8")
    for loss, ours in (("mlm", {"3.990 ± 0.014", "3.490 ± 0.014"}), ("classification", set())):
        found = published.of_training(replace(compared, loss=loss), "sst", {})
        tables = (block.table for block in published.section(table, found).blocks if isinstance(block, Grid))
        cells = [cell for each in tables for row in each.cells if row[0] == "ours" for cell in row]
        assert set(cells) >= ours and bool(cells) == bool(ours)


AG = ("plain-*=RoBERTa-8-MLM", "guided-*=RoBERTa-8-AG")


def test_where_runs_are_rows_of_the_table_each_number_has_ours_in_its_row(store: Store, names: list[str]) -> None:
    made, _ = make.make(names, store, paper="a-table3", rows=AG, columns=["*=Oromo"])
    beside, gains = grid(made, "paper-beside-ours"), grid(made, "paper-gains")
    assert beside.titles == ["model or method", "data", "measure", "paper", "ours", "our runs", "our data"]
    assert [row[:6] for row in beside.cells[2:4]] == [
        ["RoBERTa-8-MLM", "Oromo", "validation loss, final", "4.06", "3.990 ± 0.014", "plain-*"],
        ["RoBERTa-8-AG", "Oromo", "validation loss, final", "3.93", "3.490 ± 0.014", "guided-*"],
    ]
    assert len(beside.cells) == 6
    valid = next(row for row in gains.cells if row[3] == "validation loss, final")
    assert valid[:5] == ["RoBERTa-8-MLM", "RoBERTa-8-AG", "Oromo", "validation loss, final", "-0.13"]
    assert valid[5:] == ["-0.500 ± 0.000", "-0.37", ""]  # equal differences have no p-value
    p = paired_t([-0.5, -0.6]).p
    assert next(row for row in gains.cells if row[3] == "train loss, final")[5:] == [
        "-0.550 ± 0.071",
        "-0.42",
        f"{p:.3f}",
    ]
    assert {row[0] for row in grid(made, "paper-table").cells} == {"paper"}
    rows = as_html(made).partition('id="paper"')[2]
    assert (
        '<td class="words">Oromo</td><td class="words">validation loss, final</td><td>4.06</td><td>3.990 ± 0.014</td>'
        in rows
    )
    assert dict(made.files())["tables/paper-beside-ours.tex"].count(b"lllrrll") == 1


def test_runs_without_a_row_of_the_table_stand_below_it(store: Store, names: list[str]) -> None:
    made, _ = make.make(names, store, paper="a-table3", rows=["guided-0=RoBERTa-8-AG", *AG[:1]], columns=["*=Oromo"])
    assert {row[5] for row in grid(made, "paper-beside-ours").cells} == {
        "guided-*",
        "plain-*",
    }  # of a group one is enough
    made, _ = make.make(names, store, paper="a-table3", rows=AG[:1], columns=["*=Oromo"])
    assert [row[1] for row in grid(made, "paper-table").cells if row[0] == "ours"] == ["guided-*"]
    made, _ = make.make(names, store, paper="a-table3", rows=[*AG[:1], "giuded-*=RoBERTa-8-AG"], columns=["*=Oromo"])
    assert "no run fits --row giuded-*=RoBERTa-8-AG" in made.facts["notes"]
    made, _ = make.make(names, store, paper="a-table3", rows=AG)  # which language is not said
    assert not [
        block
        for section in made.sections
        for block in section.blocks
        if getattr(block, "name", "") == "paper-beside-ours"
    ]


def test_a_change_that_the_paper_prints_stands_beside_our_difference(store: Store) -> None:
    searches = {
        name: searched(store, {name: [value]}, every=False, metric="f1") for name, value in (("x", 0.5), ("y", 0.6))
    }
    for name, search in searches.items():
        store.add_name(f"e7-{name}", search)
    rows = ["e7-x=Transformer", "e7-y=+ match (m)"]
    made, _ = make.make(["e7-x", "e7-y"], store, paper="e-table7", rows=rows)  # of one column
    assert [row[3:6] for row in grid(made, "paper-gains").cells] == [["F-1", "+0.051", "+0.100"]]
    assert grid(made, "paper-gains").titles[-1] == "ours − paper"
    assert [row[-1] for row in grid(made, "paper-gains").cells] == ["+0.049"]


def test_a_setting_of_a_search_has_a_row_of_its_own(store: Store) -> None:
    search = searched(store, {"a=1": [0.5, 0.6], "a=2": [0.6, 0.8]}, every=True)
    rows = [f"{search.reference}: a?2=Transformer-Guided-Attn (ours)", "*: *=Transformer [19]"]
    made, _ = make.make([search.reference], store, paper="b-table3", rows=rows, columns=["*=CR"])
    assert [row[4] for row in grid(made, "paper-beside-ours").cells] == ["55.0 ± 7.1", "70.0 ± 14.1"]
    (gain,) = grid(made, "paper-gains").cells
    assert gain[3:] == ["accuracy", "+2.4", "+15.0", "+12.6", f"{paired_t([0.1, 0.2]).p:.3f}"]


def test_without_a_figure_of_the_table_the_report_says_so(store: Store, names: list[str]) -> None:
    page = as_html(make.make(names[:1], store, paper="b-table3")[0])
    assert "None of these runs has a figure of this table, which measures accuracy" in page
    assert "is the only run, so it is compared with nothing" in page


class Page(HTMLParser):
    """Checks that every element is closed in order, and collects addresses."""

    EMPTY = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "b", "object")
        if tag not in self.EMPTY:
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_escaped_and_loads_nothing(report: Report) -> None:
    page = as_html(report)
    parsed = Page(page)
    assert all(address.startswith(("#", "data:image/svg+xml;base64,")) for address in parsed.addresses)
    assert {address[1:] for address in parsed.addresses if address.startswith("#")} <= set(parsed.ids)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert UNSAFE not in page
    assert "<h1>&lt;b&gt;&amp;&quot;&#x27;&lt;/b&gt;</h1>" in page
    assert not re.search(r"url\(|@import|https?://", page)
    pictures = [base64.b64decode(a.partition(",")[2]) for a in parsed.addresses if a.startswith("data:")]
    assert len(pictures) == 2
    assert not any(re.search(rb'(?:href|src)="(?!#|data:)', picture) for picture in pictures)


def test_a_folder_with_signs_of_html_in_its_name_stays_a_name(store: Store, names: list[str], tmp_path: Path) -> None:
    from pipelines.storage import transfer

    folder = tmp_path / "<b>&"
    with store.load(names[0]) as artifact:
        transfer.export(artifact, folder)
    made = make.make([str(folder)], store)[0]
    page = as_html(made)
    Page(page)
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page
    assert "\\<b\\>&" in as_markdown(made, "x")


def test_the_same_runs_give_the_same_bytes(store: Store, names: list[str], report: Report, tmp_path: Path) -> None:
    again, plans = make.make(names, store, paper="a-table3", title=UNSAFE)
    for folder, one in ((tmp_path / "one", report), (tmp_path / "two", again)):
        make.write(one, plans, folder, "r")
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert {str(file) for file in files} >= {
        "r.html",
        "r.md",
        "r/commands.sh",
        "r/references.bib",
        "r/figures/training-curves.pdf",
    }
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_a_second_report_leaves_no_file_of_the_first_beside_its_own_but_those_of_others(
    store: Store, names: list[str], report: Report, tmp_path: Path
) -> None:
    def there() -> set[str]:
        return {str(path.relative_to(tmp_path / "r")) for path in (tmp_path / "r").rglob("*") if path.is_file()}

    alone, plans = make.make(names[:1], store)
    make.write(alone, {**plans, "plans/old.toml": b"old"}, tmp_path, "r")
    first = there()
    make.write(report, {}, tmp_path, "r")
    (tmp_path / "r" / "tables" / "mine.csv").write_text("mine")
    changed = tmp_path / "r" / "tables" / "paper-table.csv"
    changed.write_text("changed")
    make.write(alone, plans, tmp_path, "r")
    assert there() == first - {"plans/old.toml"} | {"tables/mine.csv", "tables/paper-table.csv"}
    assert not (tmp_path / "r" / "plans").exists() and changed.read_text() == "changed"
    sums = (tmp_path / "r" / "sha256sums.txt").read_text().splitlines()
    assert {line.split("  ")[1] for line in sums} == first - {"plans/old.toml", "sha256sums.txt"}
    (tmp_path / "r" / "sha256sums.txt").write_text(f"{hashlib.sha256(b'mine').hexdigest()}  ../mine\n\n")
    (tmp_path / "mine").write_bytes(b"mine")
    make.write(alone, plans, tmp_path, "r")
    assert (tmp_path / "mine").exists()


def test_columns_of_text_are_aligned_left_and_numbers_right(report: Report) -> None:
    columns = ["run", "data", "plan", "loss", "steps"]
    table = Table("", columns, [["a", "wiki-2-128", "–", "3.1 ± 0.2", ">1,000"], ["b", "20news", "x", "DNC", "never"]])
    table.cells.extend(["d", each, "", "18.0 MB", "87.6 (quoted)"] for each in ("6 Layer 8 Heads", "6 Layer 12 Heads"))
    table.cells.append(["c", "9-9-9-9", "own.toml", "-1e-05 (p <0.001)", "12"])
    assert markdown_table(table)[1] == "| --- | --- | --- | ---: | ---: |"
    assert r"\begin{tabular}{lllrr}" in as_latex(table, "t")
    page = as_html(Report("t", "l", [Section("s", "s", [Grid("g", table)])]))
    assert '<td class="words">20news</td><td class="words">x</td><td>DNC</td>' in page


def test_markdown_escapes_an_ampersand_only_where_it_would_be_an_entity(report: Report) -> None:
    assert "# A & B\\&amp;\\&#60;" in as_markdown(Report("A & B&amp;&#60;", "", []), "x")


def test_of_one_seed_no_means_and_p_values_are_spoken_of(store: Store, names: list[str], report: Report) -> None:
    plain, guided = names[0], names[2]
    alone = as_markdown(make.make([plain, guided], store, paper="a-table3")[0], "x")
    several = as_markdown(report, "x")
    for words in ("p-values", "means over seeds"):
        assert words in several.partition("## Methods")[0]
        assert words not in alone.partition("## Methods")[0]


def test_our_runs_beside_a_table_are_called_so_and_notes_on_its_numbers_are_a_list(
    store: Store, names: list[str]
) -> None:
    made = make.make(names, store, paper="a-table3")[0]
    assert made.title == "Our runs beside Deshpande & Narasimhan 2020, table 3"
    (notes,) = [block for section in made.sections for block in section.blocks if isinstance(block, Items)]
    assert len(notes.items) > 1
    assert f"<li>{html.escape(notes.items[1])}</li>" in as_html(made)
    assert f"\n\n- {notes.items[0]}\n- " in as_markdown(made, "x")


def test_a_box_of_the_lineage_counts_one_document_in_the_singular(store: Store) -> None:
    one = runs.finished(store, None, counts={"documents": 1, "tokens": 2000})
    with ExitStack() as stack:
        nodes = origin.nodes_of(open_all([one.reference], store, stack))
    (node,) = [node for node in nodes.values() if node.parents]
    assert node.lines[-2:] == ["1 document", "2,000 tokens"]


def test_a_search_costs_the_seconds_of_its_runs_each_once(store: Store, guide: Guide) -> None:
    made = [timed(store, seconds) for seconds in (1.5, 2.5)]
    sources = [{"kind": "model", "recipe": each.recipe, "content": each.content} for each in made]
    searches = [
        searched(
            store,
            {"a=1": [0.5, number / 10]},
            every=True,
            seconds=0.25,
            inputs={f"model-{n}": source for n, source in enumerate(sources[:number])},
        )
        for number in (1, 2)
    ]
    report = make.make([each.reference for each in searches], store)[0]
    assert [row[1] for row in grid(report, "cost").cells] == ["1.8", "4.2"]
    assert "All of it took 4.5 seconds, 0.0 of them" in as_markdown(report, "x")
    shown = guide("show", searches[0].path, "--store", store.root)
    assert shown.code == 0 and "stage      search" in shown.out and "0.25" not in shown.out


def test_what_the_runs_of_a_search_start_from_is_drawn_and_made_again_before_it(store: Store) -> None:
    start = runs.finished(store, None, config={"layers": 3}, counts={"parameters": 5})
    source = {"kind": "model", "recipe": start.recipe, "content": start.content}
    other = {"kind": "corpus", "recipe": "1" * 64, "content": "1" * 64}
    with store.build(
        "model", digest("begun"), {"stage": "finetune", "inputs": {"init": source, "sequences": other}}
    ) as out:
        out.write("config.json", b"{}")
    run = Artifact(store.folder("model", digest("begun")))
    inputs = {"model": {"kind": "model", "recipe": run.recipe, "content": run.content}}
    search = searched(store, {"a=1": [0.25]}, every=False, config={"init": start.reference}, inputs=inputs)
    made, _ = make.make([search.reference], store)
    script = next(content.decode() for name, content in made.files() if name == "commands.sh")
    assert "model_1=$(guide pretrain" in script and 'guide search --init "$model_1"' in " ".join(script.split())
    with ExitStack() as stack:
        nodes = origin.nodes_of(open_all([search.reference], store, stack))
    (node,) = [node for node in nodes.values() if node.title == search.reference]
    assert [nodes[key].title for key in node.parents] == [start.reference]


def test_the_plan_of_a_run_may_be_inherited(store: Store) -> None:
    def input_of(artifact: Artifact) -> dict[str, str]:
        return {"kind": artifact.kind, "recipe": artifact.recipe, "content": artifact.content}

    def tuned(*files: str) -> Artifact:
        recipe = digest(["tuned", files])
        with store.build(
            "model",
            recipe,
            {"stage": "finetune", "config": {"epochs": len(files)}, "inputs": {"init": input_of(start)}},
        ) as out:
            for file in ("config.json", *files):
                out.write(file, b"")
        return Artifact(store.folder("model", recipe))

    def measured(model: Artifact) -> Artifact:
        recipe = digest(["measured", model.recipe])
        with store.build(
            "evaluation", recipe, {"stage": "evaluate", "config": {}, "inputs": {"model": input_of(model)}}
        ) as out:
            out.counts |= {"task": "choice", "metrics": {"accuracy": 0.5}}
        return Artifact(store.folder("evaluation", recipe))

    start = runs.finished(store, [], plan="guided")
    guided, plain = tuned("plan.toml"), tuned()
    given = [start, guided, plain, measured(guided), measured(start), measured(plain)]
    made, _ = make.make([each.reference for each in given], store)
    expected = ["guided.toml", "guided.toml, inherited", "–", "guided.toml, inherited", "guided.toml", "–"]
    assert [row[5] for row in grid(made, "runs").cells] == expected
    called = [row[0] for row in grid(made, "evaluation-1-metrics").cells]
    assert called == [each.reference for each in (guided, start, plain)], (
        "evaluations without names are called as models"
    )


def timed(store: Store, seconds: float) -> Artifact:
    """A model that took some seconds."""
    recipe = digest(["timed", seconds])
    with store.build("model", recipe, {"stage": "finetune", "config": {}, "inputs": {}, "seconds": seconds}) as out:
        out.write("config.json", b"{}")
    return Artifact(store.folder("model", recipe))


def test_tables_are_csv_and_latex_beside_the_page(report: Report) -> None:
    files = dict(report.files())
    table = grid(report, "training-losses")
    assert list(csv.reader(io.StringIO(files["tables/training-losses.csv"].decode()))) == [table.titles, *table.cells]
    tex = as_latex(Table("a_b & 100 %", ["run", "n"], [["plain-* ± 1", "<0.001"]]), "t")
    assert r"\caption{a\_b \& 100 \%}" in tex
    assert r"plain-* $\pm$ 1 & $<$0.001 \\" in tex
    for name in ("lineage", "training-curves"):
        assert files[f"figures/{name}.svg"].startswith(b"<?xml")
        assert files[f"figures/{name}.pdf"].startswith(b"%PDF")


def test_runs_are_compared_with_a_baseline_of_their_own_size_where_plans_were_crossed_with_sizes(store: Store) -> None:
    given = []
    for layers in (2, 4):
        for plan in ("plain", "guided"):
            config = {"layers": layers}
            made = runs.finished(store, runs.metrics(losses(5, 0)), plan=plan, config=config, sequences="crossed")
            given.append(made.reference)
    made, _ = make.make(given, store)
    titles = [section.title for section in made.sections if section.name.startswith("training")]
    assert titles == ["Training: layers 2", "Training: layers 4"]


def test_models_that_cannot_be_compared_are_reported_apart(store: Store, names: list[str]) -> None:
    other = runs.finished(store, runs.metrics(losses(7, 0), loss="rtd"), config={"objective": "electra"})
    bare = runs.finished(store, None)
    made, _ = make.make([*names, other.reference, bare.reference], store)
    assert [section.name for section in made.sections if section.name.startswith("training")] == [
        "training-1",
        "training-2",
    ]
    assert any("has no learning curve" in note for note in made.facts["notes"])


def searched(
    store: Store,
    tested: dict[str, list[float]],
    *,
    every: bool,
    metric: str | None = "accuracy",
    kept: list[str] | None = None,
    **about: Any,
) -> Artifact:
    """A search over these settings, each with the test metric of its seeds; the first is chosen, and tested alone unless ``every``.
    Without a metric nothing is tested, as in pre-training.  All runs keep some rows of the plan, if these vary."""
    best = next(iter(tested))
    rows = [
        {
            "fold": 0,
            "step": None,
            "seconds": None,
            "seed": seed,
            "setting": setting,
            "rows": kept,
            "model": "",
            "valid": 1.0,
        }
        | {"selected_on": True, "chosen": setting == best}
        | {"evaluation": "e" if metric and (every or setting == best) else None}
        | ({f"test/{metric}": value if every or setting == best else None} if metric else {})
        for setting, values in tested.items()
        for seed, value in enumerate(values)
    ]
    inputs = {"dataset": {"kind": "corpus", "recipe": "0" * 64, "content": "0" * 64}}
    config = {"grid": ["a=1,2"], "test_every": every}
    manifest = {"stage": "search", "stage_version": 1, "config": config, "inputs": inputs, **about}
    settings = {setting: {"mean": 1.0, "sd": 0.0, "chosen": 3 * (setting == best)} for setting in tested}
    with store.build("search", digest([tested, every]), manifest) as out:
        schema = run_schema([metric] if metric else [])
        with out.parquet("runs.parquet", schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema))
        out.counts |= {
            "task": "classification",
            "select": "loss",
            **({"rows": kept} if kept else {}),
            "runs": len(rows),
            "metrics": {},
            "settings": settings,
        }
    return Artifact(store.folder("search", digest([tested, every])))


def test_settings_of_a_search_are_summarised_and_tested_over_seeds(store: Store) -> None:
    metrics = {"a=1": [0.5, 0.6, 0.7], "a=2": [0.6, 0.8, 0.8]}
    search = searched(store, metrics, every=True)
    made, _ = make.make([search.reference], store, paper="b-table3")
    assert grid(made, f"search-1-search-{search.id}-settings").cells[0] == ["a=1", "1.0000 ± 0.0000", "3"]
    (tested,) = made.facts["comparisons"]
    assert tested["difference"]["p"] == pytest.approx(paired_t([0.1, 0.2, 0.1]).p)
    assert grid(made, "search-1-metrics").cells == [["a=1", "3", "0.6000 ± 0.1000"], ["a=2", "3", "0.7333 ± 0.1155"]]
    assert [row[3] for row in grid(made, "paper-table").cells if row[0] == "ours"] == [
        "60.0 ± 10.0",
        "73.3 ± 11.5",
    ]
    assert "guide search corpus/0000000000000000 --grid a=1,2" in as_markdown(made, "x")


def test_a_search_over_rows_leaves_the_tests_of_all_others(store: Store) -> None:
    plain, guided = (searched(store, {"a=1": values}, every=False) for values in ([0.5, 0.6, 0.7], [0.6, 0.8, 0.8]))
    over_rows = searched(store, {"a=1": [0.5]}, every=False, kept=["next"])
    made, _ = make.make([each.reference for each in (plain, guided, over_rows)], store)
    (tested,) = made.facts["comparisons"]
    assert tested["difference"]["p"] == pytest.approx(paired_t([0.1, 0.2, 0.1]).p)
    text = as_markdown(made, "x")
    assert "varies the rows of its plan, and" in text
    assert "No difference between runs was tested" not in text


def test_of_one_run_each_a_gain_has_no_p_value(store: Store) -> None:
    searches = [searched(store, {"a=1": [value]}, every=False).reference for value in (0.5, 0.6)]
    made, _ = make.make(searches, store, paper="b-table3")
    assert [row[-1] for row in grid(made, "paper-other-gains").cells if row[0] == "ours"] == ["+10.0"]
    assert "None of our differences is tested" in as_markdown(made, "x")
    ((*_, p, corrected, test),) = grid(made, "search-1-compared-test-1").cells
    assert (p, corrected, test) == ("–", "–", "needs several seeds")


def test_what_is_the_same_for_every_model_is_not_tested(store: Store) -> None:
    for seed, (metric, n) in enumerate((("rouge1", 1), ("rouge1_lead", 0), ("rougeLsum_oracle_seen", 0))):
        search = searched(store, {"a=1": [0.5, 0.6], "a=2": [0.6, 0.8 + seed]}, every=True, metric=metric)
        assert len(make.make([search.reference], store)[0].facts["comparisons"]) == n, metric


def test_losses_by_which_a_search_chose_stand_there_once(store: Store) -> None:
    inputs = {"sequences": {"kind": "sequences", "recipe": "0" * 64, "content": "0" * 64}}
    search = searched(store, {"a=1": [0.5], "a=2": [0.5]}, every=False, metric=None, inputs=inputs)
    made, _ = make.make([search.reference], store)
    names = [block.name for section in made.sections for block in section.blocks if isinstance(block, Grid)]
    assert [name for name in names if name.startswith("search-1")] == [
        f"search-1-{file_name(search.reference)}-settings"
    ]


def test_searches_of_one_setting_share_a_table(store: Store) -> None:
    searches = [searched(store, {"": [value]}, every=False).reference for value in (0.5, 0.6)]
    made, _ = make.make([*searches, searched(store, {"a=1": [0.5], "a=2": [0.5]}, every=True).reference], store)
    own = next(section for section in made.sections if section.name == "search-1").blocks
    assert [block.name.rpartition("-")[2] for block in own[:3] if isinstance(block, Grid)] == [
        "1",
        "settings",
        "metrics",
    ]
    assert grid(made, "search-1-alone-1").cells == [[name, "(no grid)", "1.0000 ± 0.0000", "3"] for name in searches]


def test_files_of_data_and_plans_are_named_without_their_folders(store: Store) -> None:
    config = {"plan": ["/home/me/plans/next.toml", "preset:ag"], "batch_tokens": 2048}
    model = runs.finished(store, [], config=config, counts={"steps": 600})
    files = {"kind": "files", "content": "0" * 64, "count": 3, "first": ["one.conll", "two.conll", "three.conll"]}
    for name, inputs in (("coref", {"texts": files}), ("reflexive", {})):
        manifest = {"stage": f"probe-{name}", "inputs": inputs, "config": {}}
        with store.build("probe", digest(name), manifest) as out:
            out.counts |= {"probe": name}
    probes = [f"probe/{digest(name)[:16]}" for name in ("coref", "reflexive")]
    made, _ = make.make([model.reference, *probes], store)
    cells = grid(made, "runs").cells
    assert [row[4] for row in cells[1:]] == ["one.conll and 2 more", "–"]
    assert [row[5] for row in cells] == ["next.toml, preset:ag", "–", "–"]
    assert "/home/me" not in as_markdown(made, "x").partition("## The commands")[0]
    assert "for 600 steps of at most 2,048 tokens" in as_markdown(made, "x")


def test_of_a_search_that_tested_only_what_it_chose_only_that_is_ours(store: Store) -> None:
    search = searched(store, {"a=1": [0.5, 0.7], "a=2": [0.1, 0.2]}, every=False)
    made, _ = make.make([search.reference], store)
    assert made.facts["comparisons"] == []
    assert grid(made, "search-1-metrics").cells == [[search.reference, "2", "0.6000 ± 0.1414"]]


def test_evaluations_are_summarised_over_the_seeds_of_their_models() -> None:
    base = results.Scored("plain-*", [0, 1, 2], {"accuracy": [0.5, 0.6, 0.7]})
    other = results.Scored("guided-*", [2, 0, 3], {"accuracy": [0.8, 0.7, 0.1]})
    (tested,) = results.tests_over_seeds([base, other])
    assert (tested.first, tested.second) == (pytest.approx(0.6), pytest.approx(0.75))
    assert tested.difference.p == pytest.approx(paired_t([0.2, 0.1]).p)
    assert results.metric_table([base], "c").cells == [["plain-*", "3", "0.6000 ± 0.1000"]]


def test_a_real_model_and_its_probe_with_attention_commands_and_citations(
    store: Store, guide: Guide, tmp_path: Path
) -> None:
    data = trainings.sequences(store)
    plan = tmp_path / "own.toml"
    plan.write_text(
        '[[guide]]\npattern = "rare_free"\n'.replace("rare_free", "next") + 'mechanism = "fix"\nheads = [0]\n'
    )
    model = trainings.train(store, data, plan=[str(plan)], snapshots=[2], steps=4, seed=3).artifact
    store.add_name("real", model)
    probe = probe_importance.run(model.reference, data.reference, store=store).artifact
    made, plans = make.make(["real", probe.reference], store)
    pictures = [block.name for section in made.sections for block in section.blocks if isinstance(block, Picture)]
    assert {"attention-real", "probe-1-score", "lineage"} <= set(pictures)
    files = {name: content.decode() for name, content in made.files() if name.endswith((".sh", ".bib"))}
    ((plan_file, plan_text),) = plans.items()
    assert b'pattern = "next"' in plan_text
    commands = files["commands.sh"]
    assert re.search(rf'model_1=\$\(guide pretrain "\$sequences_1" .*--plan {plan_file} .*--name real\)', commands)
    assert 'guide probe importance "$model_1" "$sequences_1"' in commands
    assert [row[7] for row in grid(made, "cost").cells] == [f"{model.counts['memory_bytes'] / 2**20:,.0f}", "–"]
    keys = re.findall(r"@\w+\{([\w-]+),", files["references.bib"])
    assert keys == ["li2022", "deshpande2020", "devlin2019", "liu2019", "michel2019", "guide"]


def test_the_commands_of_a_report_find_what_exists_already(tmp_path: Path, guide: Guide) -> None:
    store = Store(tmp_path / "artifacts")
    rows = finetunings.reviews(30)
    data = finetunings.build(store, tmp_path, {"train": rows[:20], "valid": rows[20:25], "test": rows[25:]})
    store.add_name("reviews", data)
    model = finetunings.train(store, data, epochs=1, layers=1, seed=5, plan=["preset:neighbours"]).artifact
    tested = evaluate.run(model.reference, data.reference, evaluate.Config(limit=4), store=store).artifact
    made, _ = make.make([tested.reference], store)
    script = next(content.decode() for name, content in made.files() if name == "commands.sh")
    variables: dict[str, str] = {}
    for line in script.splitlines()[3:]:
        variable, command = re.fullmatch(r"(\w+)=\$\(guide (.*)\)", line).groups()  # type: ignore[union-attr]
        words = [re.sub(r"\$(\w+)", lambda name: variables[name[1]], word) for word in shlex.split(command)]
        done = guide(*words, "--dry-run", "--store", store.root)
        assert "dry run: up to date" in done.err, line
        variables[variable] = done.out.strip()
    assert variables["evaluation_1"] == tested.reference
    assert variables["corpus_1"] == data.reference


def test_sequences_of_a_models_tokenizer_are_made_again_from_its_folder(tmp_path: Path, guide: Guide) -> None:
    (tmp_path / "text.txt").write_text("A cat sat there. Another cat did not sit.\n\n" * 30)
    small = flags(trainings.TINY) + flags({"steps": 2, "batch_size": 4})
    for words in (
        ["build-corpus", "text.txt", "--name", "cats"],
        ["build-tokenizer", "cats", "--vocab-size", 300, "--name", "pieces"],
        ["build-sequences", "cats", "my-bert", "--max-length", 16, "--name", "packed"],
        ["pretrain", "packed", *small, "--name", "first"],
        ["build-sequences", "cats", "first", "--max-length", 24, "--name", "longer"],
        ["pretrain", "longer", *small, "--name", "second"],
    ):
        done = guide(*words)
        assert done.code == 0, done.err
        if "pieces" in words:
            own = tmp_path / "artifacts" / done.out.strip()
            shutil.copytree(own, tmp_path / "my-bert", ignore=shutil.ignore_patterns("artifact.json"))
    made, _ = make.make(["first", "second"], Store(tmp_path / "artifacts"))
    script = next(content.decode() for name, content in made.files() if name == "commands.sh")
    lines = [line.partition("(")[2] for line in script.splitlines() if "build-sequences" in line]
    assert lines[0] == 'guide build-sequences "$corpus_1" my-bert --max-length 16 --name packed)'
    assert lines[1] == 'guide build-sequences "$corpus_1" "$model_1" --max-length 24 --name longer)'


def bad(guide: Guide, store: Store, *arguments: object) -> Any:
    done = guide("report", *arguments, "--store", store.root)
    assert (done.code, done.out) == (2, "")
    return done.err


def test_bad_inputs_are_answered_in_a_line(store: Store, names: list[str], guide: Guide, tmp_path: Path) -> None:
    assert "no artifact 'nothing'" in bad(guide, store, "nothing")
    assert "did you mean 'a-table3'?" in bad(guide, store, names[0], "--paper", "a-table33")
    assert "did you mean 'RoBERTa-8-AG'?" in bad(
        guide, store, names[0], "--paper", "a-table3", "--row", "*=RoBERTa-8-AF"
    )
    assert "did you mean 'Oromo'?" in bad(
        guide, store, names[0], "--paper", "a-table3", "--column", "*=Oroma", "--dry-run"
    )
    assert "--row '*-plain-*=RoBERTa-8-MLM'" in bad(guide, store, names[0], "--paper", "a-table3", "--row", "plain-0")
    assert "--paper TABLE" in bad(guide, store, names[0], "--row", "plain-0=RoBERTa-8-MLM")
    data = trainings.sequences(store, train=4, valid=2)
    assert "of kind sequences; a report is about models" in bad(guide, store, names[0], data.reference)
    assert "is not finished" in bad(guide, store, runs.going(store, runs.metrics([3.0])))
    assert "bad name" in bad(guide, store, names[0], "--name", "../x")
    assert "Missing argument" in bad(guide, store)
    (tmp_path / "file").write_text("")
    assert "is a file, not a folder" in bad(guide, store, names[0], "--out", "file")


def test_the_command_prints_the_path_of_the_page_or_all_figures(store: Store, names: list[str], guide: Guide) -> None:
    done = guide("report", *names[:1], "--out", "here", "--name", "one", "--store", store.root)
    assert (done.code, done.out) == (0, "here/one.html\n")
    assert Path("here/one.html").stat().st_size > 1000
    dry = guide("report", "dry:model", *names, "--paper", "a-table3", "--dry-run", "--store", store.root)
    assert (dry.code, dry.out) == (0, "dry:report\n")
    assert not Path("reports").exists()
    assert "of kind corpus" in bad(guide, store, "dry:corpus", "--dry-run")
    assert "did you mean" in bad(guide, store, "dry:model", "--paper", "a-table33", "--dry-run")
    assert "dry:model" in bad(guide, store, "dry:model")


def test_a_run_without_a_seed_is_in_no_pair(store: Store, names: list[str]) -> None:
    rows = runs.metrics(losses(4, 0))
    seedless = runs.finished(store, rows, plan="other", config={"seed": None})
    compared = training.compared(make.open_all([*names, seedless.reference], store, SimpleStack()), None, [])
    assert any("in no pair" in note for _, one in compared for note in one.notes)


class SimpleStack:
    """Keeps artifacts open."""

    def enter_context(self, artifact: Any) -> Any:
        return artifact


def test_no_runs_are_refused(store: Store) -> None:
    with pytest.raises(InputError, match="no runs to report on"):
        make.make([], store)
