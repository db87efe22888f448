// What is shown, and the heads that were marked: all of it stands in the address, so that it survives a reload and can be shared.

const FIRST = {
  layer: null, head: null, kind: "self", example: 0, view: "example", colour: "", pictures: "average", role: "", pattern: "",
  text: "", // one of the person's own, instead of an example
  scale: "", // of colours: empty for the square root
  more: "", // further heads that are drawn as lines, as names with commas
  top: "", // how many lines a query has
  lock: "", // the token whose lines are drawn: q or k, and its number
  // switches, empty as the page begins
  sentences: "", outline: "", special: "", difference: "", all: "",
};
const NUMBERS = ["layer", "head", "example"];

export const view = { ...FIRST };

// Each {layer, head, kind, pattern}.
export const decisions = [];

// The names of the further heads that are drawn as lines.
export function added() {
  return view.more.split(",").filter(Boolean);
}

function parameters() {
  const kept = new URLSearchParams();
  for (const [name, value] of Object.entries(view)) {
    if (value !== null && value !== "") {
      kept.set(name, String(value));
    }
  }
  for (const { layer, head, kind, pattern } of decisions) {
    kept.append("mark", `${layer}-${head}-${kind} ${pattern}`);
  }
  return kept;
}

export function readAddress() {
  Object.assign(view, FIRST);
  decisions.length = 0;
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const mark = name === "mark" && /^(\d{1,9})-(\d{1,9})-([a-z]{1,10}) (.+)$/su.exec(value);
    if (mark) {
      decisions.push({ layer: Number(mark[1]), head: Number(mark[2]), kind: mark[3], pattern: mark[4] });
    } else if (NUMBERS.includes(name) ? /^\d{1,9}$/.test(value) : name in FIRST) {
      view[name] = NUMBERS.includes(name) ? Number(value) : value;
    }
  }
  if (view.layer === null || view.head === null) {
    [view.layer, view.head] = [null, null]; // one without the other names no head
  }
}

// step: whether the button "back" of the browser leads to what was shown before.
export function writeAddress(step = false) {
  const address = `#${parameters()}`;
  if (address !== location.hash) {
    history[step ? "pushState" : "replaceState"](null, "", address);
  }
}
