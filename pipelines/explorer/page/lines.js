// Attention as lines between tokens in two columns: queries on the left, keys on the right.

import { KINDS, percent } from "./colours.js";
import { element } from "./dom.js";

const SPACE = "http://www.w3.org/2000/svg";
const COLUMN = 140; // pixels for the tokens of a side
const ROW = 19;
const LEGEND_ROW = 16;
const LEGEND_LETTER = 7; // pixels of a letter, at most on average
const WIDEST = 7; // pixels of a line for all the attention of a query
const LEAST = 0.005; // less attention has no line
const ON_PATTERN = "#D55E00";
const OFF_PATTERN = "#7D8CA0";
const NO_PATTERN = "#1F83C4";

function shape(name, attributes, ...children) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) {
    made.setAttribute(key, String(value));
  }
  made.append(...children);
  return made;
}

export class Lines {
  // read(text): called with what a token looks at; lock(token): called when a person locks one, {isQuery, n}, or null.
  constructor(parent, label, read, lock) {
    Object.assign(this, { label, read, lock, locked: null });
    this.title = element("figcaption", label);
    this.svg = shape("svg", { role: "group", "aria-label": "attention as lines" });
    this.figure = element("figure", "", this.title, this.svg);
    this.figure.hidden = true;
    parent.append(this.figure);
    this.svg.addEventListener("keydown", (event) => this.step(event));
  }

  // heads: each {name, values}; keys: where the pattern is true, or null; top: the strongest lines of each query that are drawn;
  // locked: a token whose lines alone are drawn, or null.
  show(heads, tokens, keys, { top, width, locked }) {
    Object.assign(this, { heads, tokens, keys, top, size: tokens.length });
    this.width = Math.max(2 * COLUMN + 100, Math.min(width, 2 * COLUMN + 420));
    const legend = this.legend();
    this.above = LEGEND_ROW * legend.length;
    this.height = this.above + ROW * this.size + 30;
    for (const [name, value] of [["width", this.width], ["height", this.height], ["viewBox", `0 0 ${this.width} ${this.height}`]]) {
      this.svg.setAttribute(name, value);
    }
    this.lines = shape("g", { fill: "none" });
    const words = shape("g", { "font-family": "ui-monospace, monospace", "font-size": 12 });
    words.append(this.heading("query", true), this.heading("key", false), ...legend);
    this.words = [true, false].map((isQuery) => tokens.map((_, n) => this.token(isQuery, n)));
    words.append(...this.words.flat().map(({ group }) => group));
    this.svg.replaceChildren(this.lines, words);
    this.locked = locked && locked.n < this.size ? locked : null;
    this.focus(this.locked);
  }

  heading(text, isQuery) {
    const made = shape("text", { x: isQuery ? COLUMN - 8 : this.width - COLUMN + 8, "text-anchor": isQuery ? "end" : "start", y: this.above + 12, fill: "currentColor", opacity: 0.75 });
    made.textContent = text;
    return made;
  }

  // What the colours of lines mean: rows above the columns, as many as it takes.
  legend() {
    const many = this.heads.length > 1 ? this.heads.map(({ name }, n) => [`▬ ${name}`, KINDS[n % KINDS.length]]) : [];
    const pattern = many.length ? [["dashed: not on the pattern", "currentColor"]] : [["▬ on the pattern", ON_PATTERN], ["▬ not on it", OFF_PATTERN]];
    const rows = [];
    let room = 0;
    for (const [text, colour] of [...many, ...(this.keys === null ? [] : pattern)]) {
      const width = LEGEND_LETTER * text.length + 12;
      if (room < width) {
        const style = { "text-anchor": "middle", "font-size": 11, "font-family": "system-ui, sans-serif" };
        rows.push(shape("text", { x: this.width / 2, y: 12 + LEGEND_ROW * rows.length, ...style }));
        room = this.width;
      }
      room -= width;
      const [mark, name] = text.startsWith("▬ ") ? ["▬ ", text.slice(2)] : ["", text];
      for (const [part, fill, dx] of [[mark, colour, rows.at(-1).childNodes.length ? 8 : 0], [name, "currentColor", mark ? 0 : 8]]) {
        const made = shape("tspan", { fill, dx });
        made.textContent = part;
        rows.at(-1).append(made);
      }
    }
    return rows;
  }

  token(isQuery, n) {
    const text = this.tokens[n].length > 18 ? `${this.tokens[n].slice(0, 17)}…` : this.tokens[n];
    const y = this.place(n);
    const word = shape("text", { x: isQuery ? COLUMN - 8 : this.width - COLUMN + 8, y: y + 4, "text-anchor": isQuery ? "end" : "start", fill: "currentColor" });
    word.textContent = text;
    const share = shape("text", { x: isQuery ? 2 : this.width - 2, y: y + 4, "text-anchor": isQuery ? "start" : "end", fill: "currentColor", "font-size": 11 });
    const back = shape("rect", { x: isQuery ? 0 : this.width - COLUMN, y: y - ROW / 2, width: COLUMN, height: ROW, fill: "transparent" });
    const label = `${isQuery ? "query" : "key"} ${n} ${this.tokens[n]}`;
    const group = shape("g", { role: "button", tabindex: isQuery && n === 0 ? 0 : -1, "aria-label": label, "aria-pressed": "false" }, back, word, share);
    const own = { isQuery, n };
    group.addEventListener("pointerenter", () => this.locked || this.focus(own));
    group.addEventListener("pointerleave", () => this.locked || this.focus(null));
    group.addEventListener("focus", () => this.locked || this.focus(own));
    group.addEventListener("click", () => this.toggle(own));
    return { group, word, share };
  }

  place(n) {
    return this.above + 30 + ROW * n;
  }

  toggle(token) {
    const is = this.locked && this.locked.isQuery === token.isQuery && this.locked.n === token.n;
    this.locked = is ? null : token;
    this.focus(this.locked ?? token);
    this.lock(this.locked);
  }

  step(event) {
    const column = this.words.findIndex((words) => words.some(({ group }) => group === document.activeElement));
    const n = column < 0 ? -1 : this.words[column].findIndex(({ group }) => group === document.activeElement);
    const steps = { ArrowUp: [column, n - 1], ArrowDown: [column, n + 1], ArrowLeft: [0, n], ArrowRight: [1, n] }[event.key];
    if (n < 0 || !(steps || ["Enter", " ", "Escape"].includes(event.key))) {
      return;
    }
    event.preventDefault();
    if (event.key === "Escape" && this.locked) {
      this.toggle(this.locked);
    } else if (event.key === "Enter" || event.key === " ") {
      this.toggle({ isQuery: column === 0, n });
    } else {
      const wanted = steps && this.words[steps[0]][steps[1]];
      if (wanted) {
        for (const { group } of this.words.flat()) {
          group.setAttribute("tabindex", -1);
        }
        wanted.group.setAttribute("tabindex", 0);
        wanted.group.focus();
      }
    }
  }

  // The lines of one token, all that are seen; or of all tokens the strongest.
  focus(token) {
    const { size } = this;
    const all = this.tokens.map((_, n) => n);
    const queries = token?.isQuery ? [token.n] : all;
    const keys = token && !token.isQuery ? [token.n] : all;
    const drawn = this.heads.flatMap(({ values }, place) => queries.flatMap((query) => {
      const seen = keys.filter((key) => values[query * size + key] >= LEAST)
        .map((key) => ({ query, key, place, value: values[query * size + key] }));
      return token ? seen : seen.sort((one, other) => other.value - one.value).slice(0, this.top);
    }));
    const holds = ({ query, key }) => this.keys !== null && this.keys[query * size + key] > 127;
    drawn.sort((one, other) => holds(one) - holds(other) || one.value - other.value);
    this.lines.replaceChildren(...drawn.map((line) => this.line(line, holds(line))));
    this.tell(token, drawn);
  }

  line({ query, key, place, value }, holds) {
    const [from, to] = [this.place(query), this.place(key)];
    const [left, right] = [COLUMN, this.width - COLUMN];
    const middle = (left + right) / 2;
    const many = this.heads.length > 1;
    const single = this.keys === null ? NO_PATTERN : holds ? ON_PATTERN : OFF_PATTERN;
    const made = shape("path", {
      d: `M${left} ${from}C${middle} ${from} ${middle} ${to} ${right} ${to}`,
      stroke: many ? KINDS[place % KINDS.length] : single,
      "stroke-width": Math.max(0.6, WIDEST * value).toFixed(2),
      "stroke-opacity": Math.min(1, 0.35 + 0.65 * value).toFixed(2),
    });
    if (many && this.keys !== null && !holds) {
      made.setAttribute("stroke-dasharray", "5 3");
    }
    return made;
  }

  tell(token, drawn) {
    for (const [column, words] of this.words.entries()) {
      words.forEach(({ group, word, share }, n) => {
        const is = token !== null && token.isQuery === (column === 0) && token.n === n;
        const lines = token !== null && !is && token.isQuery === (column === 1)
          ? drawn.filter((line) => (token.isQuery ? line.key : line.query) === n) : [];
        const most = Math.max(0, ...lines.map(({ value }) => value));
        share.textContent = most >= 0.01 ? percent(most, 0) : "";
        word.setAttribute("opacity", token === null || is || most >= 0.01 ? 1 : 0.45);
        word.setAttribute("font-weight", is ? "bold" : "normal");
        group.setAttribute("aria-pressed", String(Boolean(is && this.locked)));
      });
    }
    this.told = token === null ? "" : (this.label ? `${this.label}: ` : "") + this.sentence(token, drawn);
    this.read(this.told);
  }

  // What a token looks at, in words.
  sentence(token, drawn) {
    const best = [...drawn].sort((one, other) => other.value - one.value).slice(0, 4);
    const other = ({ query, key }) => (token.isQuery ? key : query);
    const head = ({ place }) => (this.heads.length > 1 ? ` (${this.heads[place].name})` : "");
    const told = best.map((line) => `${other(line)} “${this.tokens[other(line)]}” ${percent(line.value)}${head(line)}`).join(", ");
    const verb = token.isQuery ? "looks at" : "is looked at by";
    return `${token.n} “${this.tokens[token.n]}” ${verb} ${told || "nothing"}`;
  }

  panel() {
    const markup = () => [...this.svg.children].map((child) => new XMLSerializer().serializeToString(child)).join("");
    return { title: this.label, width: this.width, height: this.height, scale: null, draw: (pen) => pen.raw(markup()) };
  }
}
