// A drawing as SVG: it takes the calls of a canvas that this page makes, so that a figure is what the screen shows.

const FORBIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g; // characters that XML does not allow

export function xml(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  return text.replace(FORBIDDEN, "\ufffd").replace(/[&<>"]/g, (letter) => names[letter]);
}

const short = (number) => String(Math.round(number * 100) / 100);

export class Vector {
  constructor() {
    this.parts = [];
    this.open = []; // of each save, how many groups were opened since
    this.path = "";
  }

  save() { this.open.push(0); }

  restore() { this.parts.push("</g>".repeat(this.open.pop())); }

  group(transform) {
    this.parts.push(`<g transform="${transform}">`);
    this.open[this.open.length - 1] += 1;
  }

  translate(x, y) { this.group(`translate(${short(x)} ${short(y)})`); }

  rotate(angle) { this.group(`rotate(${short((180 * angle) / Math.PI)})`); }

  // A figure is whole, so nothing is clipped.
  rect() {}

  clip() { this.path = ""; }

  beginPath() { this.path = ""; }

  moveTo(x, y) { this.path += `M${short(x)} ${short(y)}`; }

  lineTo(x, y) { this.path += `L${short(x)} ${short(y)}`; }

  stroke() {
    this.parts.push(`<path d="${this.path}" fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}"/>`);
  }

  fillRect(x, y, width, height) {
    this.parts.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" fill="${this.fillStyle}" shape-rendering="crispEdges"/>`);
  }

  strokeRect(x, y, width, height) {
    this.parts.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}"/>`);
  }

  fillText(text, x, y) {
    const [size, ...family] = this.font.split(" ");
    const anchor = { right: "end", center: "middle" }[this.textAlign] ?? "start";
    this.parts.push(`<text x="${short(x)}" y="${short(y)}" dy=".35em" font-size="${parseFloat(size)}" font-family="${xml(family.join(" "))}" text-anchor="${anchor}" fill="${this.fillStyle}" xml:space="preserve">${xml(text)}</text>`);
  }

  // Markup that was made by this page, as it is.
  raw(markup) { this.parts.push(markup.replace(FORBIDDEN, "\ufffd")); }

  // Square cells, level by level: levels(row, column) gives a place in the palette; neighbours of one level are one rectangle.  The
  // most frequent level lies below all others, so that no white shines through where a viewer smooths the edges of cells.  A cell
  // has the size 1 in a group that is scaled, which makes paths short.
  cells(levels, size, palette, x, y, cell) {
    const [paths, areas] = [new Map(), new Map()];
    for (let row = 0; row < size; row += 1) {
      for (let start = 0; start < size;) {
        const level = levels(row, start);
        let end = start + 1;
        while (end < size && levels(row, end) === level) { end += 1; }
        const run = `M${start} ${row}h${end - start}v1h${start - end}z`;
        paths.set(level, (paths.get(level) ?? "") + run);
        areas.set(level, (areas.get(level) ?? 0) + end - start);
        start = end;
      }
    }
    const [most] = [...areas].sort((one, other) => other[1] - one[1])[0] ?? [];
    const colour = (level) => `rgb(${palette.rgb[level].join(",")})`;
    this.parts.push(`<g transform="translate(${short(x)} ${short(y)}) scale(${cell})" shape-rendering="crispEdges">`);
    if (most !== undefined) {
      paths.delete(most);
      Object.assign(this, { fillStyle: colour(most) });
      this.fillRect(0, 0, size, size);
    }
    for (const [level, path] of paths) {
      this.parts.push(`<path d="${path}" fill="${colour(level)}"/>`);
    }
    this.parts.push("</g>");
  }

  // The drawing as a file.  head: markup before it.
  document(width, height, head = "", colour = "#000000") {
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" color="${colour}">
${[head, ...this.parts].join("\n")}
</svg>
`;
  }
}

// The address of an image.
export function addressOf(svg) {
  return `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
}
