// What the parts of the page share: the state of the server, and its models.

import { Refused } from "./api.js";
import { $, element } from "./dom.js";
import { view } from "./state.js";

// overview: as the server gives it; sides: for each model {grid, matrix, lines, heads, tiles, number}; change: the map of the
// difference, if there are two models.  Functions that other parts set: choose(head) shows a head, listTop() lists where it looks
// most, and example() gives the number of the example that is shown.
export const page = { overview: null, sides: [] };

export function problem(where, error) {
  if (error instanceof Refused) {
    $(where).textContent = error.message;
  } else if (error.message === "gone") {
    gone();
  } else {
    throw error;
  }
}

export function gone() {
  if (!$("gone")) {
    const told = element("p", "The server has ended. What is drawn stays; start `guide discover serve` again to go on.");
    told.id = "gone";
    told.setAttribute("role", "alert");
    document.body.prepend(told);
  }
}

export function read(text) {
  $("reading").textContent = text || "\u00a0";
}

// The names of the models; a guided one is said to be guided.
export function modelNames() {
  return page.overview.models.map((model) => model.name + (model.plan ? " (guided)" : ""));
}

export function isSame(one, other) {
  return one.layer === other.layer && one.head === other.head && one.kind === other.kind;
}

// The chosen head of a model, if it has it.
export function current(side) {
  return side?.heads?.heads.find((head) => isSame(head, view));
}

// The first model that has the chosen head.
export function holder() {
  return page.sides.find((side) => current(side));
}

// The measure that colours heads: the one that a person chose, if it is known, or else the first; importance comes later than the rest.
export function colour() {
  const known = [...$("colour").options].map((option) => option.value);
  return known.includes(view.colour) ? view.colour : known[0] ?? "";
}

// The pattern that colours heads, or an empty text.
export function colourPattern() {
  return colour().startsWith("on ") ? colour().slice(3) : "";
}

// Whether the change from the first to the second model is shown.
export function isCompared() {
  return view.difference === "on" && page.sides.length > 1 && page.sides.every((side) => side.heads);
}
