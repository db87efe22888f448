// The lists beside the pictures: where a head looks most, which heads look most at a pattern, and what was decided.

import { button, element } from "./dom.js";
import { nameOf } from "./grid.js";
import { percent } from "./colours.js";

// The examples where a head looks most at something.
export function listExamples(list, examples, open) {
  list.replaceChildren(...examples.map(({ number, value, text }) => {
    const line = button(`${percent(value)}  ${text}`, `example ${number}, ${percent(value)}`, () => open(number));
    return element("li", "", line);
  }));
}

const MOST = 8;

// The heads with the highest relevance to a pattern.
export function listHeads(table, heads, place, byChance, open) {
  const known = heads.filter((head) => head.relevance[place] !== null);
  known.sort((one, other) => other.relevance[place] - one.relevance[place]);
  const rows = known.slice(0, MOST).map((head) => {
    const value = head.relevance[place];
    const lift = byChance > 0 ? (value / byChance).toFixed(1) : "–";
    const show = button(nameOf(head), `show head ${nameOf(head)}`, () => open(head));
    return element("tr", "", element("td", "", show), element("td", percent(value)), element("td", lift));
  });
  table.tBodies[0].replaceChildren(...rows);
  table.hidden = rows.length === 0;
}

// The heads that a person marked, each with its pattern.
export function listDecisions(list, decisions, open, remove) {
  list.replaceChildren(...decisions.map((decision) => {
    const name = nameOf(decision);
    return element("li", "", button(name, `show head ${name}`, () => open(decision)), document.createTextNode(` ${decision.pattern} `),
      button("✕", `remove ${name} ${decision.pattern}`, () => remove(decision)));
  }));
}
