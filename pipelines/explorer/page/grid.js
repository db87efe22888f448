// The grid of all heads of a model: a button with a picture for each.

import { css } from "./colours.js";
import { element } from "./dom.js";
import { isSame } from "./page.js";

const AXIS = 26;
const GAP = 3;
const BETWEEN = 10; // pixels between pictures on a figure
const SMALLEST_TILE = 18;
const SMALLEST_LARGE = 40; // where all heads fill the window
const LARGEST_TILE = 96;
const SPARK_SHARE = 0.34; // of the height of a picture, for the attention by distance below it

export function nameOf(head) {
  return `${head.layer}-${head.head}${head.kind === "self" ? "" : ` (${head.kind})`}`;
}

export class Grid {
  // choose(head, how): called when a person chooses a head; how.step: whether the button "back" takes it back; how.adds: whether
  // it is added to those that are shown.  mark(head): called when they press Enter on it.  open(head): on a double click.
  constructor(group, name, { choose, mark, open }) {
    Object.assign(this, { element: group, name, choose, mark, open });
    this.cells = [];
    this.isSigned = false;
    group.addEventListener("keydown", (event) => this.move(event));
  }

  // heads: as the server gives them, in the order of the tiles.
  fill(heads) {
    if (this.cells.length === heads.length) {
      this.cells.forEach((cell, n) => { cell.head = heads[n]; });
      return;
    }
    this.cells = [];
    this.element.replaceChildren();
    this.width = Math.max(...heads.map((head) => head.head)) + 1;
    const axis = (text, column) => {
      const label = element("span", text);
      label.className = "axis";
      label.style.gridColumn = String(column);
      label.setAttribute("aria-hidden", "true"); // every button says its place
      this.element.append(label);
    };
    for (let number = 0; number < this.width; number += 1) {
      axis(String(number), number + 2);
    }
    let row = null;
    heads.forEach((head, n) => {
      const start = head.kind === "self" ? String(head.layer) : `${head.kind} ${head.layer}`;
      if (start !== row) {
        row = start;
        axis(start, 1);
      }
      const button = element("button");
      button.type = "button";
      button.className = "cell";
      button.tabIndex = n === 0 ? 0 : -1;
      button.style.gridColumn = String(head.head + 2);
      const canvas = element("canvas");
      const sign = element("span");
      sign.className = "sign";
      button.append(canvas, sign);
      button.addEventListener("click", (event) => this.choose(this.cells[n].head, { step: true, adds: event.shiftKey }));
      button.addEventListener("dblclick", () => this.open(this.cells[n].head));
      button.addEventListener("keydown", (event) => {
        if (event.key === "Enter") {
          event.preventDefault();
          if (event.shiftKey) {
            this.choose(this.cells[n].head, { step: true, adds: true });
          } else {
            this.mark(this.cells[n].head);
          }
        }
      });
      this.element.append(button);
      this.cells.push({ head, button, canvas, sign });
    });
    this.rows = new Set(heads.map((head) => `${head.kind} ${head.layer}`)).size;
  }

  // Arrow keys move between heads; a head that is moved to is shown.
  move(event) {
    const place = this.cells.findIndex((cell) => cell.button === document.activeElement);
    const { layer, head, kind } = this.cells[place]?.head ?? {};
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (place < 0 || !steps) {
      return;
    }
    event.preventDefault();
    const wanted = this.cells.find((cell) => cell.head.kind === kind && cell.head.layer === layer + steps[0]
      && cell.head.head === head + steps[1]);
    if (wanted) {
      wanted.button.focus();
      this.choose(wanted.head, { step: false, adds: false });
    }
  }

  // Make the pictures as large as there is room: width and height in pixels; a height only where all heads are to be seen at once.
  fit(width, height) {
    if (!this.cells.length) {
      return;
    }
    const across = (width - AXIS) / this.width - GAP;
    const down = height ? (height / (this.rows + 0.2) - GAP - 4) / (1 + SPARK_SHARE) : LARGEST_TILE;
    const smallest = height ? SMALLEST_LARGE : SMALLEST_TILE; // wider than the window, the grid scrolls
    const size = Math.max(smallest, Math.floor(Math.min(across, Math.max(down, smallest))));
    if (size === this.size) {
      return;
    }
    this.size = size;
    this.element.style.gridTemplateColumns = `${AXIS - GAP}px repeat(${this.width}, ${size}px)`;
    this.element.style.setProperty("--edge", `${edgeOf(size)}px`);
    if (this.tiles !== undefined) {
      this.draw(this.tiles, this.scale);
    }
  }

  // tiles: of each head a picture, as numbers row by row, all of one size; null where they are not known.
  draw(tiles, scale) {
    Object.assign(this, { tiles, scale });
    const ink = getComputedStyle(this.element).getPropertyValue("--ink");
    const dots = Math.max(1, window.devicePixelRatio || 1);
    for (const [n, { canvas }] of this.cells.entries()) {
      const side = Math.max(8, this.size - 2 * edgeOf(this.size) - 2);
      canvas.width = Math.round(side * dots);
      canvas.height = Math.round(side * (1 + SPARK_SHARE) * dots);
      const context = canvas.getContext("2d");
      context.setTransform(dots, 0, 0, dots, 0, 0);
      this.picture(context, n, 0, 0, side, ink);
    }
  }

  // One picture, with the attention by distance below it, from 16 tokens before to 16 after.
  picture(pen, n, x, y, side, ink) {
    const { head } = this.cells[n];
    const tile = this.tiles?.[n];
    if (tile) {
      const whole = Math.round(Math.sqrt(tile.length));
      const dots = pen.canvas ? Math.max(1, window.devicePixelRatio || 1) : 1;
      const [shown, size] = smaller(tile, whole, Math.floor(pen.canvas ? side * dots : 32));
      const levels = shown.map(this.scale.level);
      if (pen.canvas) {
        pen.imageSmoothingEnabled = false;
        pen.drawImage(imageOf(levels, size, this.scale.palette), x, y, side, side);
      } else {
        pen.cells((row, column) => levels[row * size + column], size, this.scale.palette, x, y, side / size);
      }
    }
    const most = Math.max(...head.offsets.map(Math.abs), 1e-9);
    const [width, height] = [side / head.offsets.length, side * SPARK_SHARE - 2];
    pen.fillStyle = ink;
    const base = y + side * (1 + SPARK_SHARE);
    head.offsets.forEach((value, place) => {
      if (this.isSigned) {
        const tall = (height / 2) * (Math.abs(value) / most);
        pen.fillRect(x + place * width, value > 0 ? base - height / 2 - tall : base - height / 2, Math.max(0.6, width - 0.2), Math.max(0.4, tall));
      } else {
        const tall = Math.max(0.5, height * (value / most));
        pen.fillRect(x + place * width, base - tall, Math.max(0.6, width - 0.2), tall);
      }
    });
  }

  // The size of the grid on a figure with pictures of some width.
  figureSize(side) {
    return { width: AXIS + this.width * (side + BETWEEN), height: 18 + this.rows * (side * (1 + SPARK_SHARE) + BETWEEN) };
  }

  // Draws the whole grid on a figure.  side: the width of each picture.
  figure(pen, side, ink) {
    const step = side + BETWEEN;
    const tall = side * (1 + SPARK_SHARE) + BETWEEN;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const write = (text, align, at, down) => { pen.fillStyle = ink; pen.textAlign = align; pen.fillText(text, at, down); };
    for (let number = 0; number < this.width; number += 1) {
      write(String(number), "center", AXIS + number * step + side / 2, 6);
    }
    let [row, down] = [null, 18 - tall];
    for (const [n, { head, value, sign }] of this.cells.entries()) {
      const start = head.kind === "self" ? String(head.layer) : `${head.kind} ${head.layer}`;
      if (start !== row) {
        row = start;
        down += tall;
        write(start, "right", AXIS - 8, down + side / 2);
      }
      const left = AXIS + head.head * step;
      this.picture(pen, n, left, down, side, ink);
      if (value !== null && value !== undefined) {
        pen.strokeStyle = css(value, this.isSigned);
        pen.lineWidth = 2.5;
        pen.strokeRect(left - 2, down - 2, side + 4, side * (1 + SPARK_SHARE) + 4);
      }
      for (const [n, letter] of [...sign.textContent].reverse().entries()) {
        const [x, y] = [left + side - 6 - 11 * n, down + 6];
        pen.fillStyle = "#ffffff";
        pen.fillRect(x - 5, y - 5, 10, 10);
        write(letter, "center", x, y);
      }
    }
  }

  // colour(head): a number from 0 to 1, for changes from -1, or null; sign(head): the text in its corner; note(head): what a
  // reader hears.
  paint(colour, sign, note) {
    for (const cell of this.cells) {
      const { head, button, sign: corner } = cell;
      cell.value = colour(head);
      button.style.borderColor = cell.value === null ? "transparent" : css(cell.value, this.isSigned);
      corner.textContent = sign(head);
      const about = note(head);
      button.setAttribute("aria-label", `${this.name}layer ${head.layer} head ${head.head}${head.kind === "self" ? "" : ` ${head.kind}`}${about}`);
      button.title = `${nameOf(head)}${about}`;
    }
  }

  // chosen: the head that is shown, {layer, head, kind}; more: the names of further heads that are shown.
  press(chosen, more) {
    for (const { head, button } of this.cells) {
      const is = isSame(head, chosen);
      button.setAttribute("aria-pressed", String(is));
      button.classList.toggle("added", more.includes(nameOf(head)));
      if (is) {
        this.cells.forEach((cell) => { cell.button.tabIndex = -1; });
        button.tabIndex = 0;
      }
    }
  }
}

// The width of the frame of a picture, in pixels.
function edgeOf(size) {
  return size < 40 ? 2 : size < 64 ? 3 : 4;
}

// A square picture of at most so many rows and columns: of the numbers that fall together the one farthest from zero is kept.
function smaller(tile, whole, most) {
  if (whole <= most) {
    return [tile, whole];
  }
  const kept = new Float32Array(most * most);
  for (let row = 0; row < whole; row += 1) {
    for (let column = 0; column < whole; column += 1) {
      const place = Math.floor((row * most) / whole) * most + Math.floor((column * most) / whole);
      const value = tile[row * whole + column];
      if (Math.abs(value) > Math.abs(kept[place])) {
        kept[place] = value;
      }
    }
  }
  return [kept, most];
}

// Levels of a palette, row by row, as a picture of one pixel each.
export function imageOf(levels, size, palette) {
  const image = new ImageData(size, size);
  const pixels = new Uint32Array(image.data.buffer);
  for (let n = 0; n < size * size; n += 1) {
    pixels[n] = palette.pixels[levels[n]];
  }
  const canvas = element("canvas");
  canvas.width = size;
  canvas.height = size;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
