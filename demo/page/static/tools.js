// Drawing on an X-ray with the mouse, a finger or the arrow keys: the box to search by, and the ruler.
const tools = {
  region: {
    step: 0.02,
    words: "Click or drag on the X-ray, or move this box with the arrow keys and press Enter.",
    of: () => box,
    show: (_, [x0, y0, x1, y1]) => showRegion([Math.min(x0, x1), Math.min(y0, y1), Math.max(x0, x1), Math.max(y0, y1)]),
    drawn: () => searchRegion(),
    drop: () => showRegion(value.region ?? null),
  },
  measure: {
    step: 0.005,
    words: "Drag a line, or move this one with the arrow keys and its end with Shift. Enter keeps it, Esc removes it.",
    of: (pane) => pane.line,
    show: (pane, line) => {
      pane.measure(line);
      const unknown = pane.data.mm ? "" : " The file does not give the size of a pixel.";
      find(".note").textContent = `${pane.length.textContent}.${unknown} ${tools.measure.words}`;
    },
    drop: (pane) => pane.measure(null),
  },
};

// The box that is being drawn, or was searched.
let box = null;
let shownBox = null;
function showRegion(now) {
  box = now && grown(now);
  shownBox?.remove();
  shownBox = box && outline(state.panes[0].boxes, box, "region");
}
// Enlarge a box to the minimum for a search (half a cell, with a margin), inside the part that the model sees.
function grown(drawn) {
  const {seen} = state.panes[0].data;
  const ends = [0, 1].map((axis) => {
    const half = 0.375 * (seen[axis + 2] - seen[axis]) / value.grid[axis];
    const middle = clamp((drawn[axis] + drawn[axis + 2]) / 2, seen[axis] + half, seen[axis + 2] - half);
    return [Math.min(drawn[axis], middle - half), Math.max(drawn[axis + 2], middle + half)];
  });
  return [0, 1].flatMap((end) => [ends[0][end], ends[1][end]]);
}
function searchRegion() {
  leave();
  trigger("region", {box});
}

function take(name, pane, shape) {
  if (state.tool) tools[state.tool].drop(pane);
  state.tool = name;
  find(".note").textContent = tools[name].words;
  tools[name].show(pane, shape);
  pane.film.focus();
}

function leave() {
  state.tool = "";
  find(".note").textContent = "";
  drawAll();
}

// Handle a key of the active tool; `step` is the direction of an arrow key. Returns whether it was handled.
function drawByKey(pane, key, step, shift) {
  const tool = tools[state.tool];
  if (key === "Enter") {
    if (state.tool === "region") searchRegion();
    else leave();
  } else if (key === "Escape") {
    tool.drop(pane);
    leave();
  } else if (step) {
    const shape = tool.of(pane) ?? [0.35, 0.5, 0.65, 0.5];
    const moved = shape.map((at, i) => at + (i < 2 && shift ? 0 : tool.step / pane.view.zoom * step[i % 2]));
    if (moved.every((at) => at >= 0 && at <= 1)) tool.show(pane, moved);
  } else return false;
  return true;
}
