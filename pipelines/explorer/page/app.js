// The page: keeps what is shown in its address, asks for it, and shows it.

import { Refused, bytes, enter, has, isSaved, json, post } from "./api.js";
import { percent, viridis } from "./colours.js";
import { $, element } from "./dom.js";
import { Grid, nameOf } from "./grid.js";
import { Matrix } from "./matrix.js";
import { listDecisions, listExamples, listHeads } from "./panels.js";
import { decisions, readAddress, view, writeAddress } from "./state.js";

let overview = null;
let sides = []; // for each model: {grid, matrix, heads, number}
let awaited = ""; // the pattern whose measurement is to be shown when it is done, unless something else was chosen since
let shown = 0; // counts requests for maps, so that a late answer is dropped

// Show in the controls what the address says.
function setControls() {
  for (const name of ["view", "pictures"]) {
    $(name).value = view[name];
    if ($(name).selectedIndex < 0) {
      $(name).selectedIndex = 0;
      view[name] = $(name).value;
    }
  }
  $("pattern").value = view.pattern;
}

function problem(where, error) {
  if (error instanceof Refused) {
    $(where).textContent = error.message;
  } else if (error.message === "gone") {
    gone();
  } else {
    throw error;
  }
}

function gone() {
  if (!$("gone")) {
    const told = element("p", "The server has ended. What is drawn stays; start `guide discover serve` again to go on.");
    told.id = "gone";
    told.setAttribute("role", "alert");
    document.body.prepend(told);
  }
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
    const before = overview;
    overview = next;
    showState();
    const step = (state) => Math.floor(state.done / Math.max(1, state.total / 8));
    if (next.version !== version && next.models.some((model) => model.ready)
      && (!before || before.state.phase !== next.state.phase || before.state.what !== next.state.what
        || step(before.state) !== step(next.state) || !sides.some((side) => side.heads))) {
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
  $("accept").disabled = !overview.can_accept || decisions.length === 0 || state.phase !== "ready";
  if (overview.problem && state.phase !== "failed") {
    $("accept-problem").textContent = overview.problem;
  }
  showAccepted();
}

function showAccepted() {
  const made = overview.accepted;
  const isNew = made && $("accepted-reference").textContent !== made.reference;
  $("accepted").hidden = !made;
  if (made) {
    $("accepted-reference").textContent = made.reference;
    $("accepted-command").textContent = made.command;
    $("accepted-plan").textContent = made.plan;
    if (isNew) {
      $("copied").textContent = "";
      $("accepted").scrollIntoView({ block: "nearest" });
    }
  }
}

// all heads

async function refresh() {
  build();
  for (const [n, side] of sides.entries()) {
    try {
      side.heads = await json(`api/heads?model=${n}`);
    } catch (error) {
      if (!(error instanceof Refused)) {
        throw error;
      }
      continue;
    }
    side.grid.fill(side.heads.heads);
  }
  offerChoices();
  await drawTiles();
  paint();
  showDecisions();
  if (!sides.some((side) => side.heads)) {
    return;
  }
  if (!holder()) {
    if (view.layer !== null && !sides.every((side) => side.heads)) {
      return; // the other model may have it
    }
    const first = mostTelling();
    read(view.layer === null ? "" : `There is no head ${nameOf(view)}. Head ${nameOf(first)} is shown.`);
    await choose(first, false);
  } else {
    facts();
    if (!sides.some((side) => side.matrix.map)) {
      await show();
    }
  }
}

// The head to begin with: of those that stand out on a pattern the one that looks most at it beyond chance, or else the first.
function mostTelling() {
  const known = sides.find((side) => side.heads).heads;
  const { heads, patterns, outstanding, by_chance: byChance } = known;
  const found = patterns.flatMap((name, place) => outstanding[name].map((n) => [heads[n].relevance[place] / Math.max(byChance[name], 1e-9), heads[n]]));
  found.sort((one, other) => other[0] - one[0]);
  return found.length ? found[0][1] : heads[0];
}

function build() {
  if (sides.length) {
    return;
  }
  sides = overview.models.map((model, n) => {
    const name = overview.models.length > 1 ? model.name : "";
    if (name) {
      const title = element("p", name);
      title.className = "model";
      $("grids").append(title);
    }
    const group = element("div");
    group.className = "grid";
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", `heads of ${model.name}`);
    $("grids").append(group);
    const grid = new Grid(group, name ? `${name}: ` : "", choose, mark);
    return { grid, matrix: new Matrix($("maps"), name, read), heads: null, number: n };
  });
}

function read(text) {
  $("reading").textContent = text || "\u00a0";
}

function offerChoices() {
  const heads = sides.find((side) => side.heads)?.heads;
  if (!heads) {
    return;
  }
  const options = [["entropy", "how spread it is (entropy)"]];
  if (heads.heads.some((head) => head.importance !== null)) {
    options.unshift(["importance", "importance"]);
  }
  options.push(...heads.patterns.map((name) => [`on ${name}`, `attention on ${name}`]));
  const known = [...$("colour").options].map((option) => option.value);
  if (known.join() !== options.map(([value]) => value).join()) {
    $("colour").replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    $("patterns").replaceChildren(...overview.patterns.map(({ name }) => new Option(name, name)));
  }
  $("colour").value = colour();
}

// The measure that colours heads: the one that a person chose, if it is known, or else the first; importance comes later than the rest.
function colour() {
  const known = [...$("colour").options].map((option) => option.value);
  return known.includes(view.colour) ? view.colour : known[0] ?? "";
}

// The pattern that colours heads, or an empty text.
function colourPattern() {
  return colour().startsWith("on ") ? colour().slice(3) : "";
}

function measureOf(side) {
  const pattern = colourPattern();
  if (!pattern) {
    return (head) => head[colour()];
  }
  const place = side.heads.patterns.indexOf(pattern);
  return (head) => (place < 0 ? null : head.relevance[place]);
}

function paint() {
  const values = sides.filter((side) => side.heads).flatMap((side) => side.heads.heads.map(measureOf(side)));
  const most = Math.max(...values.filter((value) => value !== null), 1e-9);
  const pattern = colourPattern();
  for (const side of sides.filter((each) => each.heads)) {
    const measure = measureOf(side);
    const out = new Set(side.heads.outstanding[pattern] ?? []);
    const places = new Map(side.heads.heads.map((head, n) => [head, n]));
    const isMarked = (head) => decisions.some((d) => nameOf(d) === nameOf(head));
    side.grid.paint(
      (head) => (measure(head) === null ? null : measure(head) / most),
      (head) => (out.has(places.get(head)) ? "★" : "") + (isMarked(head) ? "●" : ""),
      (head) => `, ${colour().replace(/^on /, "attention on ")} ${percent(measure(head))}${out.has(places.get(head)) ? ", stands out" : ""}`,
    );
    side.grid.press(view);
  }
  const context = $("legend").getContext("2d");
  for (let x = 0; x < 120; x += 1) {
    context.fillStyle = `rgb(${viridis(x / 119).join(",")})`;
    context.fillRect(x, 0, 1, 10);
  }
  $("legend-low").textContent = "0";
  $("legend-high").textContent = percent(most);
  listFound();
}

async function drawTiles() {
  for (const [n, side] of sides.entries()) {
    if (!side.heads) {
      continue;
    }
    const example = `api/tiles?model=${n}&example=${view.example}`;
    const average = `api/tiles?model=${n}`;
    const isExample = view.pictures === "example" && has(example);
    try {
      side.grid.draw(await bytes(isExample ? example : average));
    } catch (error) {
      if (!(error instanceof Refused)) {
        throw error;
      }
      side.grid.draw(isExample ? null : await bytes(example)); // the average is not known yet
    }
  }
}

// one head

async function choose(head, step = true) {
  Object.assign(view, { layer: head.layer, head: head.head, kind: head.kind });
  writeAddress(step);
  for (const side of sides) {
    side.grid.press(view);
  }
  facts();
  await show();
  listTop();
}

function current(side) {
  return side?.heads?.heads.find((head) => head.layer === view.layer && head.head === view.head && head.kind === view.kind);
}

// The first model that has the chosen head.
function holder() {
  return sides.find((side) => current(side));
}

function facts() {
  const side = holder();
  const head = current(side);
  if (!head) {
    return;
  }
  $("head-title").textContent = `Layer ${head.layer}, head ${head.head}${head.kind === "self" ? "" : ` (${head.kind})`}`;
  const { patterns, by_chance: byChance, outstanding, heads } = side.heads;
  const place = heads.indexOf(head);
  const best = patterns.map((name, n) => [name, head.relevance[n], head.relevance[n] / Math.max(byChance[name], 1e-9)])
    .filter(([name, value]) => value !== null && byChance[name] < 0.9).sort((a, b) => b[2] - a[2]).slice(0, 4)
    .map(([name, value, lift]) => `${name} ${percent(value, 0)} (${lift.toFixed(1)} × chance${outstanding[name].includes(place) ? ", stands out" : ""})`);
  const importance = head.importance === null ? "" : `importance ${percent(head.importance, 0)} · `;
  const only = sides.length > 1 && sides.some((each) => each.heads && !current(each)) ? `only in ${overview.models[side.number].name} · ` : "";
  $("facts").textContent = `${only}${importance}entropy ${percent(head.entropy, 0)} · closest patterns: ${best.join(", ")}`;
}

function overlayOf(example, keys) {
  const segments = example.columns.segment;
  const bounds = [];
  if ($("sentences").checked && segments) {
    segments.forEach((segment, n) => {
      if (n > 0 && segment !== segments[n - 1]) {
        bounds.push(n);
      }
    });
  }
  const values = view.role ? example.columns[view.role] : null;
  const isKind = (value) => value !== null && value !== "" && value !== false && value !== -1;
  const kinds = values ? { values: values.map((value) => (isKind(value) ? String(value) : "")), kinds: [], shades: null } : null;
  if (kinds && values.some((value) => typeof value === "number" && !Number.isInteger(value))) {
    const most = Math.max(...values.filter((value) => typeof value === "number"), 1e-9);
    kinds.shades = values.map((value) => (typeof value === "number" ? value / most : null));
  } else if (kinds) {
    kinds.kinds = [...new Set(kinds.values)].filter(Boolean).sort();
  }
  return { keys, bounds, kinds };
}

// The keys of the pattern in the field on an example, or null.
async function keysOf(number) {
  const text = $("pattern").value.trim();
  $("pattern-problem").textContent = "";
  $("pattern-summary").textContent = overview.patterns.find(({ name }) => name === text)?.summary ?? "";
  const path = `api/preview?model=0&example=${number}&pattern=${encodeURIComponent(text)}`;
  if (!text) {
    return null;
  }
  if (!has(path)) {
    $("pattern-problem").textContent = "This page was saved, and holds only the patterns that were measured; `guide discover serve` reads any.";
    return null;
  }
  try {
    return await bytes(path);
  } catch (error) {
    problem("pattern-problem", error);
    return null;
  }
}

async function show() {
  shown += 1;
  const mine = shown;
  if (view.layer === null) {
    return;
  }
  const asked = `layer=${view.layer}&head=${view.head}&kind=${view.kind}`;
  const most = Math.max(260, $("maps").clientWidth - 8);
  const room = most / sides.length - 8;
  try {
    const preview = view.view === "example" ? await keysOf(view.example) : null;
    for (const [n, side] of sides.entries()) {
      side.matrix.figure.hidden = !current(side);
      if (!current(side)) {
        continue;
      }
      if (view.view === "average") {
        const map = await bytes(`api/average?model=${n}&${asked}`);
        const size = Math.round(Math.sqrt(map.length));
        const places = Array.from({ length: size }, (_, place) => String(place));
        if (mine === shown) {
          side.matrix.show(map, places, { keys: null, bounds: [], kinds: null }, room, most);
        }
        continue;
      }
      const example = await json(`api/example?model=${n}&example=${view.example}`);
      const map = await bytes(`api/map?model=${n}&example=${view.example}&${asked}`);
      if (mine !== shown) {
        return;
      }
      offerRoles(example);
      const fits = preview && preview.length === map.length && $("outline").checked;
      side.matrix.show(map, example.tokens, overlayOf(example, fits ? preview : null), room, most);
    }
  } catch (error) {
    problem("reading", error);
  }
  $("examples").textContent = ` of ${overview.models[0].examples ?? "?"}`;
  if (document.activeElement !== $("example")) {
    $("example").value = String(view.example);
  }
  $("example").max = String((overview.models[0].examples ?? 1) - 1);
}

function offerRoles(example) {
  const names = Object.keys(example.columns).filter((name) => !["word", "segment", "head"].includes(name));
  if ($("role").options.length !== names.length + 1) {
    $("role").replaceChildren(new Option("no roles", ""), ...names.map((name) => new Option(name, name)));
    $("features").textContent = ["id", "place", "frequency", "length", ...Object.keys(example.columns)].join(", ");
  }
  $("role").value = names.includes(view.role) ? view.role : "";
  view.role = $("role").value;
}

async function goTo(number, step = true) {
  const last = (overview.models[0].examples ?? 1) - 1;
  view.example = Math.min(last, Math.max(0, number || 0));
  $("example").value = String(view.example);
  writeAddress(step);
  await show();
  if (view.pictures === "example") {
    await drawTiles();
  }
}

async function listTop() {
  const pattern = colourPattern();
  const path = `api/top?model=${holder()?.number ?? 0}&layer=${view.layer}&head=${view.head}&kind=${view.kind}&pattern=${encodeURIComponent(pattern)}`;
  $("top-panel").hidden = !has(path);
  if (!$("top-panel").open || !has(path)) {
    return;
  }
  try {
    const { examples } = await json(path);
    $("top-panel").querySelector("summary").textContent = pattern ? `Where it looks most at ${pattern}` : "Where it looks most sharply";
    listExamples($("top"), examples, goTo);
  } catch (error) {
    problem("reading", error);
  }
}

// patterns

function listFound() {
  const { heads } = sides[0];
  const name = colourPattern() || $("pattern").value.trim();
  const place = heads ? heads.patterns.indexOf(name) : -1;
  if (place < 0) {
    $("found").hidden = true;
    return;
  }
  $("found").caption.textContent = `Heads that look most at ${name}`;
  listHeads($("found"), [...heads.heads], place, heads.by_chance[name], choose);
}

async function tryPattern(event) {
  event.preventDefault();
  const text = $("pattern").value.trim();
  $("pattern-problem").textContent = "";
  if (!text) {
    return;
  }
  try {
    const name = isSaved ? text : (await post("api/patterns", { pattern: text })).name;
    if (sides.some((side) => side.heads?.patterns.includes(name))) {
      colourBy(`on ${name}`);
    } else if (isSaved) {
      $("pattern-problem").textContent = "This page was saved, and measures nothing; `guide discover serve` does.";
    } else {
      awaited = name;
      waitFor(name);
    }
  } catch (error) {
    problem("pattern-problem", error);
  }
}

// Colour heads by another measure.
function colourBy(measure) {
  awaited = "";
  view.colour = measure;
  writeAddress(true);
  $("colour").value = colour();
  paint();
  listTop();
}

async function waitFor(name) {
  while (awaited === name) {
    await new Promise((done) => setTimeout(done, 150));
    if ($("gone") || overview.problem) {
      return;
    }
    if (overview.state.phase === "ready") {
      await refresh();
    }
    if (awaited === name && sides[0].heads?.patterns.includes(name)) {
      colourBy(`on ${name}`);
    }
  }
}

// decisions

function patternToMark() {
  return $("pattern").value.trim() || colourPattern();
}

function mark(head) {
  if (isSaved) {
    return;
  }
  const pattern = patternToMark();
  if (!pattern) {
    $("accept-problem").textContent = "Choose or write a pattern first; the head is then marked for it.";
    $("pattern").focus();
    return;
  }
  $("accept-problem").textContent = "";
  const known = decisions.findIndex((d) => nameOf(d) === nameOf(head));
  const is = known >= 0 && decisions[known].pattern === pattern;
  if (known >= 0) {
    decisions.splice(known, 1);
  }
  if (!is) {
    decisions.push({ layer: head.layer, head: head.head, kind: head.kind, pattern });
  }
  writeAddress(true);
  showDecisions();
}

function showDecisions() {
  listDecisions($("decisions"), decisions, choose, (decision) => {
    decisions.splice(decisions.indexOf(decision), 1);
    writeAddress(true);
    showDecisions();
  });
  $("accept").disabled = !overview.can_accept || decisions.length === 0 || overview.state.phase !== "ready";
  paint();
}

async function accept(event) {
  event.preventDefault();
  $("accept-problem").textContent = "";
  const marked = { decisions, into: $("into").value, mechanism: $("mechanism").value, pal: $("pal").checked };
  try {
    await post("api/accept", marked);
    $("accept").disabled = true;
  } catch (error) {
    problem("accept-problem", error);
  }
}

async function copyCommand() {
  const command = $("accepted-command");
  try {
    await navigator.clipboard.writeText(command.textContent);
    $("copied").textContent = "copied";
  } catch { // the browser allows it only on pages of this machine
    getSelection().selectAllChildren(command);
    $("copied").textContent = "selected; copy it with the keyboard";
  }
}

// controls

function connect() {
  $("colour").addEventListener("change", () => colourBy($("colour").value));
  $("pictures").addEventListener("change", () => { view.pictures = $("pictures").value; writeAddress(true); drawTiles(); });
  $("view").addEventListener("change", () => { view.view = $("view").value; writeAddress(true); show(); });
  $("role").addEventListener("change", () => { view.role = $("role").value; writeAddress(true); show(); });
  $("sentences").addEventListener("change", show);
  $("outline").addEventListener("change", show);
  $("previous").addEventListener("click", () => goTo(view.example - 1));
  $("following").addEventListener("click", () => goTo(view.example + 1));
  $("example").addEventListener("change", () => goTo(Number($("example").value)));
  $("pattern-form").addEventListener("submit", tryPattern);
  $("pattern").addEventListener("change", () => { view.pattern = $("pattern").value.trim(); writeAddress(true); show(); });
  $("mark").addEventListener("click", () => { const head = current(holder()); if (head) { mark(head); } });
  $("accept-form").addEventListener("submit", accept);
  $("top-panel").addEventListener("toggle", listTop);
  $("copy").addEventListener("click", copyCommand);
  window.addEventListener("hashchange", async () => {
    awaited = "";
    readAddress();
    setControls();
    await refresh();
    await show();
  });
  window.addEventListener("resize", () => show());
  if (isSaved) {
    for (const hidden of document.querySelectorAll("#accept-form, #mark")) {
      hidden.hidden = true;
    }
  }
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
