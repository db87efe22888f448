"""What the page draws, in a real browser: pictures, maps, lines, differences and figures, and which examples there are."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests import trainings
from tests.pipelines.explorer.browsing import head, opened, ready, until
from tests.pipelines.explorer.serving import HOSTILE, Page, model_folder, served


def reading(tab: Any) -> str:
    return str(tab.locator("#reading").inner_text())


def shares(page: Page, layer: int, number: int, example: int = 0, side: int = 0) -> np.ndarray:
    raw = np.frombuffer(page.workspace.sides[side].map(example, layer, number, "self"), "<u2") / 65535.0
    return np.square(raw).reshape(int(len(raw) ** 0.5), -1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("width", "least"), [(1280, 25), (1920, 48), (2560, 64)])
def test_pictures_grow_with_the_window_and_all_heads_may_fill_it(
    browser: Any, tmp_path: Path, width: int, least: int
) -> None:
    model = model_folder(tmp_path / "model", heads=12, layers=3)
    size = {"width": width, "height": width * 9 // 16}
    with served(tmp_path, [model]) as page, opened(browser, page.address, viewport=size) as tab:
        ready(tab)
        picture = head(tab, 0, 5, "").locator("canvas")
        assert picture.bounding_box()["width"] >= least
        before = head(tab, 0, 5, "").bounding_box()["width"]
        assert tab.locator(".axis").all_inner_texts()[:12] == [str(n) for n in range(12)], "columns are numbered"
        tab.get_by_role("button", name="All heads large").click()
        until(tab, "location.hash.includes('all=on')")
        box = head(tab, 2, 11, "").bounding_box()
        assert box["width"] > 1.5 * before and box["x"] + box["width"] <= width
        assert not tab.locator("#maps").is_visible()
        head(tab, 1, 2, "").dblclick()
        until(tab, "document.querySelector('#head-title').textContent === 'Layer 1, head 2'")
        tab.locator("#maps canvas[aria-label]").first.wait_for()
        assert head(tab, 0, 5, "").bounding_box()["width"] == before


def test_special_tokens_are_ignored_and_rows_add_up_without_them(tab: Any, page: Page) -> None:
    ready(tab)
    head(tab, 1, 2).click()
    tab.get_by_label("ignore special tokens").check()
    until(tab, "location.hash.includes('special=out')")
    time.sleep(0.3)
    attention = shares(page, 1, 2)
    is_text = ~np.array(page.workspace.sides[0].example(0)["special"])
    expected = attention[3, 1] / attention[3, is_text].sum()
    canvas = tab.locator("#maps canvas[aria-label]").first
    canvas.focus()
    for key in ["ArrowDown"] * 3 + ["ArrowRight"]:
        tab.keyboard.press(key)
    assert abs(float(reading(tab).split(": ")[1].split(" %")[0]) - 100 * expected) < 0.051 + 0.2 * expected
    assert expected > 1.05 * attention[3, 1]
    tab.keyboard.press("ArrowLeft")
    assert reading(tab).endswith(": 0.0 %")


def test_the_scale_is_said_and_switched_and_the_map_is_read_when_it_is_larger(tab: Any) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    bar, canvas = tab.locator("#maps .bar").first, tab.locator("#maps canvas[aria-label]").first
    assert "square-root scale" in bar.get_attribute("title")
    assert "query ↓ key →" in " ".join(tab.locator("#maps figure:has(canvas) figcaption").first.inner_text().split())
    before = canvas.screenshot()
    tab.get_by_label("Scale").select_option("largest")
    until(tab, "document.querySelector('#maps .bar').title.includes('up to the largest')")
    assert canvas.screenshot() != before
    frame = "document.querySelector('#maps .map')"
    for _ in range(3):
        height = tab.evaluate(f"{frame}.scrollHeight")
        tab.get_by_role("button", name="larger").click()
        until(tab, f"{frame}.scrollHeight > {height}")
    assert tab.evaluate(f"{frame}.scrollHeight > {frame}.clientHeight + 100")
    canvas.focus()
    for _ in range(25):
        tab.keyboard.press("ArrowDown")
    assert reading(tab).startswith("25 “") and tab.evaluate(f"{frame}.scrollTop") > 0
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + 120, box["y"] + box["height"] - 4)
    assert int(reading(tab).split(" ")[0]) >= 20, "what is read is what is seen"
    tab.get_by_role("button", name="fit").click()
    until(tab, f"{frame}.scrollHeight <= {frame}.clientHeight + 1")


def test_lines_show_where_a_token_looks_and_can_be_locked(tab: Any, page: Page) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    tab.get_by_label("A name, or a condition on query and key").fill("matching_token and not self")
    tab.get_by_label("A name, or a condition on query and key").press("Tab")
    tab.get_by_label("View").select_option("lines")
    tab.get_by_label("Lines of a query").fill("1")
    tab.get_by_label("Lines of a query").press("Tab")
    lines = tab.locator("#maps figure:not([hidden]) svg").first.locator("path")
    tokens = page.workspace.sides[0].example(0)["tokens"]
    until(
        tab,
        f"document.querySelector('#maps figure:not([hidden]) svg')?.querySelectorAll('path').length === {len(tokens)}",
    )
    query = tab.get_by_role("button", name="query 3 anna", exact=True).first
    query.focus()
    assert re.match(r"guided: 3 “anna” looks at \d+ “anna” \d+\.\d %", reading(tab))
    attention = shares(page, 0, 5)
    assert lines.count() == (attention[3] >= 0.005).sum()
    widths = sorted(float(w) for w in lines.evaluate_all("all => all.map(e => e.getAttribute('stroke-width'))"))
    assert abs(widths[-1] - 7 * attention[3].max()) < 0.02
    colours = lines.evaluate_all("all => all.map(e => e.getAttribute('stroke'))")
    same = [n for n, token in enumerate(tokens) if token == "anna" and n != 3]
    assert colours.count("#D55E00") == (attention[3, same] >= 0.005).sum(), "the pattern holds"
    tab.keyboard.press("Enter")
    until(tab, "location.hash.includes('lock=q3')")
    tab.keyboard.press("ArrowDown")
    assert reading(tab).startswith("guided: 3 “anna”"), "it is locked"
    tab.reload()
    ready_lines = "document.querySelector('#maps svg [aria-pressed=true]') !== null"
    until(tab, ready_lines)
    assert reading(tab).startswith("guided: 3 “anna” looks at")


def test_lines_of_several_heads_have_their_colours(tab: Any) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    head(tab, 1, 2).click(modifiers=["Shift"])
    until(tab, "location.hash.includes('view=lines') && location.hash.includes('more=1-2')")
    svg = "document.querySelector('#maps figure:not([hidden]) svg')"
    until(tab, f"new Set([...{svg}?.querySelectorAll('path') ?? []].map(e => e.getAttribute('stroke'))).size === 2")
    told = tab.locator("#maps figure:not([hidden]) svg").first.text_content()
    assert "▬ 0-5" in told and "▬ 1-2" in told
    tab.get_by_role("button", name="All heads of the layer").click()
    until(tab, f"new Set([...{svg}?.querySelectorAll('path') ?? []].map(e => e.getAttribute('stroke'))).size === 6")
    legend, *headings = tab.locator("#maps figure:not([hidden]) svg > g > text").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().toJSON()).sort((a, b) => a.top - b.top)"
    )
    assert headings and all(legend["bottom"] <= each["top"] for each in headings), "no text covers another"
    tab.get_by_role("button", name="Only this head").click()
    until(tab, f"new Set([...{svg}?.querySelectorAll('path') ?? []].map(e => e.getAttribute('stroke'))).size === 1")


def test_a_sentence_of_ones_own_is_read_by_both_models(tab: Any, page: Page) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    field = tab.get_by_label("Try a sentence")
    field.fill("the man saw </s> the dog")
    field.press("Enter")
    until(tab, "document.querySelector('#maps canvas').getAttribute('aria-label').startsWith('attention of')")
    tab.get_by_text("your text is shown").wait_for()
    (number,) = {page.workspace.texts["the man saw </s> the dog"]}
    told = page.workspace.sides[1].example(number)
    assert told["tokens"][1:4] == ["the", "man", "saw"] and told["special"].count(True) == 2, "text is only text"
    attention = shares(page, 0, 5, number)
    assert np.allclose(attention.sum(-1), 1, atol=1e-3)
    tab.get_by_label("Pictures").select_option("example")
    tab.reload()
    ready(tab)
    tab.get_by_text("your text is shown").wait_for()
    field.fill(". " * 900)
    field.press("Enter")
    tab.get_by_text("and the model reads").wait_for()
    tab.get_by_role("button", name="next example").click()
    until(tab, "!location.hash.includes('text=')")


def test_the_difference_of_two_models_is_b_minus_a(browser: Any, tmp_path: Path) -> None:
    models = [model_folder(tmp_path / "one"), model_folder(tmp_path / "other", strength=0.0)]
    with served(tmp_path, models) as page, opened(browser, page.address) as tab:
        ready(tab)
        assert page.workspace.sides[1].same_tokens
        head(tab, 0, 5, "one").click()
        tab.get_by_label("difference").check()
        head(tab, 0, 5, "B − A").wait_for()
        tab.get_by_label("Colour").select_option("on matching_token")
        until(tab, "document.querySelectorAll('#maps figure:not([hidden]) canvas[aria-label]').length === 3")
        one, other = (page.workspace.sides[n].heads() for n in (0, 1))
        place = one["patterns"].index("matching_token")
        change = 100 * (other["heads"][5]["relevance"][place] - one["heads"][5]["relevance"][place])
        label = head(tab, 0, 5, "B − A").get_attribute("aria-label")
        assert change < -5 and f"−{-change:.1f} points" in label
        assert "changes most" in tab.locator("#found caption").inner_text()
        assert tab.locator("#found tbody tr").first.inner_text().startswith("0-5")
        canvas = tab.locator("#maps figure:not([hidden]) canvas[aria-label]").nth(2)
        canvas.focus()
        for key in ["ArrowDown"] * 3 + ["ArrowRight"]:
            tab.keyboard.press(key)
        expected = 100 * (shares(page, 0, 5, side=1)[3, 1] - shares(page, 0, 5)[3, 1])
        told = float(re.search(r"([−+]\d+\.\d) points", reading(tab))[1].replace("−", "-"))
        assert abs(told - expected) < 0.06
        assert tab.locator("#facts").inner_text().startswith("in one: ")
        tab.get_by_label("View").select_option("lines")
        until(tab, "document.querySelectorAll('#maps figure:not([hidden]) svg').length === 2")
        tab.get_by_role("button", name="query 3 anna", exact=True).first.click()
        assert reading(tab).startswith("one: 3 “anna” looks at")
        tab.get_by_label("Lines of a query").fill("2")
        tab.get_by_label("Lines of a query").press("Tab")
        until(tab, "document.querySelector('#reading').textContent.includes(' · other: 3 “anna” looks at')")
        assert reading(tab).startswith("one: 3 “anna” looks at"), "both models are read out"
        assert reading(tab).endswith(" · B − A is shown on the map"), "the switch says where it has an effect"


def test_a_page_asks_for_nothing_that_is_not_known_yet(browser: Any, tmp_path: Path) -> None:
    models = [model_folder(tmp_path / "one"), model_folder(tmp_path / "other")]
    asked: list[str] = []
    known = dict.fromkeys(("heads", "average"), False)

    def early(route: Any) -> None:
        overview = (answer := route.fetch()).json()
        overview["models"][1] |= known
        route.fulfill(response=answer, json=overview)

    with served(tmp_path, models) as page, opened(browser, page.address) as tab:
        assert all(page.workspace.sides[1].about()[name] for name in known)
        ready(tab)
        tab.route("**/api/overview", early)
        tab.on("request", lambda request: asked.append(request.url))
        tab.reload()
        ready(tab)
        known["heads"] = True
        tab.reload()
        ready(tab)
        head(tab, 0, 5, "other").wait_for()
        until(tab, "document.querySelector('.grid:nth-of-type(2) canvas')?.width > 0")
    heads = [url for url in asked if "api/heads?model=1" in url]
    assert len(heads) == 1, "only when they were known"
    tiles = [url.partition("api/")[2] for url in asked if "api/tiles?model=1" in url]
    assert tiles and all("example=" in url for url in tiles), "those of an example, as long as there is no average"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["svg", "png"])
@pytest.mark.parametrize("what", ["map", "lines", "heads"])
def test_figures_are_whole_and_say_what_they_show(tab: Any, page: Page, kind: str, what: str, tmp_path: Path) -> None:
    ready(tab)
    last = page.workspace.sides[0].ready().number - 1
    tab.get_by_label("Example", exact=True).fill(str(last))
    tab.get_by_label("Example", exact=True).press("Enter")
    head(tab, 0, 5).click()
    tab.get_by_label("A name, or a condition on query and key").fill("distance < 2 and matching_token")
    tab.get_by_label("A name, or a condition on query and key").press("Tab")
    if what == "lines":
        tab.get_by_label("View").select_option("lines")
    time.sleep(0.5)
    panel = tab.locator("#heads-panel" if what == "heads" else "#head-panel")
    with tab.expect_download() as download:
        panel.get_by_role("button", name=kind.upper(), exact=True).click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    if kind == "png":
        assert file.read_bytes().startswith(b"\x89PNG") and len(file.read_bytes()) > 10_000
        return
    text = file.read_text()
    words = " ".join(ElementTree.fromstring(text).itertext())
    assert "guided" in words and "text.txt" in words and "href" not in text and "<image" not in text
    if what == "heads":
        assert "square-root scale" in words
    else:
        assert HOSTILE[:11] in words and "<script" not in text, "tokens are text"
        assert "distance < 2 and matching_token" in words and f"example {last}" in words
    if what == "map":
        assert "square-root scale" in words and "query ↓" in words
        levels = set(re.findall(r"fill=\"rgb\((\d+,\d+,\d+)\)", text))
        assert len(levels) > 5, "cells are vectors"


def words_of_figure(tab: Any, panel: str, folder: Path) -> str:
    with tab.expect_download() as download:
        tab.locator(f"#{panel}-panel").get_by_role("button", name="SVG").click()
    download.value.save_as(folder / panel)
    return " ".join(ElementTree.fromstring((folder / panel).read_text()).itertext())


def test_captions_name_the_scale_of_their_colours_and_the_attention_of_both_models(tab: Any, tmp_path: Path) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    tab.get_by_label("A name, or a condition on query and key").fill("matching_token")
    tab.get_by_label("A name, or a condition on query and key").press("Tab")
    tab.get_by_label("Scale").select_option("largest")
    until(tab, "document.querySelector('#maps .bar').title.includes('up to the largest')")
    words = words_of_figure(tab, "head", tmp_path)
    assert "linear scale up to the largest value" in words
    assert re.search(r"Mean attention on it over all examples: \d+\.\d % \(A\), \d+\.\d % \(B\)", words)
    words = words_of_figure(tab, "heads", tmp_path)
    assert "linear scale;" in words, "pictures of all heads have one scale, which ends at 100 %"


@pytest.mark.every
def test_a_caption_names_the_pattern_that_is_drawn_and_each_head_once(tab: Any, tmp_path: Path) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    tab.route("**/api/preview*", lambda route: (time.sleep(0.3), route.continue_()))
    field = tab.get_by_label("A name, or a condition on query and key")
    field.fill("matching_token")
    words = words_of_figure(tab, "head", tmp_path)
    assert "Pattern: matching_token, outlined." in words, "it is drawn before it is saved"
    tab.unroute("**/api/preview*")
    field.fill("distance = 1")
    assert "Pattern" not in words_of_figure(tab, "head", tmp_path)
    head(tab, 1, 2).click(modifiers=["Shift"])
    assert "Attention of heads 0-5, 1-2 of" in words_of_figure(tab, "head", tmp_path)
    head(tab, 1, 2).click()
    assert "Attention of head 1-2 of" in words_of_figure(tab, "head", tmp_path)


@contextmanager
def late_answer(tab: Any, asked: str, ask: Callable[[], None]) -> Iterator[None]:
    """Hold the answer to what is asked until the body is done, and then let the page take it."""
    held: list[Any] = []
    tab.route(re.compile(asked), lambda route: held.append(route))
    ask()
    for _ in range(100):
        tab.wait_for_timeout(30)
        if held:
            break
    yield
    (late,) = held
    with tab.expect_response(re.compile(asked)):
        late.continue_()
    tab.wait_for_timeout(200)


def test_a_late_list_does_not_replace_that_of_a_newer_head(tab: Any) -> None:
    ready(tab)
    head(tab, 1, 2).click()
    tab.get_by_text("Where it looks most").click()
    tab.locator("#top button").first.wait_for()
    with late_answer(tab, r"/api/top\?model=0&layer=0&head=5&", head(tab, 0, 5).click):
        with tab.expect_response(re.compile(r"/api/top\?.*&layer=1&head=3&")):
            head(tab, 1, 3).click()
        tab.wait_for_timeout(200)
        newer = tab.locator("#top").inner_text()
    assert tab.locator("#top").inner_text() == newer


def test_late_pictures_do_not_replace_newer_ones(tab: Any, page: Page) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    tab.get_by_label("Pictures").select_option("example")
    last = page.workspace.sides[0].ready().number - 1  # the others are alike
    number = tab.get_by_label("Example", exact=True)

    def choose(example: int) -> None:
        number.fill(str(example))
        number.press("Enter")

    with late_answer(tab, rf"/api/tiles\?model=0&example={last}$", lambda: choose(last)):
        with tab.expect_response(lambda r: r.url.endswith("/api/tiles?model=1&example=1")):
            choose(1)
        tab.wait_for_timeout(300)
        newer = tab.locator("#grids").screenshot()
    assert tab.locator("#grids").screenshot() == newer


@pytest.mark.every
def test_what_is_printed_is_the_figure_alone(tab: Any) -> None:
    ready(tab)
    tab.evaluate("window.print = () => { window.printed = true; }")
    tab.locator("#head-panel").get_by_role("button", name="PDF").click()
    until(tab, "window.printed === true")
    tab.emulate_media(media="print")
    tab.locator("#print").wait_for(state="visible")
    tab.locator("main").wait_for(state="hidden")
    assert tab.locator("#print").evaluate("e => e.naturalWidth") > 300
    pdf = tab.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF") and pdf.count(b"/Type /Page\n") == 1, "one page"
    tab.emulate_media(media="screen")


def test_a_text_of_one_sentence_a_line_has_a_sentence_in_each_example(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    parts = (("anna", "she", "her"), ("saw", "fed", "was"), ("the dog", "the man", "it"))
    lines = [" ".join((*words, ".")) for words in product(*parts)]
    text = "\n".join(lines)
    with served(tmp_path, [model], text, sequence_length=64) as page:
        side = page.workspace.sides[0]
        assert side.ready().number == len(lines)
        assert side.example(1)["tokens"][1:6] == ["anna", "saw", "the", "man", "."]
        assert page.workspace.overview()["data"] == "text.txt"


def test_models_with_different_tokenizers_show_the_same_text_as_an_example(tmp_path: Path) -> None:
    """The second model reads letters, so sentences are too long for it and are cut into pieces."""
    folders = [Path(model_folder(tmp_path / name)) for name in ("words", "letters")]
    for name, data in trainings.tokenizer_files([*trainings.SPECIAL, *ascii_lowercase, "."]).items():
        (folders[1] / name).write_bytes(data)
    file = folders[1] / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "\\S"}, "behavior": "Isolated", "invert": False}
    whitespace = {"type": "WhitespaceSplit"}
    both = {"type": "Sequence", "pretokenizers": [whitespace, split]}
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"pre_tokenizer": both}))
    lines = [
        f"{name} saw the {other} {'again ' * n}."
        for n in range(4)
        for name in ("anna", "she")
        for other in ("dog", "man")
    ]
    with served(tmp_path, [str(folder) for folder in folders], "\n".join(lines), sequence_length=16) as page:
        one, other = page.workspace.sides
        assert other.ready().number > one.ready().number == len(lines)
        for n, line in enumerate(lines):
            assert one.example(n)["tokens"][1:5] == line.split()[:4]
            letters = "".join(token.removeprefix("##") for token in other.example(n)["tokens"][1:-1])
            assert line.replace(" ", "").startswith(letters) and len(letters) > 8
        assert other.about()["examples"] == len(lines)
        assert one.about()["same_tokens"] and not other.about()["same_tokens"]
        listed = other.top(0, 5, "self", "")
        assert {row["number"] for row in listed} <= set(range(len(lines)))
        for row in listed:
            whole = lines[row["number"]].replace(" ", "")
            assert row["text"].replace(" ", "").removesuffix("</s>") in whole


@pytest.mark.parametrize("width", [390, 1280, 1366])
def test_a_map_that_fits_shows_all_keys(browser: Any, tmp_path: Path, width: int) -> None:
    lines = "\n".join(" ".join(["anna saw the dog"] * 11).split(" ", n)[-1] + " ." for n in range(1, 25))
    viewport = {"width": width, "height": 720}
    with (
        served(tmp_path, [model_folder(tmp_path / "one")], lines, sequence_length=64) as page,
        opened(browser, page.address, viewport=viewport) as tab,
    ):
        ready(tab)
        number, seen = page.workspace.sides[0].ready().number, set()
        for example in range(0, number, 2):
            tab.get_by_label("Example", exact=True).fill(str(example))
            tab.get_by_label("Example", exact=True).press("Enter")
            tokens = len(page.workspace.sides[0].example(example)["tokens"])
            until(
                tab, f"document.querySelector('#maps canvas').getAttribute('aria-label').includes('of {tokens} tokens')"
            )
            frame = "document.querySelector('.map')"
            assert tab.evaluate(f"{frame}.scrollWidth <= {frame}.clientWidth + 1"), tokens
            seen.add(tokens)
        assert min(seen) < 28 and max(seen) > 42


@pytest.mark.parametrize(
    ("text", "examples"),
    [
        ("anna saw the dog .\nshe fed it .\n", 2),
        ("anna saw the dog .\nshe fed it .\nthe man was glad", 1),  # the last line has no mark
        ("anna saw the dog . she\nfed it . the man was\nglad .", 1),
        ("anna saw the dog .\nshe fed it . the man was glad .", 1),
    ],
)
def test_a_few_lines_are_examples_if_each_is_exactly_one_sentence(tmp_path: Path, text: str, examples: int) -> None:
    with served(tmp_path, [model_folder(tmp_path / "model")], text) as page:
        assert page.workspace.sides[0].ready().number == examples
