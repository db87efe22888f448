// A map of attention: one cell for each query and key.  What does not fit scrolls under labels that stay in view.

import { KINDS, css, drawBar, percent, points, scaleOf } from "./colours.js";
import { element } from "./dom.js";
import { imageOf } from "./grid.js";
import { Vector, addressOf } from "./vector.js";

const LABELS = 92;
const STRIP = 6;
const SMALLEST = 10; // pixels of a cell that has a label
const LARGEST_CELL = 40;
const LARGEST_LETTER = 11; // pixels; twelve letters fit beside the map
const MAP_FONT = "ui-monospace, monospace";

export class Matrix {
  // read(text): called with what stands under the pointer; isSigned: whether it shows the difference of two maps.
  constructor(parent, label, read, isSigned = false) {
    Object.assign(this, { label, read, isSigned, values: null, at: null });
    this.canvas = element("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.sheet = element("div", "", this.canvas);
    this.frame = element("div", "", this.sheet);
    this.frame.className = "map";
    this.bar = element("img");
    this.bar.className = "bar";
    this.title = element("span", label);
    this.title.className = "model";
    const directions = element("span", "query ↓  key →");
    directions.className = "directions";
    this.caption = element("figcaption", "", this.title, directions, this.bar);
    this.figure = element("figure", "", this.caption, this.frame);
    parent.append(this.figure);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.move(null));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
    this.frame.addEventListener("scroll", () => this.compose());
  }

  // values: row by row; tokens: their texts; overlay: {keys, bounds, kinds}, each may be null; scale: see scaleOf; zoom: 1 fits the
  // map into room × height pixels, beside other maps, but lets its labels take up to most × height.
  show(values, tokens, overlay, { scale, zoom, room, most, height }) {
    const size = tokens.length;
    Object.assign(this, { values, tokens, overlay, size });
    const largest = values.reduce((found, value) => Math.max(found, Math.abs(value)), 0);
    this.colours = scaleOf(scale, { isSigned: this.isSigned, largest });
    const fit = (pixels) => Math.floor(Math.min(28, (pixels - LABELS - 2) / size));
    const labelled = fit(most) >= SMALLEST ? Math.max(fit(room), Math.min(fit(most), SMALLEST)) : 0;
    const bare = Math.max(1, Math.min(SMALLEST - 1, Math.floor(Math.min(room - STRIP, height) / size))); // a larger cell would get a label
    const cell = (labelled || bare) * zoom;
    this.cell = zoom === 1 ? cell : Math.min(LARGEST_CELL, Math.max(1, Math.round(cell)));
    this.named = this.cell >= SMALLEST;
    this.left = this.named ? LABELS : overlay.kinds ? STRIP : 0;
    this.whole = this.left + this.cell * size + 1;
    this.window = { width: Math.min(this.whole, most), height: Math.min(this.whole, Math.max(height, 200)) };
    this.caption.style.maxWidth = `${Math.max(this.window.width, 260)}px`;
    this.scale = Math.max(1, window.devicePixelRatio || 1);
    for (const [side, pixels] of Object.entries(this.window)) {
      this.canvas[side] = Math.round(pixels * this.scale);
      this.canvas.style[side] = `${pixels}px`;
      this.frame.style[side] = `${pixels}px`;
      this.sheet.style[side] = `${this.whole}px`;
    }
    this.levels = values.map(this.colours.level);
    this.picture = imageOf(this.levels, size, this.colours.palette);
    this.showBar();
    this.compose();
    this.canvas.setAttribute("aria-label", `attention of ${size} tokens; arrow keys read single cells`);
  }

  showBar() {
    const pen = new Vector();
    const { width, height } = drawBar(pen, this.colours, 15, 0, getComputedStyle(this.figure).color);
    this.bar.src = addressOf(pen.document(width + 30, height));
    this.bar.title = `${this.isSigned ? "change of attention" : "attention"} in %, ${this.colours.words}`;
    this.bar.alt = `colours: ${this.bar.title}`;
  }

  // Everything but the cell under the pointer, drawn when something changes.
  compose() {
    if (!this.values) {
      return;
    }
    this.base = element("canvas");
    this.base.width = this.canvas.width;
    this.base.height = this.canvas.height;
    const context = this.base.getContext("2d");
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.imageSmoothingEnabled = false;
    this.paint(context, getComputedStyle(this.figure).color);
    this.draw();
  }

  // The map as it is seen, or on a figure the whole one.
  paint(pen, ink) {
    const { size, cell, left, overlay } = this;
    const isFigure = !pen.canvas;
    const [x, y] = isFigure ? [0, 0] : [this.frame.scrollLeft, this.frame.scrollTop];
    const { width, height } = isFigure ? { width: this.whole, height: this.whole } : this.window;
    const visible = (start, room) => [Math.max(0, Math.floor(start / cell)), Math.min(size, Math.ceil((start + room) / cell))];
    const shown = { queries: visible(y, height - left), keys: visible(x, width - left) };
    pen.save();
    pen.beginPath();
    pen.rect(left, left, width, height);
    pen.clip();
    pen.translate(left - x, left - y);
    if (isFigure) {
      pen.cells((row, column) => this.levels[row * size + column], size, this.colours.palette, 0, 0, cell);
    } else {
      pen.drawImage(this.picture, 0, 0, cell * size, cell * size);
    }
    this.boundaries(pen);
    if (overlay.keys) {
      this.outline(pen, shown);
    }
    pen.restore();
    this.margins(pen, ink, x, y, shown);
  }

  draw() {
    const { cell, left, at } = this;
    const context = this.canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.base, 0, 0);
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    if (at) {
      const place = [left + at.key * cell - this.frame.scrollLeft, left + at.query * cell - this.frame.scrollTop];
      for (const [colour, width] of [["#000", 5], ["#fff", 3], ["#c45a00", 1.5]]) {
        context.strokeStyle = colour;
        context.lineWidth = width;
        context.strokeRect(...place, cell, cell);
      }
    }
  }

  boundaries(pen) {
    const { size, cell, overlay } = this;
    pen.strokeStyle = this.isSigned ? "rgba(0,0,0,.5)" : "rgba(255,255,255,.75)";
    pen.lineWidth = cell < 4 ? 0.4 : 1;
    pen.beginPath();
    for (const place of overlay.bounds ?? []) {
      const at = place * cell + (cell < 4 ? 0 : 0.5);
      pen.moveTo(0, at);
      pen.lineTo(cell * size, at);
      pen.moveTo(at, 0);
      pen.lineTo(at, cell * size);
    }
    if (overlay.bounds?.length) {
      pen.stroke();
    }
  }

  // The edges of the cells where the pattern is true, white within black, which is seen on every colour.
  outline(pen, { queries, keys }) {
    const { size, cell } = this;
    const is = (query, key) => query >= 0 && key >= 0 && query < size && key < size && this.overlay.keys[query * size + key] > 127;
    pen.beginPath();
    const edge = (x, y, across, down) => { pen.moveTo(x, y); pen.lineTo(x + across, y + down); };
    for (let query = queries[0]; query < queries[1]; query += 1) {
      for (let key = keys[0]; key < keys[1]; key += 1) {
        if (is(query, key)) {
          const [x, y] = [key * cell, query * cell];
          if (!is(query - 1, key)) { edge(x, y, cell, 0); }
          if (!is(query + 1, key)) { edge(x, y + cell, cell, 0); }
          if (!is(query, key - 1)) { edge(x, y, 0, cell); }
          if (!is(query, key + 1)) { edge(x + cell, y, 0, cell); }
        }
      }
    }
    const width = cell >= 8 ? 1.4 : 0.8;
    for (const [colour, more] of [["#000", width >= 1 ? 2 : 1], ["#fff", 0]]) {
      pen.strokeStyle = colour;
      pen.lineWidth = width + more;
      pen.stroke();
    }
  }

  // What stands beside the cells: kinds of tokens, their texts, and the directions.
  margins(pen, ink, x, y, shown) {
    const { size, cell, left, tokens, overlay } = this;
    const short = (text) => (text.length > 12 ? `${text.slice(0, 11)}…` : text);
    const kinds = overlay.kinds;
    const paintOf = (n) => {
      const kind = kinds ? kinds.kinds.indexOf(kinds.values[n]) : -1;
      return kinds?.shades ? kinds.shades[n] !== null && css(kinds.shades[n]) : kind >= 0 && KINDS[kind % KINDS.length];
    };
    for (const [isQuery, [from, to], scrolled] of [[true, shown.queries, y], [false, shown.keys, x]]) {
      pen.save();
      if (pen.canvas) {
        pen.beginPath();
        pen.rect(isQuery ? 0 : left, isQuery ? left : 0, isQuery ? left : this.window.width, isQuery ? this.window.height : left);
        pen.clip();
      }
      for (let n = from; n < Math.min(to, size); n += 1) {
        const start = left + n * cell - scrolled;
        if (paintOf(n)) {
          pen.fillStyle = paintOf(n);
          pen.fillRect(isQuery ? left - STRIP : start, isQuery ? start : left - STRIP, isQuery ? STRIP - 1 : cell, isQuery ? cell : STRIP - 1);
        }
        if (!this.named) {
          continue;
        }
        pen.fillStyle = ink;
        pen.font = `${Math.min(LARGEST_LETTER, cell)}px ${MAP_FONT}`;
        pen.textBaseline = "middle";
        if (isQuery) {
          pen.textAlign = "right";
          pen.fillText(short(tokens[n]), left - STRIP - 2, start + cell / 2);
        } else {
          pen.save();
          pen.translate(start + cell / 2, left - STRIP - 2);
          pen.rotate(-Math.PI / 2);
          pen.textAlign = "left";
          pen.fillText(short(tokens[n]), 0, 0);
          pen.restore();
        }
      }
      pen.restore();
    }
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - this.left, event.clientY - box.top - this.left];
    const key = Math.floor((x + this.frame.scrollLeft) / this.cell);
    const query = Math.floor((y + this.frame.scrollTop) / this.cell);
    this.move(x >= 0 && y >= 0 && key < this.size && query < this.size ? { query, key } : null);
  }

  step(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!steps) {
      return;
    }
    event.preventDefault();
    const { query, key } = this.at ?? { query: 0, key: 0 };
    const limit = (value) => Math.min(this.size - 1, Math.max(0, value));
    const at = { query: limit(query + steps[0]), key: limit(key + steps[1]) };
    const into = (place, scrolled, room) => Math.max((place + 1) * this.cell - room, Math.min(place * this.cell, scrolled));
    this.frame.scrollTo(into(at.key, this.frame.scrollLeft, this.window.width - this.left),
      into(at.query, this.frame.scrollTop, this.window.height - this.left));
    this.move(at);
  }

  move(at) {
    this.at = at;
    this.draw();
    if (!at) {
      this.read("");
      return;
    }
    const value = this.values[at.query * this.size + at.key];
    const kinds = this.overlay.kinds;
    const about = (n) => (kinds && kinds.values[n] !== "" && kinds.values[n] !== null ? ` [${kinds.values[n]}]` : "");
    const told = this.isSigned ? points(value) : percent(value);
    this.read(`${at.query} “${this.tokens[at.query]}”${about(at.query)} looks at ${at.key} “${this.tokens[at.key]}”${about(at.key)}: ${told}`);
  }

  // What a figure shows: a title, a size, and how it is drawn.
  panel() {
    return { title: this.label, width: this.whole, height: this.whole, scale: this.colours, draw: (pen, ink) => this.paint(pen, ink) };
  }
}
