// All heads: their pictures, the measure that colours them, and what two models differ in.

import { Refused, bytes, has, json } from "./api.js";
import { css, percent, points, scaleOf } from "./colours.js";
import { $, element } from "./dom.js";
import { Grid } from "./grid.js";
import { Lines } from "./lines.js";
import { Matrix } from "./matrix.js";
import { byChange, byRelevance, listHeads } from "./panels.js";
import { colour, colourPattern, current, isCompared, isSame, page, problem, read } from "./page.js";
import { added, decisions, view } from "./state.js";

let change = null; // the grid of what the second model does more, and its title
let drawn = 0; // counts requests for pictures, so that a late answer is dropped

function gridOf(name, label, actions) {
  const title = element("p", label);
  title.className = "model";
  title.hidden = !label;
  const group = element("div");
  group.className = "grid";
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", `heads of ${name}`);
  $("grids").append(title, group);
  return { title, grid: new Grid(group, label ? `${label}: ` : "", actions) };
}

// actions: what heads do when they are clicked, see Grid; lock: see Lines.
export function build(actions, lock) {
  if (page.sides.length) {
    return;
  }
  const several = page.overview.models.length > 1;
  page.sides = page.overview.models.map((model, number) => {
    const label = several ? model.name : "";
    const { grid } = gridOf(model.name, label, actions);
    const lines = new Lines($("maps"), label, read, lock);
    return { grid, lines, matrix: new Matrix($("maps"), label, read), heads: null, number };
  });
  $("difference-choice").hidden = !several;
  if (several) {
    change = gridOf("the change", "B − A", actions);
    change.grid.isSigned = true;
    $("grids").prepend(change.title, change.grid.element);
    page.change = new Matrix($("maps"), "B − A", read, true);
    page.change.figure.hidden = true;
    page.change.figure.style.order = -1; // first, as above, so that it is seen without scrolling
  }
}

export async function fill() {
  for (const [n, side] of page.sides.entries()) {
    if (page.overview.models[n].heads) {
      side.heads = await json(`api/heads?model=${n}`);
      side.grid.fill(side.heads.heads);
    }
  }
  fillChange();
  fit();
}

// The heads that both models have, with what the second one does more.
function fillChange() {
  if (!change) {
    return;
  }
  change.title.hidden = !isCompared();
  change.grid.element.hidden = !isCompared();
  if (!isCompared()) {
    return;
  }
  const [one, other] = page.sides.map((side) => side.heads.heads);
  const both = one.filter((head) => other.some((each) => isSame(each, head)));
  change.grid.fill(both.map((head) => {
    const after = other.find((each) => isSame(each, head));
    return { ...head, offsets: head.offsets.map((value, n) => after.offsets[n] - value) };
  }));
}

function grids() {
  return [...page.sides.filter((side) => side.heads).map((side) => side.grid), ...(isCompared() ? [change.grid] : [])];
}

export function fit() {
  document.body.classList.toggle("all-heads", view.all === "on");
  $("all").setAttribute("aria-pressed", String(view.all === "on"));
  const whole = $("heads-panel").clientHeight - $("grids").offsetTop + $("heads-panel").offsetTop - 50;
  for (const grid of grids()) {
    grid.fit($("grids").clientWidth - 4, view.all === "on" ? whole : 0);
  }
}

export function offerChoices() {
  const heads = page.sides.find((side) => side.heads)?.heads;
  if (!heads) {
    return;
  }
  const options = [["entropy", "how spread it is (entropy)"]];
  const isImportanceKnown = heads.heads.some((head) => head.importance !== null);
  if (isImportanceKnown) {
    options.unshift(["importance", "importance"]);
  }
  $("into").querySelector("[value=least-important]").disabled = !isImportanceKnown;
  options.push(...heads.patterns.map((name) => [`on ${name}`, `attention on ${name}`]));
  const known = [...$("colour").options].map((option) => option.value);
  if (known.join() !== options.map(([value]) => value).join()) {
    $("colour").replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    $("patterns").replaceChildren(...page.overview.patterns.map(({ name }) => new Option(name, name)));
  }
  $("colour").value = colour();
}

function measureOf(side) {
  const pattern = colourPattern();
  if (!pattern) {
    return (head) => head[colour()];
  }
  const place = side.heads.patterns.indexOf(pattern);
  return (head) => (place < 0 ? null : head.relevance[place]);
}

// For each head that both models have: the measure in the first, and its change to the second, null if one of them has none.
function changes() {
  const [one, other] = page.sides;
  const [before, after] = [measureOf(one), measureOf(other)];
  return one.heads.heads.flatMap((head) => {
    const same = other.heads.heads.find((each) => isSame(each, head));
    const values = same ? [before(head), after(same)] : [];
    const is = values.length && values.every((value) => value !== null && value !== undefined);
    return same ? [{ head, before: values[0], change: is ? values[1] - values[0] : null }] : [];
  });
}

export function paint() {
  const shown = page.sides.filter((side) => side.heads);
  const values = shown.flatMap((side) => side.heads.heads.map(measureOf(side)));
  const most = Math.max(...values.filter((value) => value !== null), 1e-9);
  const pattern = colourPattern();
  const words = colour().replace(/^on /, "attention on ");
  const marks = (head) => (decisions.some((each) => isSame(each, head)) ? "●" : "");
  for (const side of shown) {
    const measure = measureOf(side);
    const out = new Set((side.heads.outstanding[pattern] ?? []).map((n) => side.heads.heads[n]));
    side.grid.paint(
      (head) => (measure(head) === null ? null : measure(head) / most),
      (head) => (out.has(head) ? "★" : "") + marks(head),
      (head) => `, ${words} ${percent(measure(head))}${out.has(head) ? ", stands out" : ""}`,
    );
  }
  legend("legend", false);
  $("legend-words").textContent = `Frames, ${words}:`;
  $("legend-low").textContent = "0";
  $("legend-high").textContent = percent(most);
  legend("pictures-legend", false);
  $("change-legends").hidden = !isCompared();
  if (isCompared()) {
    const known = changes();
    const largest = Math.max(...known.map((each) => Math.abs(each.change ?? 0)), 1e-9);
    const of = (head) => known.find((each) => isSame(each.head, head))?.change ?? null;
    change.grid.paint((head) => (of(head) === null ? null : of(head) / largest), marks, (head) => `, ${words} ${points(of(head))}`);
    legend("change-legend", true);
    legend("pictures-change-legend", true);
    $("change-low").textContent = points(-largest);
    $("change-high").textContent = points(largest);
  }
  pressHeads();
  listFound();
}

function legend(id, isSigned) {
  const context = $(id).getContext("2d");
  for (let x = 0; x < 120; x += 1) {
    context.fillStyle = css(isSigned ? (2 * x) / 119 - 1 : x / 119, isSigned);
    context.fillRect(x, 0, 1, 10);
  }
}

function listFound() {
  const name = colourPattern() || $("pattern").value.trim();
  const { heads } = page.sides.find((side) => side.heads) ?? {};
  const place = heads ? heads.patterns.indexOf(name) : -1;
  if (place < 0) {
    $("found").hidden = true;
  } else if (isCompared() && colourPattern()) {
    listHeads($("found"), `Heads whose attention on ${name} changes most`, ["head", "B − A", "A"], byChange(changes()), page.choose);
  } else {
    const rows = byRelevance(heads.heads, place, heads.by_chance[name]);
    listHeads($("found"), `Heads that look most at ${name}`, ["head", "attention", "by chance ×"], rows, page.choose);
  }
}

// The pictures of all heads of a model as shares, or null where they are not known yet.
async function tilesOf(side) {
  const average = `api/tiles?model=${side.number}`;
  const example = `${average}&example=${page.example()}`;
  const isExample = (view.pictures === "example" && has(example)) || !page.overview.models[side.number].average;
  const raw = await bytes(isExample ? example : average);
  const cells = raw.length / side.heads.heads.length;
  return side.heads.heads.map((_, n) => Float32Array.from(raw.subarray(n * cells, (n + 1) * cells), (byte) => (byte / 255) ** 2));
}

// The scale of all pictures: they have one colour bar, so none is drawn up to its own largest number.
export function pictureScale(isSigned = false) {
  return scaleOf(view.scale === "largest" ? "linear" : view.scale || "root", { isSigned });
}

export async function drawTiles() {
  drawn += 1;
  const mine = drawn;
  $("scale-words").textContent = `(${pictureScale().words})`;
  for (const side of page.sides.filter((each) => each.heads)) {
    let tiles = null;
    try {
      tiles = await tilesOf(side);
    } catch (error) {
      if (!(error instanceof Refused)) {
        problem("reading", error); // the server has ended: what is drawn stays
        return;
      }
    }
    if (mine !== drawn) {
      return;
    }
    side.tiles = tiles;
    side.grid.draw(tiles, pictureScale());
  }
  if (isCompared()) {
    const tile = (side, head) => side.tiles?.[side.heads.heads.findIndex((each) => isSame(each, head))];
    const isSameTokens = page.overview.models[1].same_tokens;
    const both = change.grid.cells.map(({ head }) => {
      const [one, other] = page.sides.map((side) => tile(side, head));
      return one && other && isSameTokens ? other.map((value, n) => value - one[n]) : null;
    });
    change.title.textContent = `B − A${isSameTokens ? "" : ", without pictures: the models read different tokens"}`;
    change.grid.draw(both, pictureScale(true));
  }
}

// The head to begin with: of those that stand out on a pattern the one that looks most at it beyond chance, or else the first.
export function mostTelling() {
  const { heads, patterns, outstanding, by_chance: byChance } = page.sides.find((side) => side.heads).heads;
  const found = patterns.flatMap((name, place) => outstanding[name].map((n) => [heads[n].relevance[place] / Math.max(byChance[name], 1e-9), heads[n]]));
  found.sort((one, other) => other[0] - one[0]);
  return found.length ? found[0][1] : heads[0];
}

export function pressHeads() {
  for (const grid of grids()) {
    grid.press(view, added());
  }
}

// The title and the facts of the chosen head.
export function facts(side) {
  const head = current(side);
  $("head-title").textContent = `Layer ${head.layer}, head ${head.head}${head.kind === "self" ? "" : ` (${head.kind})`}`;
  const { patterns, by_chance: byChance, outstanding, heads } = side.heads;
  const place = heads.indexOf(head);
  const best = patterns.map((name, n) => [name, head.relevance[n], head.relevance[n] / Math.max(byChance[name], 1e-9)])
    .filter(([name, value]) => value !== null && byChance[name] < 0.9).sort((a, b) => b[2] - a[2]).slice(0, 4)
    .map(([name, value, lift]) => `${name} ${percent(value, 0)} (${lift.toFixed(1)} × chance${outstanding[name].includes(place) ? ", stands out" : ""})`);
  const importance = head.importance === null ? "" : `importance ${percent(head.importance, 0)} · `;
  const isAlone = page.sides.length > 1 && page.sides.some((each) => each.heads && !current(each));
  const { name: model } = page.overview.models[side.number];
  const only = isAlone ? `only in ${model} · ` : page.sides.length > 1 ? `in ${model}: ` : "";
  $("facts").textContent = `${only}${importance}entropy ${percent(head.entropy, 0)} · closest patterns: ${best.join(", ")}`;
}

// The grids as they go on a figure.
export function headPanels() {
  return grids().map((grid) => {
    const side = Math.max(40, Math.min(64, grid.size));
    return { title: grid.name.replace(/: $/, ""), ...grid.figureSize(side), scale: grid.scale, draw: (pen, ink) => grid.figure(pen, side, ink) };
  });
}


