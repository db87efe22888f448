// One head on one example: as a map or as lines, and where it looks most.

import { bytes, has, isSaved, json, post } from "./api.js";
import { $ } from "./dom.js";
import { nameOf } from "./grid.js";
import { colourPattern, current, holder, isCompared, page, problem, read } from "./page.js";
import { listExamples } from "./panels.js";
import { added, view, writeAddress } from "./state.js";

const MOST_SHARE = 65535; // a number of a map is so many times the square root of the attention
const texts = new Map(); // from texts of the person's own to the numbers of their examples

let shown = 0; // counts requests for maps, so that a late answer is dropped
let zoom = 1;

// How many lines of each query are drawn, the strongest ones.
export function linesOfAQuery() {
  return /^[1-9]\d{0,2}$/.test(view.top) ? Number(view.top) : 3;
}

// The number of the example that is shown: of the data, or of a text of the person's own.
page.example = () => texts.get(view.text) ?? view.example;

async function attention(path) {
  const raw = await bytes(path);
  const roots = new Uint16Array(raw.buffer, raw.byteOffset, raw.length / 2);
  const values = new Float32Array(roots.length);
  for (let n = 0; n < roots.length; n += 1) {
    values[n] = (roots[n] / MOST_SHARE) ** 2;
  }
  return values;
}

// Attention without special tokens: rows are divided by what they have left; those of special tokens are empty.
function among(values, special) {
  const size = special.length;
  const kept = new Float32Array(values.length);
  for (let query = 0; query < size; query += 1) {
    if (special[query]) {
      continue;
    }
    let left = 0;
    for (let key = 0; key < size; key += 1) {
      left += special[key] ? 0 : values[query * size + key];
    }
    for (let key = 0; key < size; key += 1) {
      kept[query * size + key] = special[key] || left === 0 ? 0 : values[query * size + key] / left;
    }
  }
  return kept;
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
  const isKind = (value) => value !== null && value !== undefined && value !== "" && value !== false && value !== -1;
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
async function keysOf(side, number) {
  const text = $("pattern").value.trim();
  const path = `api/preview?model=${side.number}&example=${number}&pattern=${encodeURIComponent(text)}`;
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

// What a model is to show: {heads: each {name, values}, tokens, keys, overlay}; null if it lacks the head.
async function content(side, heads) {
  const asked = ({ layer, head, kind }) => `layer=${layer}&head=${head}&kind=${kind}`;
  const own = heads.filter((head) => side.heads?.heads.some((each) => nameOf(each) === nameOf(head)));
  if (!current(side)) {
    return null;
  }
  if (view.view === "average") {
    const values = await attention(`api/average?model=${side.number}&${asked(own[0])}`);
    const tokens = Array.from({ length: Math.round(Math.sqrt(values.length)) }, (_, place) => String(place));
    return { heads: [{ name: nameOf(own[0]), values }], tokens, keys: null, overlay: { keys: null, bounds: [], kinds: null } };
  }
  const number = page.example();
  const [example, keys, ...maps] = await Promise.all([
    json(`api/example?model=${side.number}&example=${number}`), keysOf(side, number),
    ...own.map((head) => attention(`api/map?model=${side.number}&example=${number}&${asked(head)}`)),
  ]);
  const isLeftOut = view.special !== "";
  const seen = maps.map((values, n) => ({ name: nameOf(own[n]), values: isLeftOut ? among(values, example.special) : values }));
  const fits = keys && keys.length === maps[0].length && $("outline").checked ? keys : null;
  offerRoles(example);
  return { heads: seen, tokens: example.tokens, keys: fits, overlay: overlayOf(example, fits) };
}

export async function show() {
  shown += 1;
  const mine = shown;
  if (view.layer === null || !holder()) {
    return;
  }
  const isLines = view.view === "lines";
  $("lines-tools").hidden = !isLines;
  $("map-tools").hidden = isLines;
  $("reading").classList.toggle("long", isLines); // lines must not move away from the pointer
  const heads = headsShown();
  $("pattern-problem").textContent = "";
  $("pattern-summary").textContent = page.overview.patterns.find(({ name }) => name === $("pattern").value.trim())?.summary ?? "";
  let found;
  try {
    await openText();
    found = await Promise.all(page.sides.map((side) => content(side, heads)));
  } catch (error) {
    problem("reading", error);
    return;
  }
  if (mine !== shown) {
    return;
  }
  const most = Math.max(260, $("maps").clientWidth - 8);
  const maps = found.filter(Boolean).length + (isCompared() && found.every(Boolean) ? 1 : 0);
  const height = Math.max(280, $("head-panel").clientHeight - 130);
  const settings = { scale: view.scale || "root", zoom, room: most / (isCompared() ? maps : page.sides.length) - 10, most, height };
  for (const [n, side] of page.sides.entries()) {
    side.matrix.figure.hidden = isLines || !found[n];
    side.lines.figure.hidden = !isLines || !found[n];
    if (found[n] && isLines) {
      const lock = /^[qk]\d+$/.test(view.lock) ? { isQuery: view.lock[0] === "q", n: Number(view.lock.slice(1)) } : null;
      side.lines.show(found[n].heads, found[n].tokens, found[n].keys, { top: linesOfAQuery(), width: settings.room, locked: lock });
    } else if (found[n]) {
      side.matrix.show(found[n].heads[0].values, found[n].tokens, found[n].overlay, settings);
    }
  }
  if (isLines) { // of all models, not of the last one alone
    const told = page.sides.filter((_, n) => found[n]).map((side) => side.lines.told);
    read([...told, isCompared() ? "B − A is shown on the map" : ""].filter(Boolean).join(" · "));
  }
  showChange(found, isLines, settings);
  showExample();
}

// The map of what the second model does more, where both read the same tokens.
function showChange(found, isLines, settings) {
  const [one, other] = found;
  if (!page.change) {
    return;
  }
  const isShown = isCompared() && !isLines && one && other && one.tokens.join("\n") === other.tokens.join("\n");
  page.change.figure.hidden = !isShown;
  if (isShown) {
    const values = other.heads[0].values.map((value, n) => value - one.heads[0].values[n]);
    page.change.show(values, one.tokens, one.overlay, settings);
  }
}

// The chosen head, and where lines are drawn the heads that were added to it, each once.
export function headsShown() {
  const chosen = page.sides.map(current).find(Boolean);
  const names = view.view === "lines" ? added().filter((name) => name !== nameOf(chosen)) : [];
  const all = page.sides.flatMap((side) => side.heads?.heads ?? []);
  return [chosen, ...[...new Set(names)].map((name) => all.find((head) => nameOf(head) === name)).filter(Boolean)];
}

function showExample() {
  const { examples, all_examples: all } = page.overview.models[0];
  const rest = isSaved && all > examples ? ` saved; the data have ${all.toLocaleString("en")}` : "";
  $("examples").textContent = ` of ${examples ?? "?"}${rest}${view.text ? " (your text is shown)" : ""}`;
  if (document.activeElement !== $("example")) {
    $("example").value = String(view.example);
  }
  $("example").max = String((examples ?? 1) - 1);
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

// Another example of the data, from its number.
export function setExample(number) {
  const last = (page.overview.models[0].examples ?? 1) - 1;
  view.example = Math.min(last, Math.max(0, number || 0));
  view.text = "";
  view.lock = "";
  $("text").value = "";
  $("example").value = String(view.example);
}

// Let the server read the text of the person's own, if one is to be shown and it has not yet.
async function openText() {
  $("text-problem").textContent = "";
  if (!view.text || texts.has(view.text)) {
    return;
  }
  try {
    if (isSaved) {
      throw new Error("saved");
    }
    texts.set(view.text, (await post("api/text", { text: view.text })).example);
  } catch (error) {
    view.text = "";
    writeAddress();
    if (isSaved) {
      $("text-problem").textContent = "This page was saved, and runs no model; `guide discover serve` does.";
    } else {
      problem("text-problem", error);
    }
  }
}

// step: how many times larger than before; 0 fits the map into the window.
export function changeZoom(step) {
  zoom = step === 0 ? 1 : Math.min(64, Math.max(0.25, zoom * step));
  show();
}

function topPath() {
  const pattern = encodeURIComponent(colourPattern());
  return `api/top?model=${holder()?.number ?? 0}&layer=${view.layer}&head=${view.head}&kind=${view.kind}&pattern=${pattern}`;
}

export async function listTop(open) {
  const pattern = colourPattern();
  const path = topPath();
  $("top-panel").hidden = !has(path);
  if (!$("top-panel").open || !has(path)) {
    return;
  }
  try {
    const { examples } = await json(path);
    if (path !== topPath()) {
      return; // another head or pattern was chosen since
    }
    $("top-panel").querySelector("summary").textContent = pattern ? `Where it looks most at ${pattern}` : "Where it looks most sharply";
    listExamples($("top"), examples, open);
  } catch (error) {
    problem("reading", error);
  }
}

// What is shown of the head, as it goes on a figure.
export function mapPanels() {
  const isLines = view.view === "lines";
  const drawn = page.sides.map((side) => (isLines ? side.lines : side.matrix));
  return [...drawn, ...(page.change ? [page.change] : [])].filter(({ figure }) => !figure.hidden).map((each) => each.panel());
}
