// The lists beside the pictures: where a head looks most, which heads look most at a pattern, and what was decided.

import { percent, points } from "./colours.js";
import { button, element } from "./dom.js";
import { nameOf } from "./grid.js";

// The examples where a head looks most at something.
export function listExamples(list, examples, open) {
  list.replaceChildren(...examples.map(({ number, value, text }) => {
    const line = button(`${percent(value)}  ${text}`, `example ${number}, ${percent(value)}`, () => open(number));
    return element("li", "", line);
  }));
}

const MOST_LISTED = 8;

// The heads with the highest relevance to a pattern, or those where it changes most; rows: each {head, value, other}, other as text.
export function listHeads(table, caption, titles, rows, open) {
  table.caption.textContent = caption;
  table.tHead.rows[0].replaceChildren(...titles.map((title) => element("th", title)));
  table.tBodies[0].replaceChildren(...rows.slice(0, MOST_LISTED).map(({ head, value, other }) => {
    const show = button(nameOf(head), `show head ${nameOf(head)}`, () => open(head));
    return element("tr", "", element("td", "", show), element("td", value), element("td", other));
  }));
  table.hidden = rows.length === 0;
}

// Rows of the heads that spend most attention on a pattern.  other: how many times as much as by chance, which is what a head spends
// that looks at all tokens alike.
export function byRelevance(heads, place, byChance) {
  const known = heads.filter((head) => head.relevance[place] !== null);
  known.sort((one, other) => other.relevance[place] - one.relevance[place]);
  return known.map((head) => {
    const value = head.relevance[place];
    return { head, value: percent(value), other: byChance > 0 ? (value / byChance).toFixed(1) : "–" };
  });
}

// Rows of the heads whose attention on a pattern changes most.  changes: each {head, change, before}.
export function byChange(changes) {
  const known = changes.filter(({ change }) => change !== null);
  known.sort((one, other) => Math.abs(other.change) - Math.abs(one.change));
  return known.map(({ head, change, before }) => ({ head, value: points(change), other: percent(before) }));
}

// The heads that a person marked, each with its pattern.
export function listDecisions(list, decisions, open, remove) {
  list.replaceChildren(...decisions.map((decision) => {
    const name = nameOf(decision);
    return element("li", "", button(name, `show head ${name}`, () => open(decision)), document.createTextNode(` ${decision.pattern} `),
      button("✕", `remove ${name} ${decision.pattern}`, () => remove(decision)));
  }));
}
