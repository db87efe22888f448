// A map of attention at full length: one cell for each query and key, with labels where there is room.

import { KINDS, PIXELS, css, percent, share } from "./colours.js";

const LABELS = 92;
const STRIP = 6;
const SMALLEST = 11; // pixels of a cell that has a label

export class Matrix {
  // read(text): called with what stands under the pointer.
  constructor(element, label, read) {
    this.read = read;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.figure = document.createElement("figure");
    this.caption = document.createElement("figcaption");
    this.caption.textContent = label;
    this.figure.append(this.caption, this.canvas);
    element.append(this.figure);
    this.at = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.move(null));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
  }

  // map: bytes row by row; tokens: their texts; overlay: {keys, bounds, kinds}, each may be null; room: pixels, beside
  // another map; most: the pixels of a map that stands alone in its row.
  show(map, tokens, overlay, room, most) {
    const size = tokens.length;
    Object.assign(this, { map, tokens, overlay, size });
    const [beside, alone] = [room, most].map((pixels) => Math.floor(Math.min(28, (pixels - LABELS) / size)));
    const named = alone >= SMALLEST;
    this.cell = named ? Math.max(beside, Math.min(alone, SMALLEST)) : Math.max(1, Math.floor(room / size));
    this.left = named ? LABELS : overlay.kinds ? STRIP : 0;
    const scale = Math.max(1, window.devicePixelRatio || 1);
    const whole = this.left + this.cell * size + 1;
    this.canvas.width = Math.round(whole * scale);
    this.canvas.height = Math.round(whole * scale);
    this.canvas.style.width = `${whole}px`;
    this.canvas.style.height = `${whole}px`;
    this.scale = scale;
    const image = new ImageData(size, size);
    const pixels = new Uint32Array(image.data.buffer);
    for (let n = 0; n < size * size; n += 1) {
      pixels[n] = PIXELS[map[n]];
    }
    this.picture = document.createElement("canvas");
    this.picture.width = size;
    this.picture.height = size;
    this.picture.getContext("2d").putImageData(image, 0, 0);
    this.named = named;
    this.compose();
    this.draw();
    this.canvas.setAttribute("aria-label", `attention of ${size} tokens; arrow keys read single cells`);
  }

  // Everything but the cell under the pointer, drawn once.
  compose() {
    const { size, cell, left, overlay } = this;
    this.base = document.createElement("canvas");
    this.base.width = this.canvas.width;
    this.base.height = this.canvas.height;
    const context = this.base.getContext("2d");
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.picture, left, left, cell * size, cell * size);
    if (overlay.keys) {
      this.outline(context);
    }
    if (overlay.bounds) {
      context.strokeStyle = "rgba(255,255,255,.75)";
      context.lineWidth = 1;
      for (const place of overlay.bounds) {
        const at = left + place * cell + 0.5;
        context.beginPath();
        context.moveTo(left, at);
        context.lineTo(left + cell * size, at);
        context.moveTo(at, left);
        context.lineTo(at, left + cell * size);
        context.stroke();
      }
    }
    if (overlay.kinds) {
      this.strips(context);
    }
    if (this.named) {
      this.names(context);
    }
  }

  draw() {
    const { cell, left } = this;
    const context = this.canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.base, 0, 0);
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    if (this.at) {
      context.strokeStyle = "#ff6a00";
      context.lineWidth = 2;
      context.strokeRect(left + this.at.key * cell, left + this.at.query * cell, cell, cell);
    }
  }

  // The edges of the cells where the pattern is true.
  outline(context) {
    const { size, cell, left } = this;
    const { keys } = this.overlay;
    const is = (query, key) => query >= 0 && key >= 0 && query < size && key < size && keys[query * size + key] > 127;
    context.strokeStyle = "#ff6a00";
    context.lineWidth = cell > 4 ? 1.5 : 1;
    context.beginPath();
    for (let query = 0; query < size; query += 1) {
      for (let key = 0; key < size; key += 1) {
        if (!is(query, key)) {
          continue;
        }
        const [x, y] = [left + key * cell, left + query * cell];
        if (!is(query - 1, key)) { context.moveTo(x, y); context.lineTo(x + cell, y); }
        if (!is(query + 1, key)) { context.moveTo(x, y + cell); context.lineTo(x + cell, y + cell); }
        if (!is(query, key - 1)) { context.moveTo(x, y); context.lineTo(x, y + cell); }
        if (!is(query, key + 1)) { context.moveTo(x + cell, y); context.lineTo(x + cell, y + cell); }
      }
    }
    context.stroke();
  }

  strips(context) {
    const { size, cell, left } = this;
    const { values, kinds, shades } = this.overlay.kinds;
    for (let n = 0; n < size; n += 1) {
      const kind = kinds.indexOf(values[n]);
      if (kind >= 0 || (shades && shades[n] !== null)) {
        context.fillStyle = shades ? css(shades[n]) : KINDS[kind % KINDS.length];
        context.fillRect(left - STRIP, left + n * cell, STRIP - 1, cell);
        context.fillRect(left + n * cell, left - STRIP, cell, STRIP - 1);
      }
    }
  }

  names(context) {
    const { size, cell, left, tokens } = this;
    context.fillStyle = getComputedStyle(this.figure).color;
    context.font = `${Math.min(12, cell)}px ui-monospace, monospace`;
    context.textBaseline = "middle";
    const short = (text) => (text.length > 12 ? `${text.slice(0, 11)}…` : text);
    for (let n = 0; n < size; n += 1) {
      const at = left + (n + 0.5) * cell;
      context.textAlign = "right";
      context.fillText(short(tokens[n]), left - STRIP - 2, at);
      context.save();
      context.translate(at, left - STRIP - 2);
      context.rotate(-Math.PI / 2);
      context.textAlign = "left";
      context.fillText(short(tokens[n]), 0, 0);
      context.restore();
    }
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - this.left, event.clientY - box.top - this.left];
    const [key, query] = [Math.floor(x / this.cell), Math.floor(y / this.cell)];
    const inside = key >= 0 && query >= 0 && key < this.size && query < this.size;
    this.move(inside ? { query, key } : null);
  }

  step(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!steps) {
      return;
    }
    event.preventDefault();
    const { query, key } = this.at ?? { query: 0, key: 0 };
    const limit = (value) => Math.min(this.size - 1, Math.max(0, value));
    this.move({ query: limit(query + steps[0]), key: limit(key + steps[1]) });
  }

  move(at) {
    this.at = at;
    this.draw();
    if (!at) {
      this.read("");
      return;
    }
    const value = share(this.map[at.query * this.size + at.key]);
    const kinds = this.overlay.kinds;
    const about = (n) => (kinds && kinds.values[n] !== "" && kinds.values[n] !== null ? ` [${kinds.values[n]}]` : "");
    this.read(`${at.query} “${this.tokens[at.query]}”${about(at.query)} looks at ${at.key} “${this.tokens[at.key]}”${about(at.key)}: ${percent(value)}`);
  }
}
