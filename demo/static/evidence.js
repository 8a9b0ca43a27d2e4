// Evidence maps on a canvas: orange gives more than an even share of the sum, blue less; + and - say the same
// without colour. The same rule as runtime/evidence.py, which draws them for the report: shares are spread bilinearly and
// coloured afterwards, so that where the evidence is even the image is untouched.

const MORE = [255, 140, 0];
const LESS = [45, 125, 255];
const FLAT = 0.2; // differences below this part of an even share stay pale: a map that is flat should look flat
const SIDE = 512; // canvas pixels across, whatever the number of cells
const SIGN = 20; // their height
const TOLD = 0.5; // cells from this share of the greatest difference on bear a sign

/** Draw `cells` (rows of numbers), or nothing where it is null. Opacity is the canvas's own, by CSS. */
export function drawEvidence(canvas, cells) {
  const context = canvas.getContext("2d");
  if (!cells) {
    canvas.width = canvas.height = 1;
    return;
  }
  const [h, w] = [cells.length, cells[0].length];
  const shares = relative(cells.flat());
  const cell = SIDE / w;
  [canvas.width, canvas.height] = [SIDE, Math.round(cell * h)];
  const picture = context.createImageData(canvas.width, canvas.height);
  const across = steps(w, canvas.width);
  steps(h, canvas.height).forEach(([top, bottom, down], y) => across.forEach(([left, right, on], x) => {
    const upper = mix(shares[top * w + left], shares[top * w + right], on);
    const lower = mix(shares[bottom * w + left], shares[bottom * w + right], on);
    const share = mix(upper, lower, down);
    picture.data.set([...(share > 0 ? MORE : LESS), Math.round(255 * Math.abs(share))], 4 * (y * canvas.width + x));
  }));
  context.putImageData(picture, 0, 0);
  context.font = `600 ${SIGN}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  shares.forEach((share, at) => {
    if (Math.abs(share) < TOLD) return;
    const [x, y] = [((at % w) + 0.5) * cell, (Math.floor(at / w) + 0.5) * cell];
    context.fillStyle = "#fff";
    context.strokeStyle = "#000";
    context.lineWidth = 3;
    context.strokeText(share > 0 ? "+" : "−", x, y);
    context.fillText(share > 0 ? "+" : "−", x, y);
  });
}

/** For each of `pixels` along a side of `count` cells: the two cells whose middles it lies between, and how far on. */
function steps(count, pixels) {
  return Array.from({length: pixels}, (_, at) => {
    const place = Math.min(count - 1, Math.max(0, ((at + 0.5) / pixels) * count - 0.5));
    const first = Math.min(count - 1, Math.floor(place));
    return [first, Math.min(count - 1, first + 1), place - first];
  });
}

const mix = (one, other, part) => one + (other - one) * part;

/** Each cell's difference from the mean cell, as a share of the greatest. */
function relative(values) {
  const even = values.reduce((sum, value) => sum + value, 0) / values.length;
  const greatest = Math.max(...values.map((value) => Math.abs(value - even)), FLAT * Math.abs(even));
  return values.map((value) => (greatest > 0 ? (value - even) / greatest : 0));
}
