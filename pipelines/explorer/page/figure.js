// Figures as files: SVG and PNG that need nothing else, and PDF by the printer of the browser.  They are for white paper.

import { drawBar } from "./colours.js";
import { $, element } from "./dom.js";
import { Vector, addressOf, xml } from "./vector.js";

const INK = "#1d2129";
const MARGIN = 14;
const TITLE = 22;
const CAPTION = 15; // pixels of a line below the figure
const WIDEST_FIGURE = 1500; // pixels of panels side by side
const PNG_SCALE = 3;
const PNG_MOST = 12000; // pixels of a side

// A figure of panels, side by side as long as they fit, each {title, width, height, draw(pen, ink), scale: of its colour bar, or null}.
export function compose(panels, caption) {
  const pen = new Vector();
  const label = (text, x, y, size = 12) => {
    Object.assign(pen, { font: `${size}px system-ui, sans-serif`, textAlign: "left", textBaseline: "middle", fillStyle: INK });
    pen.fillText(text, x, y);
  };
  let [left, top, down, whole] = [MARGIN, MARGIN, MARGIN, 420];
  for (const { title, width, height, draw, scale } of panels) {
    const room = Math.max(width, scale ? 250 : 0);
    if (left > MARGIN && left + room > WIDEST_FIGURE) {
      [left, top] = [MARGIN, down];
    }
    label([title, scale && "query ↓  key →"].filter(Boolean).join("   "), left, top + 6, 13);
    pen.save();
    pen.translate(left, top + TITLE);
    draw(pen, INK);
    pen.restore();
    const below = top + TITLE + height + 12;
    if (scale) {
      const bar = drawBar(pen, scale, left + 10, below, INK);
      label(scale.isSigned ? "points" : "%", left + bar.width + 30, below + bar.height - 8, 11);
    }
    down = Math.max(down, below + (scale ? 42 : 8));
    left += room + 2 * MARGIN;
    whole = Math.max(whole, left - MARGIN);
  }
  for (const line of wrapped(caption, Math.floor((whole - 2 * MARGIN) / 6.1))) {
    label(line, MARGIN, down, 11.5);
    down += CAPTION;
  }
  const size = { width: Math.ceil(whole), height: Math.ceil(down + 4) };
  const head = `<title>${xml(caption)}</title>\n<rect width="100%" height="100%" fill="#ffffff"/>`;
  return { text: pen.document(size.width, size.height, head, INK), ...size };
}

function wrapped(text, most) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= most) {
      lines.push("");
    }
    lines[lines.length - 1] += (lines.at(-1) && " ") + word;
  }
  return lines;
}

export function saveSvg(figure, name) {
  download(new Blob([figure.text], { type: "image/svg+xml" }), `${name}.svg`);
}

export async function savePng(figure, name) {
  const image = element("img");
  image.src = addressOf(figure.text);
  await image.decode();
  const scale = Math.min(PNG_SCALE, PNG_MOST / Math.max(figure.width, figure.height));
  const canvas = element("canvas");
  canvas.width = Math.round(figure.width * scale);
  canvas.height = Math.round(figure.height * scale);
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  download(await new Promise((done) => canvas.toBlob(done, "image/png")), `${name}.png`);
}

// Let what is printed be one figure alone, on a page of its size.
export async function preparePrint(figure) {
  const image = $("print");
  image.src = addressOf(figure.text);
  await image.decode();
  const sheet = document.styleSheets[0];
  for (const [n, rule] of [...sheet.cssRules].entries()) {
    if (rule.cssText.startsWith("@page")) {
      sheet.deleteRule(n);
    }
  }
  sheet.insertRule(`@page { size: ${figure.width}px ${figure.height + 4}px; margin: 0 }`, sheet.cssRules.length);
}

function download(blob, name) {
  const link = element("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
