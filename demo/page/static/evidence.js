// Evidence maps on a canvas. The same rule as runtime/evidence.py, which draws them for the report: what counts is how far
// a cell's share lies from an even one, as a part of the greatest such difference.
const [MORE, LESS] = ["255, 140, 0", "45, 125, 255"];
const FLAT = 0.2; // differences below this part of an even share stay pale: a map that is flat should look flat
const SIDE = 512; // pixels across an evidence canvas
const LEVELS = [0.35, 0.7]; // of the greatest difference from an even share, at which contours are drawn
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// Evidence: contours of what exceeds an even share, on request the cells themselves. Whether there is something to see.
function drawEvidence(canvas, cells, asCells) {
  const context = canvas.getContext("2d");
  canvas.width = canvas.height = 1;
  if (!cells) return false;
  const [h, w] = [cells.length, cells[0].length];
  const values = cells.flat();
  const even = values.reduce((sum, value) => sum + value, 0) / values.length;
  const greatest = Math.max(...values.map((value) => Math.abs(value - even)), FLAT * Math.abs(even)) || 1;
  const share = (row, column) => (values[clamp(row, 0, h - 1) * w + clamp(column, 0, w - 1)] - even) / greatest;
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
  const fine = 6; // points for each cell; beyond the last ones nothing speaks for it, so that contours are closed
  const rows = Array.from({length: h}, (_, i) => smooth(Array.from({length: w}, (_, j) => share(i, j)), fine));
  const columns = rows[0].map((_, j) => smooth(rows.map((row) => row[j]), fine));
  const grid = columns[0].map((_, i) => columns.map((column) => column[i]));
  for (const row of grid) row[0] = row[row.length - 1] = -1;
  for (const row of [grid[0], grid.at(-1)]) row.fill(-1);
  const unit = cell / fine;
  let seen = false;
  for (const level of LEVELS) {
    const path = new Path2D();
    for (let i = 0; i < h * fine; i++) for (let j = 0; j < w * fine; j++) {
      seen = contour(path, grid, i, j, level, unit) || seen;
    }
    for (const [colour, width] of [["rgba(0, 0, 0, 0.55)", 4.5], [`rgba(${MORE}, ${level < 0.5 ? 0.75 : 1})`, 2]]) {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.stroke(path);
    }
  }
  return seen;
}

// Catmull-Rom: `fine` points for each value, and one at the end; a value stands in the middle of its points.
function smooth(values, fine) {
  const at = (i) => values[clamp(i, 0, values.length - 1)];
  return Array.from({length: values.length * fine + 1}, (_, k) => {
    const place = k / fine - 0.5;
    const i = Math.floor(place);
    const t = place - i;
    const [a, b, c, d] = [at(i - 1), at(i), at(i + 1), at(i + 2)];
    return b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)));
  });
}

// The pieces of a contour that cross one square of the grid; whether there are any.
function contour(path, grid, i, j, level, unit) {
  const corners = [[i, j], [i, j + 1], [i + 1, j + 1], [i + 1, j]];
  const points = [];
  corners.forEach(([row, column], k) => {
    const [down, across] = corners[(k + 1) % 4];
    const [one, other] = [grid[row][column] - level, grid[down][across] - level];
    if ((one > 0) === (other > 0)) return;
    const part = one / (one - other);
    points.push([(column + (across - column) * part) * unit, (row + (down - row) * part) * unit]);
  });
  for (let k = 0; k + 1 < points.length; k += 2) {
    path.moveTo(...points[k]);
    path.lineTo(...points[k + 1]);
  }
  return points.length > 0;
}
