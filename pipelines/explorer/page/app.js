// The page: keeps what is shown in its address, asks for it, and shows it.

import { Refused, enter, isSaved, json } from "./api.js";
import { $ } from "./dom.js";
import { nameOf } from "./grid.js";
import { changeZoom, linesOfAQuery, listTop, setExample, show } from "./head.js";
import { build, drawTiles, facts, fill, fit, mostTelling, offerChoices, pressHeads } from "./heads.js";
import { current, gone, holder, isSame, modelNames, page, problem, read } from "./page.js";
import { save } from "./saving.js";
import { added, readAddress, view, writeAddress } from "./state.js";
import { accept, colourBy, copyCommand, forget, mark, offerAccept, showAccepted, showDecisions, tryPattern } from "./work.js";

// Controls that show an entry of the address.  The entry of a choice is its value, that of a switch the word here once it was switched.
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
  $("top-lines").value = linesOfAQuery();
}

// the state of the server

async function watch() {
  let version = -1;
  for (;;) {
    let [next, wasGone] = [null, false];
    try {
      next = await json("api/overview");
      wasGone = $("gone") !== null;
      $("gone")?.remove();
    } catch (error) {
      const isReplaced = error.status === 401 && page.overview !== null; // a later server, which does not know this page
      if (error instanceof Refused && !isReplaced) {
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
    const isNew = next.version !== version && next.models.some((model) => model.ready)
      && (!before || before.state.phase !== next.state.phase || before.state.what !== next.state.what
        || step(before.state) !== step(next.state) || !page.sides.some((side) => side.heads));
    if (isNew || wasGone) {
      try {
        await refresh();
        if (wasGone) {
          await show(); // a head that was chosen in the meantime
        }
      } catch (error) {
        problem("status-text", error);
      }
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
  $("about").textContent = `${modelNames().join(" and ")} on ${overview.data}`;
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
  offerAccept();
  showAccepted();
}

// Read what is known of the heads, and show it.
async function refresh() {
  const told = lackingExample();
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
      page.listTop();
    }
  } else if (view.layer === null || page.sides.every((side) => side.heads)) { // or else the other model may have it
    const first = mostTelling();
    read([told, view.layer === null ? "" : `There is no head ${nameOf(view)}. Head ${nameOf(first)} is shown.`].join(" ").trim());
    await choose(first, { step: false });
    return;
  }
  if (told) {
    read(told);
  }
}

// Show the last example instead of one that the address names and that is not there; gives what to say of it.
function lackingExample() {
  const { examples } = page.overview.models[0];
  const asked = view.example;
  if (view.text || !examples || asked < examples) {
    return "";
  }
  setExample(asked);
  writeAddress();
  return `There is no example ${asked}. Example ${view.example} is shown.`;
}

// step, adds: see the constructor of Grid.
async function choose(head, { step = true, adds = false } = {}) {
  if (!page.sides.some((side) => side.heads?.heads.some((each) => isSame(each, head)))) {
    read(`There is no head ${nameOf(head)}.`); // a mark in an address that was written by hand
    return;
  }
  if (adds && view.layer !== null) {
    const more = added();
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
  $("top-lines").addEventListener("change", () => change("top", $("top-lines").value, () => { $("top-lines").value = linesOfAQuery(); show(); }));
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
  const drawPattern = () => { if ($("pattern").value.trim() !== view.pattern) { change("pattern", $("pattern").value.trim(), show); } };
  $("pattern").addEventListener("change", drawPattern);
  // a name is drawn while it is typed: what it is stands below the field then, and moves no button under the pointer
  $("pattern").addEventListener("input", () => { if (page.overview.patterns.some(({ name }) => name === $("pattern").value.trim())) { drawPattern(); } });
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
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { show(); drawTiles(); });
  window.addEventListener("resize", () => { fit(); show(); });
  if (isSaved) {
    $("decisions-section").hidden = true;
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
