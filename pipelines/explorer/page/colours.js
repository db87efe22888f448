// The colours of maps and measures: viridis, which people with any colour vision can order, and Okabe and Ito's for kinds.

const ANCHORS = [
  [68, 1, 84], [72, 35, 116], [64, 67, 135], [52, 94, 141], [41, 120, 142], [32, 144, 140], [34, 167, 132], [68, 190, 112],
  [121, 209, 81], [189, 222, 38], [253, 231, 36],
];

export const KINDS = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"];

// The colour of a number from 0 to 1, as [red, green, blue].
export function viridis(value) {
  const place = Math.min(1, Math.max(0, value)) * (ANCHORS.length - 1);
  const low = Math.min(ANCHORS.length - 2, Math.floor(place));
  return ANCHORS[low].map((from, part) => Math.round(from + (place - low) * (ANCHORS[low + 1][part] - from)));
}

export function css(value) {
  return `rgb(${viridis(value).join(",")})`;
}

// The colours of the 256 bytes of a map, as 32-bit pixels; a byte is 255 times the square root of the attention.
export const PIXELS = (() => {
  const bytes = new Uint8ClampedArray(256 * 4);
  for (let n = 0; n < 256; n += 1) {
    bytes.set([...viridis(n / 255), 255], 4 * n);
  }
  return new Uint32Array(bytes.buffer);
})();

// The attention behind a byte of a map.
export function share(byte) {
  return (byte / 255) ** 2;
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}
