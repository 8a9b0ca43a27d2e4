// Draws evidence maps on a canvas by the same rule as runtime/evidence.py: a cell's strength is its difference from an
// even share, relative to the greatest such difference.
const [MORE, LESS] = ["255, 140, 0", "45, 125, 255"];
const FLAT = 0.2; // differences below this part of an even share stay pale, so that a flat map looks flat
const SIDE = 512; // pixels across an evidence canvas
const LEVELS = [0.35, 0.7]; // strengths at which contours are drawn
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// Draw contours of the positive evidence, or the cells themselves. Returns whether anything is visible.
function drawEvidence(canvas, cells, asCells) {
  const context = canvas.getContext("2d");
  canvas.width = canvas.height = 1;
  if (!cells) return false;
  const [h, w] = [cells.length, cells[0].length];
  const values = cells.flat();
  const even = values.reduce((sum, value) => sum + value, 0) / values.length;
  const greatest = Math.max(...values.map((value) => Math.abs(value - even)), FLAT * Math.abs(even)) || 1;
  const share = (row, column) => (cells[row][column] - even) / greatest;
  const cell = SIDE / w;
  [canvas.width, canvas.height] = [SIDE, Math.round(cell * h)];
  if (asCells) {
    for (let row = 0; row < h; row++) for (let column = 0; column < w; column++) {
      const strength = share(row, column);
      context.fillStyle = `rgba(${strength > 0 ? MORE : LESS}, ${(0.5 * Math.abs(strength)).toFixed(3)})`;
      context.fillRect(column * cell, row * cell, cell, cell);
      context.strokeStyle = "rgba(255, 255, 255, 0.25)";
      context.strokeRect(column * cell, row * cell, cell, cell);
    }
    return true;
  }
  // The browser interpolates between the centres of cells, in 8 bits. A border without evidence closes the contours.
  const small = make("canvas", {width: w + 2, height: h + 2}).getContext("2d");
  for (let row = 0; row < h; row++) for (let column = 0; column < w; column++) {
    if (!(cells[row][column] > 0)) continue; // negative evidence, even if it is above average
    small.fillStyle = `rgb(0, 0, 0, ${clamp(share(row, column), 0, 1)})`;
    small.fillRect(column + 1, row + 1, 1, 1);
  }
  const [across, down] = [canvas.width, canvas.height];
  context.imageSmoothingQuality = "high";
  context.drawImage(small.canvas, -cell, -cell, across + 2 * cell, down + 2 * cell);
  const strength = context.getImageData(0, 0, across, down).data.filter((_, i) => i % 4 === 3);
  context.clearRect(0, 0, across, down);
  let seen = false;
  for (const level of LEVELS) {
    const above = (i) => strength[i] > 255 * level;
    const edge = [...strength.keys()].filter((i) => above(i) && [i - 1, i + 1, i - across, i + across].some((j) => !above(j)));
    for (const [colour, width] of [["rgba(0, 0, 0, 0.55)", 4.5], [`rgba(${MORE}, ${level < 0.5 ? 0.75 : 1})`, 2]]) {
      context.fillStyle = colour;
      for (const i of edge) context.fillRect(i % across - width / 2, Math.floor(i / across) - width / 2, width, width);
    }
    seen ||= edge.length > 0;
  }
  return seen;
}
