// The colours of attention, of its differences and of kinds, and the scales from numbers to colours.

// viridis, which people with any colour vision can order, also in grey
const ONE_SIDED = [
  [68, 1, 84], [72, 35, 116], [64, 67, 135], [52, 94, 141], [41, 120, 142], [32, 144, 140], [34, 167, 132], [68, 190, 112],
  [121, 209, 81], [189, 222, 38], [253, 231, 36],
];

// from purple, less, over white to orange, more: ColorBrewer's PuOr
const TWO_SIDED = [
  [45, 0, 75], [84, 39, 136], [128, 115, 172], [178, 171, 210], [216, 218, 235], [247, 247, 247], [254, 224, 182], [253, 184, 99],
  [224, 130, 20], [179, 88, 6], [127, 59, 8],
];

// of Okabe and Ito
export const KINDS = ["#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442", "#999999"];

// The 256 levels of a palette: as [red, green, blue], and as 32-bit pixels.
function paletteOf(anchors) {
  const rgb = Array.from({ length: 256 }, (_, n) => {
    const place = (n / 255) * (anchors.length - 1);
    const low = Math.min(anchors.length - 2, Math.floor(place));
    return anchors[low].map((from, part) => Math.round(from + (place - low) * (anchors[low + 1][part] - from)));
  });
  const pixels = new Uint32Array(Uint8ClampedArray.from(rgb.flatMap((colour) => [...colour, 255])).buffer);
  return { rgb, pixels };
}

const VIRIDIS = paletteOf(ONE_SIDED);
const PURPLE_ORANGE = paletteOf(TWO_SIDED);

// A scale of colours: "root", "linear", or "largest", which is linear up to the largest number shown.  A signed one is for
// differences, from -1 to 1.  level(value): from 0 to 255; place(value): from 0 to 1 on the colour bar; ticks: numbers on the bar.
export function scaleOf(name, { isSigned = false, largest = 1 } = {}) {
  const most = name === "largest" ? Math.max(largest, 1e-6) : 1;
  const curve = name === "root" ? Math.sqrt : (value) => value;
  const place = (value) => {
    const part = curve(Math.min(1, Math.abs(value) / most));
    return isSigned ? (1 + Math.sign(value) * part) / 2 : part;
  };
  const shown = isSigned ? [name === "root" ? 0.25 : 0.5, 1] : { root: [0.05, 0.25, 0.5, 1], linear: [0.25, 0.5, 0.75, 1] }[name] ?? [0.5, 1];
  const ticks = [...(isSigned ? shown.map((part) => -part * most).reverse() : []), 0, ...shown.map((part) => part * most)];
  const words = name === "root" ? "square-root scale" : name === "linear" ? "linear scale" : "linear scale up to the largest value";
  const palette = isSigned ? PURPLE_ORANGE : VIRIDIS;
  return { place, level: (value) => Math.round(255 * place(value)), ticks, words, palette, isSigned };
}

// The colour of a number from 0 to 1, or of a change from -1 to 1.
export function css(value, isSigned = false) {
  const { palette, level } = scaleOf("linear", { isSigned });
  return `rgb(${palette.rgb[level(value)].join(",")})`;
}

const BAR = { width: 200, height: 10, letters: 11 };

// A colour bar with its numbers below; returns its width and height.
export function drawBar(pen, scale, x, y, ink) {
  for (let n = 0; n < 256; n += 1) {
    pen.fillStyle = `rgb(${scale.palette.rgb[n].join(",")})`;
    pen.fillRect(x + (n * BAR.width) / 256, y, BAR.width / 256 + 0.5, BAR.height);
  }
  pen.fillStyle = ink;
  pen.font = `${BAR.letters}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  for (const tick of scale.ticks) {
    const sign = scale.isSigned && tick > 0 ? "+" : "";
    const number = Number((100 * tick).toFixed(1));
    pen.fillText(`${sign}${number}`.replace("-", "−"), x + scale.place(tick) * BAR.width, y + BAR.height + 8);
  }
  return { width: BAR.width, height: BAR.height + 16 };
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

// A change of a share, in percentage points.
export function points(value) {
  return value === null || value === undefined ? "–" : `${value < 0 ? "−" : "+"}${(100 * Math.abs(value)).toFixed(1)} points`;
}
