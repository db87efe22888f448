// Saves what the page shows as a figure: the pictures of all heads, or those of one head, with a caption that says what they are.

import { percent, scaleOf } from "./colours.js";
import { $ } from "./dom.js";
import { compose, preparePrint, savePng, saveSvg } from "./figure.js";
import { nameOf } from "./grid.js";
import { headsShown, linesOfAQuery, mapPanels, show } from "./head.js";
import { drawTiles, headPanels, pictureScale } from "./heads.js";
import { colour, current, holder, isCompared, modelNames, page } from "./page.js";
import { view } from "./state.js";

function caption(isOverview) {
  const { data } = page.overview;
  const names = modelNames();
  const models = names.length > 1 ? `${names.join(" (A) and ")} (B)` : names[0];
  if (isOverview) {
    const shown = [...document.querySelectorAll(".cell .sign")].map((sign) => sign.textContent).join("");
    const signs = [["★", "stands out"], ["●", "is marked"]].filter(([sign]) => shown.includes(sign)).map(([sign, words]) => ` ${sign}: ${words}.`).join("");
    const pictures = view.pictures === "example" ? exampleName() : "average of the first tokens of the first examples";
    const change = isCompared() ? ` Those of B − A: its change, up to ${$("change-high").textContent.slice(1)}; purple is less in B, orange is more.` : "";
    return `All heads of ${models} on ${data}; rows are layers. Pictures: attention, ${pictures}, ${pictureScale().words}; below each the attention at `
      + `distances from −16 to +16 tokens. Frames: ${colour().replace(/^on /, "attention on the pattern ")}, up to ${$("legend-high").textContent}.${change}${signs}`;
  }
  const isLines = view.view === "lines";
  const heads = headsShown().map(nameOf);
  const pattern = $("pattern").value.trim();
  const held = page.sides.filter(current).some((side) => (isLines ? side.lines.keys : side.matrix.overlay?.keys));
  return [
    `Attention of head${heads.length > 1 ? "s" : ""} ${heads.join(", ")} of ${models} on ${data}, ${view.view === "average" ? "average of the first tokens" : exampleName()}.`,
    held && `Pattern: ${pattern}, ${!isLines ? "outlined" : heads.length > 1 ? "solid lines" : "orange lines"}.`,
    held && !isLines && patternShare(pattern),
    isLines ? `Width of a line: attention; the ${linesOfAQuery()} strongest of each query.` : `Colour: attention in %, ${scaleOf(view.scale || "root").words}.`,
    view.special && view.view !== "average" && "Special tokens are left out, and rows add up to 100 % without them.",
    isCompared() && !isLines && "B − A: purple is less in B, orange is more.",
  ].filter(Boolean).join(" ");
}

// The mean attention on a pattern.  Of two models each share names its model; a model without the head has none.
function patternShare(pattern) {
  const found = page.sides.filter(current).flatMap((side) => {
    const share = current(side).relevance[side.heads.patterns.indexOf(pattern)] ?? null;
    return share === null ? [] : [`${percent(share)}${page.sides.length > 1 ? ` (${"AB"[side.number]})` : ""}`];
  });
  return found.length ? `Mean attention on it over all examples: ${found.join(", ")}.` : "";
}

function exampleName() {
  return view.text ? `“${view.text}”` : `example ${view.example}`;
}

function figureOf(isOverview) {
  return compose(isOverview ? headPanels() : mapPanels(), caption(isOverview));
}

export async function save(isOverview, kind) {
  if (!holder()) {
    return; // nothing is drawn yet
  }
  await (isOverview ? drawTiles() : show()); // what was chosen last may not be drawn yet
  const what = isOverview ? "heads" : `${view.view === "lines" ? "lines" : "map"}-${nameOf(view)}`;
  if (kind === "svg") {
    saveSvg(figureOf(isOverview), what);
  } else if (kind === "png") {
    await savePng(figureOf(isOverview), what);
  } else {
    await preparePrint(figureOf(isOverview));
    window.print();
  }
}
