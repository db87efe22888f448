// The page: keeps what is shown in its address, asks for it, and shows it.

import { Refused, enter, isSaved, json } from "./api.js";
import { percent, scaleOf } from "./colours.js";
import { $ } from "./dom.js";
import { compose, preparePrint, savePng, saveSvg } from "./figure.js";
import { nameOf } from "./grid.js";
import { changeZoom, listTop, mapPanels, setExample, show } from "./head.js";
import { build, drawTiles, facts, fill, fit, headPanels, mostTelling, offerChoices, paint, pressHeads } from "./heads.js";
import { colour, colourPattern, current, gone, holder, isCompared, page, problem, read } from "./page.js";
import { readAddress, view, writeAddress } from "./state.js";
import { accept, colourBy, copyCommand, forget, mark, showAccepted, showDecisions, tryPattern } from "./work.js";

// Controls by the entries of the address that they show: a value each, or for a switch what stands there when it is not as at first.
const CHOICES = ["view", "pictures", "scale"];
const SWITCHES = { sentences: "off", outline: "off", special: "out", difference: "on" };

function setControls() {
  for (const name of CHOICES) {
    $(name).value = view[name];
    if ($(name).selectedIndex < 0) {
      $(name).selectedIndex = 0;
      view[name] = $(name).value;
    }
  }
  for (const [name, other] of Object.entries(SWITCHES)) {
    $(name).checked = (view[name] === "") === (other === "off");
  }
  $("pattern").value = view.pattern;
  $("text").value = view.text;
  $("top-lines").value = /^\d{1,3}$/.test(view.top) ? view.top : "3";
}

// the state of the server

async function watch() {
  let version = -1;
  for (;;) {
    let next;
    try {
      next = await json("api/overview");
      $("gone")?.remove();
    } catch (error) {
      if (error instanceof Refused) {
        $("status-text").textContent = error.message;
        return;
      }
      gone();
      await new Promise((done) => setTimeout(done, 2000));
      continue;
    }
    const before = page.overview;
    page.overview = next;
    showState();
    const step = (state) => Math.floor(state.done / Math.max(1, state.total / 8));
    if (next.version !== version && next.models.some((model) => model.ready)
      && (!before || before.state.phase !== next.state.phase || before.state.what !== next.state.what
        || step(before.state) !== step(next.state) || !page.sides.some((side) => side.heads))) {
      await refresh();
    }
    version = next.version;
    if (isSaved || next.state.phase === "failed") {
      return;
    }
    await new Promise((done) => setTimeout(done, next.state.phase === "ready" ? 1500 : 250));
  }
}

function showState() {
  const { overview } = page;
  const { state } = overview;
  const models = overview.models.map((model) => model.name + (model.plan ? " (guided)" : "")).join(" and ");
  $("about").textContent = `${models} on ${overview.data}`;
  const words = { loading: state.what, working: `${state.what} …`, ready: "ready", failed: state.what }[state.phase];
  $("status-text").textContent = isSaved ? "saved page" : words;
  $("status-bar").hidden = state.phase === "ready" || state.phase === "failed";
  if (state.total) {
    $("status-bar").max = state.total;
    $("status-bar").value = state.done;
  } else {
    $("status-bar").removeAttribute("value");
  }
  if (overview.problem && state.phase !== "failed") {
    $("accept-problem").textContent = overview.problem;
  }
  showAccepted();
}

// Read what is known of the heads, and show it.
async function refresh() {
  build({ choose, mark, open: () => setAll(false) }, lock);
  await fill();
  offerChoices();
  await drawTiles();
  showDecisions();
  if (!page.sides.some((side) => side.heads)) {
    return;
  }
  if (holder()) {
    facts(holder());
    if (page.sides.some((side) => current(side) && !side.matrix.values && !side.lines.heads)) {
      await show();
    }
  } else if (view.layer === null || page.sides.every((side) => side.heads)) { // or else the other model may have it
    const first = mostTelling();
    read(view.layer === null ? "" : `There is no head ${nameOf(view)}. Head ${nameOf(first)} is shown.`);
    await choose(first, { step: false });
  }
}

// how: see Grid.
async function choose(head, { step = true, adds = false } = {}) {
  if (adds && view.layer !== null) {
    const more = view.more.split(",").filter(Boolean);
    const name = nameOf(head);
    view.more = (more.includes(name) ? more.filter((each) => each !== name) : [...more, name]).join(",");
    view.view = "lines";
    setControls();
  } else {
    Object.assign(view, { layer: head.layer, head: head.head, kind: head.kind });
  }
  writeAddress(step);
  pressHeads();
  facts(holder());
  await show();
  page.listTop();
}

async function goTo(number) {
  setExample(number);
  writeAddress(true);
  await showAgain();
}

async function showAgain() {
  await show();
  if (view.pictures === "example") {
    await drawTiles();
  }
}

function lock(token) {
  view.lock = token ? `${token.isQuery ? "q" : "k"}${token.n}` : "";
  writeAddress(true);
}

function setAll(is) {
  view.all = is ? "on" : "";
  writeAddress(true);
  fit();
  show();
}

page.choose = choose;
page.listTop = () => listTop(goTo);

// figures

// What a figure shows, in words.
function caption(isOverview) {
  const { overview } = page;
  const names = overview.models.map((model) => model.name + (model.plan ? " (guided)" : ""));
  const models = names.length > 1 ? `${names.join(" (A) and ")} (B)` : names[0];
  const scale = scaleOf(view.scale || "root").words;
  if (isOverview) {
    const pictures = view.pictures === "example" ? exampleName() : "average of the first tokens of the first examples";
    const change = isCompared() ? " B − A: purple is less in B, orange is more." : "";
    return `All heads of ${models} on ${overview.data}; rows are layers. Pictures: attention, ${pictures}, ${scale}; below each the attention at `
      + `distances from −16 to +16 tokens. Frames: ${colour().replace(/^on /, "attention on the pattern ")}, up to ${$("legend-high").textContent}.${change}`;
  }
  const heads = [nameOf(view), ...(view.view === "lines" ? view.more.split(",").filter(Boolean) : [])];
  const pattern = $("pattern").value.trim();
  const held = pattern && $("outline").checked && view.view !== "average";
  const isLines = view.view === "lines";
  return [
    `Attention of head${heads.length > 1 ? "s" : ""} ${heads.join(", ")} of ${models} on ${overview.data}, ${view.view === "average" ? "average of the first tokens" : exampleName()}.`,
    held && `Pattern: ${pattern}, ${!isLines ? "outlined" : heads.length > 1 ? "solid lines" : "orange lines"}.`,
    held && !isLines && current(holder()) && patternShare(pattern),
    isLines ? `Width of a line: attention; the ${$("top-lines").value} strongest of each query.` : `Colour: attention in %, ${scale}.`,
    view.special && view.view !== "average" && "Special tokens are left out, and rows add up to 100 % without them.",
    isCompared() && !isLines && "B − A: purple is less in B, orange is more.",
  ].filter(Boolean).join(" ");
}

function patternShare(pattern) {
  const place = holder().heads.patterns.indexOf(pattern);
  return place < 0 ? "" : `Mean attention on it over all examples: ${percent(current(holder()).relevance[place])}.`;
}

function exampleName() {
  return view.text ? `“${view.text}”` : `example ${view.example}`;
}

function figure(isOverview) {
  return compose(isOverview ? headPanels() : mapPanels(), caption(isOverview));
}

async function save(isOverview, kind) {
  const what = isOverview ? "heads" : `${view.view === "lines" ? "lines" : "map"}-${nameOf(view)}`;
  if (kind === "svg") {
    saveSvg(figure(isOverview), what);
  } else if (kind === "png") {
    await savePng(figure(isOverview), what);
  } else {
    await preparePrint(figure(isOverview));
    window.print();
  }
}

// controls

function connect() {
  $("colour").addEventListener("change", () => colourBy($("colour").value));
  const change = (name, value, after) => { view[name] = value; writeAddress(true); after(); };
  $("pictures").addEventListener("change", () => change("pictures", $("pictures").value, drawTiles));
  $("view").addEventListener("change", () => change("view", $("view").value, show));
  $("scale").addEventListener("change", () => change("scale", $("scale").value, () => { show(); drawTiles(); }));
  $("role").addEventListener("change", () => change("role", $("role").value, show));
  for (const [name, other] of Object.entries(SWITCHES)) {
    const value = () => ($(name).checked === (other === "off") ? "" : other);
    $(name).addEventListener("change", () => change(name, value(), name === "difference" ? showDifference : show));
  }
  $("top-lines").addEventListener("change", () => change("top", $("top-lines").value, show));
  $("layer-lines").addEventListener("click", () => {
    const heads = holder().heads.heads.filter((head) => head.layer === view.layer && head.kind === view.kind && head.head !== view.head);
    change("more", heads.map(nameOf).join(","), () => { pressHeads(); show(); });
  });
  $("only-lines").addEventListener("click", () => change("more", "", () => { pressHeads(); show(); }));
  for (const [id, step] of [["zoom-out", 1 / 1.5], ["zoom-fit", 0], ["zoom-in", 1.5]]) {
    $(id).addEventListener("click", () => changeZoom(step));
  }
  $("previous").addEventListener("click", () => goTo(view.example - 1));
  $("following").addEventListener("click", () => goTo(view.example + 1));
  $("example").addEventListener("change", () => goTo(Number($("example").value)));
  $("text-form").addEventListener("submit", (event) => {
    event.preventDefault();
    view.lock = "";
    change("text", $("text").value.split(/\s+/).filter(Boolean).join(" "), showAgain);
  });
  $("pattern-form").addEventListener("submit", (event) => { event.preventDefault(); tryPattern(refresh); });
  $("pattern").addEventListener("change", () => change("pattern", $("pattern").value.trim(), show));
  $("mark").addEventListener("click", () => { const head = current(holder()); if (head) { mark(head); } });
  $("accept-form").addEventListener("submit", accept);
  $("copy").addEventListener("click", copyCommand);
  $("top-panel").addEventListener("toggle", page.listTop);
  $("all").addEventListener("click", () => setAll(view.all !== "on"));
  for (const button of document.querySelectorAll("[data-save]")) {
    button.addEventListener("click", () => save(button.closest("#heads-panel") !== null, button.dataset.save));
  }
  window.addEventListener("keydown", (event) => { if (event.key === "Escape" && view.all === "on") { setAll(false); } });
  window.addEventListener("hashchange", async () => {
    forget();
    readAddress();
    setControls();
    await refresh();
    await show();
  });
  window.addEventListener("afterprint", () => $("print").removeAttribute("src"));
  window.addEventListener("resize", () => { fit(); show(); });
  if (isSaved) {
    for (const hidden of document.querySelectorAll("#accept-form, #mark")) {
      hidden.hidden = true;
    }
  }
}

async function showDifference() {
  await refresh();
  await show();
}

async function begin() {
  readAddress();
  setControls();
  connect();
  try {
    await enter();
  } catch (error) {
    problem("status-text", error);
  }
  await watch();
}

begin();
