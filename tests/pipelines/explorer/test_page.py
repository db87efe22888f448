"""The page in a real browser: every control, the keyboard, bad patterns, hostile tokens, and a server that is gone."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guidance.plan import Plan
from pipelines.explorer.export import one_file
from tests.pipelines.explorer.browsing import head, opened, ready, until
from tests.pipelines.explorer.serving import HOSTILE, Page, model_folder, served


def test_the_token_leaves_the_address_and_heads_are_there_at_once(tab: Any, page: Page) -> None:
    ready(tab)
    assert "token" not in tab.url
    assert tab.get_by_role("button", name=re.compile("^guided: layer")).count() == 12
    assert tab.title() == "guide discover"
    assert "guided and plain on text.txt" in tab.locator("#about").inner_text()


def test_without_the_token_nothing_is_shown(browser: Any, page: Page) -> None:
    with opened(browser, page.address.partition("#")[0]) as tab:
        tab.get_by_text("open the address that the command printed").wait_for()
        assert tab.locator(".cell").count() == 0


def test_a_head_is_chosen_by_mouse_and_keyboard_and_both_models_show_it(tab: Any) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    until(tab, "document.querySelector('#head-title').textContent === 'Layer 0, head 5'")
    assert "matching_token" in tab.locator("#facts").inner_text()
    assert head(tab, 0, 5).get_attribute("aria-pressed") == "true"
    assert head(tab, 0, 5, "plain").get_attribute("aria-pressed") == "true"
    tab.keyboard.press("ArrowDown")
    until(tab, "document.querySelector('#head-title').textContent === 'Layer 1, head 5'")
    tab.keyboard.press("ArrowLeft")
    until(tab, "document.querySelector('#head-title').textContent === 'Layer 1, head 4'")
    assert "layer=1&head=4" in tab.url
    until(tab, "document.querySelectorAll('#maps canvas[aria-label]').length === 2")


def test_cells_are_read_by_pointer_and_by_arrow_keys(tab: Any) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    canvas = tab.locator("#maps canvas").first
    canvas.focus()
    for _ in range(3):
        tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    reading = tab.locator("#reading")
    assert re.match(r"3 “anna” looks at 1 “anna”: \d+\.\d %", reading.inner_text())
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + box["width"] - 4, box["y"] + box["height"] - 4)
    assert "looks at" in reading.inner_text() and not reading.inner_text().startswith("3 ")


def test_examples_views_roles_and_pictures(tab: Any) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    tab.get_by_role("button", name="next example").click()
    until(tab, "location.hash.includes('example=1')")
    tab.get_by_role("button", name="previous example").click()
    until(tab, "location.hash.includes('example=0')")
    tab.get_by_label("Example", exact=True).fill("3")
    tab.get_by_label("Example", exact=True).press("Enter")
    until(tab, "location.hash.includes('example=3')")
    tab.get_by_label("View").select_option("average")
    until(tab, "location.hash.includes('view=average')")
    until(tab, "document.querySelector('#maps canvas').getAttribute('aria-label').includes('tokens')")
    tab.get_by_label("View").select_option("example")
    with tab.expect_response(lambda r: "/api/tiles" in r.url and "example=3" in r.url):
        tab.get_by_label("Pictures").select_option("example")
    before = tab.locator("#maps canvas").first.screenshot()
    tab.get_by_label("sentences").uncheck()
    time.sleep(0.3)
    assert tab.locator("#maps canvas").first.screenshot() != before
    tab.get_by_text("Where it looks most").click()
    tab.locator("#top button").first.wait_for()
    tab.locator("#top button").nth(1).click()
    assert tab.locator("#top li").count() == min(12, 40, tab.locator("#top li").count())


def test_a_pattern_is_drawn_as_it_is_written_and_measured_on_all_examples(tab: Any) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    before = tab.locator("#maps canvas").first.screenshot()
    field = tab.get_by_label("A name, or a condition on query and key")
    field.fill("query.id == key.id and distance > 1")
    field.press("Tab")
    time.sleep(0.4)
    assert tab.locator("#maps canvas").first.screenshot() != before, "the pattern is outlined"
    tab.get_by_role("button", name="Measure on all examples").click()
    tab.get_by_text("Heads that look most at query.id == key.id and distance > 1").wait_for(timeout=20_000)
    assert tab.locator("#found tbody tr").first.inner_text().startswith("0-5")
    head(tab, 0, 5).filter(has_text="★").wait_for(timeout=20_000)  # the table comes first
    tab.get_by_label("Colour").select_option("entropy")
    until(tab, "location.hash.includes('colour=entropy')")
    tab.locator("#found").wait_for()


def test_a_bad_pattern_is_told_with_its_place(tab: Any) -> None:
    ready(tab)
    field = tab.get_by_label("A name, or a condition on query and key")
    field.fill("distance = 1")
    tab.get_by_role("button", name="Measure on all examples").click()
    tab.get_by_text("'=' is not expected").wait_for()
    field.fill("key.idf > 3")
    field.press("Tab")
    tab.get_by_text("it needs the feature idf").wait_for()
    field.fill("")
    field.press("Tab")
    until(tab, "document.querySelector('#pattern-problem').textContent === ''")


def test_hostile_tokens_are_text(tab: Any, page: Page) -> None:
    ready(tab)
    last = page.workspace.sides[0].ready().number - 1
    tab.get_by_label("Example", exact=True).fill(str(last))
    tab.get_by_label("Example", exact=True).press("Enter")
    until(tab, f"location.hash.includes('example={last}')")
    tokens = page.workspace.sides[0].example(last)["tokens"]
    place = tokens.index(HOSTILE)
    canvas = tab.locator("#maps canvas").first
    time.sleep(0.3)
    canvas.focus()
    for _ in range(place):
        tab.keyboard.press("ArrowDown")
    assert HOSTILE in tab.locator("#reading").inner_text()
    assert tab.title() == "guide discover" and tab.locator("main script").count() == 0
    head(tab, 0, 5).click()
    tab.get_by_text("Where it looks most").click()
    tab.locator("#top button").first.wait_for()
    assert tab.title() == "guide discover"
    field = tab.get_by_label("A name, or a condition on query and key")
    field.fill(f'"{HOSTILE}"')
    field.press("Tab")
    tab.locator("#pattern-problem", has_text="quoted name").wait_for()


def test_marked_heads_become_a_plan(tab: Any, page: Page) -> None:
    ready(tab)
    head(tab, 0, 5).click()
    tab.keyboard.press("Enter")
    tab.get_by_text("Choose or write a pattern first").wait_for()
    tab.get_by_label("A name, or a condition on query and key").fill("matching_token")
    head(tab, 0, 5).press("Enter")
    assert tab.locator("#decisions li").count() == 1
    assert "●" in head(tab, 0, 5).inner_text()
    head(tab, 1, 2).click()
    tab.get_by_role("button", name="Mark this head for the pattern").click()
    tab.get_by_role("button", name="remove 1-2 matching_token").click()
    assert tab.locator("#decisions li").count() == 1
    field = tab.get_by_label("A name, or a condition on query and key")
    field.fill("previous")
    tab.locator("#pattern-summary", has_text="one step left").wait_for()  # drawn while the pointer is in the field
    field.fill("matching_token")
    tab.get_by_label("Put patterns").select_option("found")
    tab.locator("#mechanism").select_option("bias")
    until(tab, "!document.querySelector('#accept').disabled")
    tab.get_by_role("button", name="Accept").click()
    tab.locator("#accepted").wait_for(timeout=40_000)
    reference = tab.locator("#accepted-reference").inner_text()
    assert "guide pretrain sequences/" in tab.locator("#accepted-command").inner_text(), "the data are a text"
    made = page.store.load(reference)
    (guide,) = Plan.load(made.path / "plan.toml").guides
    assert (guide.pattern, guide.mechanism, guide.layers, guide.heads) == ("matching_token", "bias", (0,), (5,))
    told = (made.path / "findings.json").read_text()
    assert '"marked"' in told and '"examples"' in told
    for mechanism in (
        "mask",
        "bias",
        "mask",
    ):  # made already or soon made: the state may never be seen to be other than ready
        tab.locator("#mechanism").select_option(mechanism)
        until(tab, "!document.querySelector('#accept').disabled")
        tab.get_by_role("button", name="Accept").click()
    until(tab, "!document.querySelector('#accept').disabled")


def test_the_command_of_a_plan_runs_as_it_is_copied(browser: Any, page: Page, guide: Callable[..., Any]) -> None:
    """The text is a file, the model a folder, and the store another one than that of the working folder."""
    with opened(browser, page.address, permissions=["clipboard-read", "clipboard-write"]) as tab:
        ready(tab)
        tab.get_by_label("A name, or a condition on query and key").fill("next")
        head(tab, 0, 5).click()
        tab.keyboard.press("Enter")
        tab.get_by_label("Put patterns").select_option("found")
        until(tab, "!document.querySelector('#accept').disabled")
        tab.get_by_role("button", name="Accept").click()
        until(tab, "document.querySelector('#accepted-plan').textContent.includes('next')")
        tab.get_by_role("button", name="Copy the command").click()
        until(tab, "document.querySelector('#copied').textContent === 'copied'")
        copied = tab.evaluate("navigator.clipboard.readText()")
        assert copied == tab.locator("#accepted-command").inner_text()
    program, *arguments = shlex.split(copied)
    done = guide(*arguments, "--steps", 1, "--batch-size", 2)
    assert program == "guide" and done.code == 0, done.err


def test_marks_stay_after_a_reload_and_back_leads_to_the_head_before(tab: Any) -> None:
    ready(tab)
    tab.get_by_label("A name, or a condition on query and key").fill("query.id == key.id and distance > 1")
    head(tab, 0, 5).click()
    tab.keyboard.press("Enter")
    head(tab, 1, 2).click()
    until(tab, "document.querySelector('#head-title').textContent === 'Layer 1, head 2'")
    tab.reload()
    ready(tab)
    assert tab.locator("#decisions li").inner_text().startswith("0-5 query.id == key.id and distance > 1")
    assert "●" in head(tab, 0, 5).inner_text()
    tab.go_back()
    until(tab, "document.querySelector('#head-title').textContent === 'Layer 0, head 5'")
    assert head(tab, 0, 5).get_attribute("aria-pressed") == "true" and tab.locator("#decisions li").count() == 1
    tab.go_back()
    until(tab, "document.querySelectorAll('#decisions li').length === 0")
    assert "●" not in head(tab, 0, 5).inner_text()


def test_a_head_that_is_not_there_is_told_and_another_one_shown(browser: Any, page: Page) -> None:
    with opened(browser, f"{page.address}&layer=99&head=3") as tab:
        ready(tab)
        assert tab.locator("#reading").inner_text().startswith("There is no head 99-3. Head ")
        assert "layer=99" not in tab.url
        tab.evaluate("location.hash = 'layer=0&head=5&mark=9-1-self+next'")
        tab.get_by_role("button", name="show head 9-1").click()
        until(tab, "document.querySelector('#reading').textContent === 'There is no head 9-1.'")
        assert "layer=0&head=5" in tab.url
        tab.evaluate("location.hash = 'layer=1'")
        until(tab, "/^#layer=[01]&head=[0-5]/.test(location.hash)")
        assert "null" not in tab.locator("#reading").inner_text()


@pytest.mark.parametrize("when", ["opening", "open"])
def test_an_example_that_is_not_there_is_told_and_the_last_one_shown(browser: Any, page: Page, when: str) -> None:
    last = page.workspace.sides[0].ready().number - 1
    with opened(browser, page.address + ("&example=9999" if when == "opening" else "")) as tab:
        ready(tab)
        if when == "open":
            tab.evaluate("location.hash += '&example=9999'")
        until(
            tab,
            f"document.querySelector('#reading').textContent === 'There is no example 9999. Example {last} is shown.'",
        )
        assert "example=9999" not in tab.url and tab.get_by_label("Example", exact=True).input_value() == str(last)


def test_a_measurement_that_ends_does_not_undo_a_newer_choice(tab: Any, page: Page) -> None:
    ready(tab)
    name = "key.length > 2 and abs(distance) < 9"
    with page.workspace.worker.model:  # the measurement waits
        tab.get_by_label("A name, or a condition on query and key").fill(name)
        tab.get_by_role("button", name="Measure on all examples").click()
        tab.get_by_text(f"measuring {name}").wait_for()
        tab.get_by_label("Colour").select_option("on next")
    tab.get_by_label("Colour").locator(f"option[value='on {name}']").wait_for(state="attached", timeout=20_000)
    time.sleep(0.5)
    assert tab.get_by_label("Colour").input_value() == "on next" and "colour=on+next" in tab.url


def test_heads_that_only_the_second_model_has_are_shown(browser: Any, tmp_path: Path) -> None:
    models = [model_folder(tmp_path / "small", heads=3), model_folder(tmp_path / "large", heads=6, layers=3)]
    maps = "[...document.querySelectorAll('#maps figure:has(canvas)')].slice(0, 2)"
    with served(tmp_path, models) as page, opened(browser, page.address) as tab:
        ready(tab)
        head(tab, 2, 5, "large").click()
        until(tab, "document.querySelector('#head-title').textContent === 'Layer 2, head 5'")
        assert tab.locator("#facts").inner_text().startswith("only in large")
        until(tab, f"{maps}.map((e) => e.hidden).join() === 'true,false'")
        tab.get_by_text("Where it looks most").click()
        tab.locator("#top button").first.wait_for()
        head(tab, 1, 2, "large").click()
        until(tab, f"{maps}.every((e) => !e.hidden)")


def test_short_texts_fill_the_average_pictures(browser: Any, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    with served(tmp_path, [model], "anna saw the dog .\n" * 3, sequence_length=8) as page:
        with opened(browser, page.address) as tab:
            ready(tab)
            dark = """() => { const [canvas] = document.querySelectorAll('.cell canvas'), side = canvas.width;
              const copy = new OffscreenCanvas(side, side).getContext('2d', { willReadFrequently: true });
              copy.drawImage(canvas, 0, 0);
              const { data } = copy.getImageData(0, 0, side, side);
              return data.filter((value, n) => n % 4 === 1 && value < 8).length / side ** 2; }"""
            until(tab, f"({dark})() < 0.5")


def test_an_address_leads_to_the_same_view(browser: Any, tab: Any, page: Page) -> None:
    ready(tab)
    head(tab, 1, 3).click()
    tab.get_by_label("View").select_option("average")
    tab.get_by_label("Colour").select_option("on next")
    until(tab, "location.hash.includes('colour=on+next')")
    with opened(browser, f"{tab.url}&token={page.token}") as other:
        ready(other)
        until(other, "document.querySelector('#head-title').textContent === 'Layer 1, head 3'")
        assert other.get_by_label("View").input_value() == "average"
        assert other.get_by_label("Colour").input_value() == "on next"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_and_nothing_overflows(browser: Any, page: Page, scheme: str) -> None:
    with opened(browser, page.address, color_scheme=scheme) as tab:
        ready(tab)
        wide = "document.documentElement.scrollWidth <= innerWidth && [...document.querySelectorAll('main > *')]"
        assert tab.evaluate(wide + ".every(e => e.scrollWidth <= e.clientWidth + 1)")
        contrast = """() => {
          const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
            .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
          const back = light(getComputedStyle(document.body).backgroundColor);
          return [...document.querySelectorAll('h1, h2, #facts, .hint, #reading, label, #about')].map(e => {
            const ink = light(getComputedStyle(e).color);
            return (Math.max(ink, back) + .05) / (Math.min(ink, back) + .05); });
        }"""
        assert min(tab.evaluate(contrast)) >= 4.5
        drawn = (
            "[...document.querySelectorAll('#grids canvas, #maps canvas[aria-label]')].map(e => e.toDataURL()).join()"
        )
        tab.evaluate(f"window.before = {drawn}")
        tab.emulate_media(color_scheme="dark" if scheme == "light" else "light")
        until(tab, f"window.before.split(',data').every((one, n) => one !== {drawn}.split(',data')[n])")


def test_every_control_has_a_name(tab: Any) -> None:
    ready(tab)
    nameless = """() => [...document.querySelectorAll('button, input, select')].filter(e => !(e.getAttribute('aria-label')
      || e.textContent.trim() || (e.labels && e.labels.length))).map(e => e.outerHTML)"""
    assert tab.evaluate(nameless) == []


def test_a_page_whose_server_is_gone_says_so_and_keeps_its_pictures(browser: Any, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    with served(tmp_path, [model]) as page:
        look = opened(browser, page.address)
        tab = look.__enter__()
        ready(tab)
    tab.get_by_text("The server has ended").wait_for(timeout=15_000)
    assert tab.locator("#maps canvas[aria-label]").is_visible()
    look.wrong.clear()
    look.__exit__()


def test_a_page_notices_that_a_later_server_has_the_address_of_its_own(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path, [model_folder(tmp_path / "model")]) as page, opened(browser, page.address) as tab:
        ready(tab)
        tab.context.clear_cookies()  # what the page sends is the cookie of the server that has ended
        tab.get_by_text("The server has ended").wait_for(timeout=15_000)
        tab.context.new_page().goto(page.address)  # the address that the later one printed
        tab.get_by_text("The server has ended").wait_for(state="detached", timeout=15_000)


@pytest.mark.every
def test_a_server_that_goes_away_while_the_page_reads_is_noticed_and_the_page_goes_on_when_it_is_back(
    browser: Any, tmp_path: Path
) -> None:
    ways = (
        ("heads", lambda route: route.abort()),
        ("heads", lambda route: route.fulfill(body='{"heads": [')),  # it breaks off
        ("tiles", lambda route: route.abort()),
    )
    with served(tmp_path, [model_folder(tmp_path / "model")]) as page, opened(browser, page.address) as tab:
        ready(tab)
        for asked, ends in ways:
            tab.route(f"**/api/{asked}*", ends)
            tab.reload()
            tab.get_by_text("The server has ended").wait_for(timeout=15_000)
            tab.unroute(f"**/api/{asked}*")
            until(tab, "document.querySelector('.cell canvas')?.width < 300")  # the width of one that is not drawn
            tab.get_by_text("The server has ended").wait_for(state="detached", timeout=15_000)
            tab.locator("#maps canvas[aria-label]").first.wait_for(timeout=15_000)


@pytest.mark.every
def test_long_examples_are_drawn_and_read(browser: Any, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    text = "anna saw the dog . she fed it was glad her man ." * 60 + "\n"
    with served(tmp_path, [model], text * 3, sequence_length=512) as page, opened(browser, page.address) as tab:
        ready(tab)
        assert "attention of 51" in tab.locator("#maps canvas").first.get_attribute("aria-label")
        tab.get_by_label("A name, or a condition on query and key").fill("matching_token")
        tab.get_by_label("A name, or a condition on query and key").press("Tab")
        canvas = tab.locator("#maps canvas").first
        begun = time.monotonic()
        box = canvas.bounding_box()
        for step in range(50):
            tab.mouse.move(box["x"] + 20 + 5 * step, box["y"] + 20 + 3 * step)
        assert time.monotonic() - begun < 10
        assert "looks at" in tab.locator("#reading").inner_text()


def test_a_saved_page_shows_the_same_without_a_server(browser: Any, page: Page, tmp_path: Path) -> None:
    saved = tmp_path / "heads.html"
    saved.write_bytes(one_file(page.workspace, 2))
    assert b"</script><" not in saved.read_bytes().partition(b"guide-data")[2].partition(b"</script>")[0]
    with opened(browser, saved.as_uri()) as tab:
        tab.get_by_text("saved page").wait_for()
        tab.locator("#maps canvas[aria-label]").first.wait_for()
        all_examples = page.workspace.sides[0].num_examples
        assert tab.locator("#examples").inner_text().strip() == f"of 2 saved; the data have {all_examples}"
        head(tab, 0, 5).click()
        until(tab, "document.querySelector('#head-title').textContent === 'Layer 0, head 5'")
        tab.get_by_role("button", name="next example").click()
        until(tab, "location.hash.includes('example=1')")
        tab.get_by_role("button", name="next example").click()
        tab.get_by_label("Pictures").select_option("example")
        tab.get_by_label("View").select_option("average")
        tab.get_by_label("View").select_option("lines")
        tab.get_by_role("button", name="query 3 ", exact=False).first.wait_for()
        tab.get_by_label("Try a sentence").fill("the dog")
        tab.get_by_label("Try a sentence").press("Enter")
        tab.get_by_text("This page was saved, and runs no model").wait_for()
        tab.get_by_label("View").select_option("example")
        with tab.expect_download() as download:
            tab.locator("#head-panel").get_by_role("button", name="PNG").click()
        assert download.value.suggested_filename == "map-0-5.png"
        assert not tab.get_by_role("button", name="Accept").is_visible()
        field = tab.get_by_label("A name, or a condition on query and key")
        field.fill("next")
        field.press("Enter")
        until(tab, "document.querySelector('#colour').value === 'on next'")
        field.fill("distance == 3")
        field.press("Enter")
        tab.get_by_text("This page was saved").first.wait_for()
        tab.locator("#maps canvas").first.focus()
        tab.keyboard.press("ArrowDown")
        assert "looks at" in tab.locator("#reading").inner_text()
