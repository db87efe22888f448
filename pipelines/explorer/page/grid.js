// The grid of all heads of a model: a button with a picture for each.

import { PIXELS, css } from "./colours.js";

const TILE = 32;
const SPARK = 12;

export function nameOf(head) {
  return `${head.layer}-${head.head}${head.kind === "self" ? "" : ` (${head.kind})`}`;
}

export class Grid {
  // choose(head, step): called when a person chooses a head, by a step that the button "back" takes back; mark(head): when they press Enter on it.
  constructor(element, name, choose, mark) {
    this.element = element;
    this.name = name;
    this.choose = choose;
    this.mark = mark;
    this.cells = [];
    element.addEventListener("keydown", (event) => this.move(event));
  }

  // heads: as the server gives them, in the order of the tiles.
  fill(heads) {
    if (this.cells.length === heads.length) {
      this.cells.forEach((cell, n) => { cell.head = heads[n]; });
      return;
    }
    this.cells = [];
    this.element.replaceChildren();
    const width = Math.max(...heads.map((head) => head.head)) + 1;
    this.width = width;
    const room = this.element.parentElement.clientWidth - 26 - 3 * width;
    const size = Math.max(18, Math.min(58, Math.floor(room / width)));
    this.element.style.gridTemplateColumns = `1.4rem repeat(${width}, ${size}px)`;
    this.element.style.setProperty("--edge", size < 30 ? "2px" : "4px");
    let row = null;
    heads.forEach((head, n) => {
      const start = `${head.kind} ${head.layer}`;
      if (start !== row) {
        row = start;
        const axis = document.createElement("span");
        axis.className = "axis";
        axis.textContent = head.kind === "self" ? String(head.layer) : `${head.kind} ${head.layer}`;
        axis.style.gridColumn = "1";
        this.element.append(axis);
      }
      const button = document.createElement("button");
      button.type = "button";
      button.className = "cell";
      button.tabIndex = n === 0 ? 0 : -1;
      button.style.gridColumn = String(head.head + 2);
      const canvas = document.createElement("canvas");
      canvas.width = TILE;
      canvas.height = TILE + SPARK;
      const sign = document.createElement("span");
      sign.className = "sign";
      button.append(canvas, sign);
      button.addEventListener("click", () => this.choose(this.cells[n].head));
      button.addEventListener("keydown", (event) => {
        if (event.key === "Enter") {
          event.preventDefault();
          this.mark(this.cells[n].head);
        }
      });
      this.element.append(button);
      this.cells.push({ head, button, canvas, sign });
    });
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
      this.choose(wanted.head, false);
    }
  }

  // tiles: the small pictures of all heads, one after the other.
  draw(tiles) {
    this.cells.forEach(({ canvas, head }, n) => {
      const context = canvas.getContext("2d");
      context.clearRect(0, 0, canvas.width, canvas.height);
      if (tiles) {
        const image = new ImageData(TILE, TILE);
        const pixels = new Uint32Array(image.data.buffer);
        for (let place = 0; place < TILE * TILE; place += 1) {
          pixels[place] = PIXELS[tiles[n * TILE * TILE + place]];
        }
        context.putImageData(image, 0, 0);
      }
      const most = Math.max(...head.offsets, 1e-9);
      const width = TILE / head.offsets.length;
      context.fillStyle = getComputedStyle(this.element).getPropertyValue("--ink");
      head.offsets.forEach((value, place) => {
        const height = Math.max(0.5, (SPARK - 2) * (value / most));
        context.fillRect(place * width, TILE + SPARK - height, Math.max(0.6, width - 0.2), height);
      });
    });
  }

  // colour(head): a number from 0 to 1 or null; sign(head): the text in its corner; note(head): what a reader hears.
  paint(colour, sign, note) {
    for (const { head, button, sign: corner } of this.cells) {
      const value = colour(head);
      button.style.borderColor = value === null ? "transparent" : css(value);
      corner.textContent = sign(head);
      const about = note(head);
      button.setAttribute("aria-label", `${this.name}layer ${head.layer} head ${head.head}${head.kind === "self" ? "" : ` ${head.kind}`}${about}`);
      button.title = `${nameOf(head)}${about}`;
    }
  }

  press(chosen) {
    for (const { head, button } of this.cells) {
      const is = chosen && head.layer === chosen.layer && head.head === chosen.head && head.kind === chosen.kind;
      button.setAttribute("aria-pressed", String(Boolean(is)));
      if (is) {
        this.cells.forEach((cell) => { cell.button.tabIndex = -1; });
        button.tabIndex = 0;
      }
    }
  }
}
