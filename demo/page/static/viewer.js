// X-rays on black: zoom, window and level are CSS and an SVG filter, so that nothing waits for the server.
const SVG = "http://www.w3.org/2000/svg";
const MOST = 24; // times as large as fits

const state = {panes: [], finding: "", evidence: true, cells: false, region: false, linked: true, stack: false, boxes: false};
let filters = 0;

// One image with its own view and look; linked ones share both objects.
class Pane {
  constructor(data, at) {
    this.data = data;
    this.view = {zoom: 1, x: 0, y: 0}; // x and y: how far the middle is moved, in parts of the film's sides
    this.look = {width: 1, level: 0.5, inverted: false};
    this.image = make("img", {src: data.src, alt: data.name});
    this.canvas = make("canvas");
    this.boxes = make("div", {class: "boxes"});
    this.stage = make("div", {class: "stage"}, this.image, this.canvas, this.boxes);
    this.readout = make("span", {class: "readout"});
    this.film = make("div", {
      class: "film", tabindex: "0", role: "group", "aria-label": `${data.name}. Press ? for the keys.`,
    }, this.stage, make("span", {class: "name"}, data.name), this.readout);
    this.root = make("figure", {}, this.film, make("figcaption", {}, ...facts(data)));
    [this.stage.style.width, this.stage.style.height] = [`${data.width}px`, `${data.height}px`];
    const [x0, y0, x1, y1] = data.seen;
    place(this.canvas, [x0, y0, x1, y1]);
    this.slope = windowFilter(this.image);
    for (const box of data.boxes ?? []) this.outline(box, "known");
    if (data.place) this.outline(data.place, "place"); // what matches the region that was searched
    this.listen(at);
  }

  outline(box, kind) {
    const made = make("div", {class: kind});
    place(made, box);
    this.boxes.append(made);
    return made;
  }

  zoom(factor, x = 0, y = 0) {
    const {view} = this;
    const zoom = clamp(view.zoom * factor, 1, MOST);
    const real = zoom / view.zoom;
    this.move(zoom, x - (x - view.x) * real, y - (y - view.y) * real);
  }

  move(zoom, x, y) {
    const far = (zoom - 1) / 2 + 0.001;
    Object.assign(this.view, {zoom, x: clamp(x, -far, far), y: clamp(y, -far, far)});
    drawAll();
  }

  // Pixels of the screen for one of the picture.
  get fit() {
    const box = this.film.getBoundingClientRect();
    return Math.min(box.width / this.data.width, box.height / this.data.height);
  }

  draw() {
    const box = this.film.getBoundingClientRect();
    if (!box.width) return; // in a page that is not shown
    const {width, level, inverted} = this.look;
    const [slope, intercept] = [1 / width, 0.5 - level / width];
    for (const line of this.slope) {
      line.setAttribute("slope", inverted ? -slope : slope);
      line.setAttribute("intercept", inverted ? 1 - intercept : intercept);
    }
    const {zoom, x, y} = this.view;
    const scale = this.fit * zoom;
    this.film.classList.toggle("zoomed", zoom > 1);
    this.stage.style.transform =
      `translate(-50%, -50%) translate(${x * box.width}px, ${y * box.height}px) scale(${scale})`;
    this.stage.style.setProperty("--thin", `${1.5 / scale}px`);
    this.readout.textContent = `${zoom.toFixed(1)}×  W ${Math.round(255 * width)}  L ${Math.round(255 * level)}` +
      (this.whole ? "  full resolution" : "");
    if (this.data.key && this.whole === undefined && scale * devicePixelRatio > 1.05) this.sharpen();
  }

  // The whole image instead of the picture of at most 1,024 pixels.
  async sharpen() {
    this.whole = false;
    const source = await server.whole(this.data.key);
    if (!source) return;
    this.image.src = source;
    await this.image.decode();
    this.whole = true;
    this.draw();
  }

  spot(event) {
    const box = this.film.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width - 0.5, (event.clientY - box.top) / box.height - 0.5];
  }

  // A point of the screen in fractions of the image.
  fraction(event) {
    const box = this.stage.getBoundingClientRect();
    return [clamp((event.clientX - box.left) / box.width, 0, 1), clamp((event.clientY - box.top) / box.height, 0, 1)];
  }

  listen(at) {
    const {film} = this;
    const pointers = new Map();
    let clicked = false;
    let start = null;
    film.addEventListener("wheel", (event) => {
      if (!(event.ctrlKey || clicked)) return; // the page scrolls
      if (!event.ctrlKey && event.deltaY > 0 && this.view.zoom === 1) return; // it scrolls on
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 400), ...this.spot(event));
    }, {passive: false});
    film.addEventListener("contextmenu", (event) => event.preventDefault());
    film.addEventListener("blur", () => { clicked = false; });
    film.addEventListener("pointerdown", (event) => {
      clicked = true; // and has the focus: from now on the wheel is meant for the image
      film.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, this.spot(event));
      if (!state.region || at > 0) return;
      start = this.fraction(event);
      showRegion([...start, ...start]);
    });
    film.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return;
      const now = this.spot(event);
      const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
      pointers.set(event.pointerId, now);
      if (start) {
        const end = this.fraction(event);
        showRegion([0, 1].map((i) => Math.min(start[i], end[i])).concat([0, 1].map((i) => Math.max(start[i], end[i]))));
      } else if (pointers.size === 2) { // two fingers: their distance zooms
        const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
        const apart = (one) => Math.max(Math.hypot(one[0] - other[0], one[1] - other[1]), 0.01);
        this.zoom(apart(now) / apart(before), ...other);
      } else if (event.shiftKey || event.buttons === 2) {
        setLook(this, this.look.width + dx, this.look.level - dy);
      } else {
        this.move(this.view.zoom, this.view.x + dx, this.view.y + dy);
      }
    });
    const end = (event) => {
      pointers.delete(event.pointerId);
      if (start && event.type === "pointerup") searchRegion();
      start = null;
    };
    film.addEventListener("pointerup", end);
    film.addEventListener("pointercancel", end);
  }
}

function facts(data) {
  const parts = [];
  if (data.caption !== data.name) {
    parts.push(make("span", {class: "caption"}, data.caption + (data.approximate ? " (thumbnail: approximate)" : "")));
  }
  if (data.labels?.length) {
    parts.push(make("ul", {class: "labels"}, ...data.labels.map(({text, kind, words}) =>
      make("li", {class: kind, title: words}, text))));
  }
  if (data.report?.length) {
    parts.push(make("p", {class: "report", tabindex: "0", role: "region", "aria-label": "Report"},
      ...data.report.map(([text, marked]) => (marked ? make("mark", {}, text) : text))));
  }
  return parts;
}

// An SVG filter of its own on an image: the three lines that window, level and inversion set.
function windowFilter(image) {
  const name = `cbmir-window-${filters++}`;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "unseen");
  svg.setAttribute("aria-hidden", "true");
  svg.innerHTML = `<filter id="${name}" color-interpolation-filters="sRGB"><feComponentTransfer>` +
    ["R", "G", "B"].map((one) => `<feFunc${one} type="linear"/>`).join("") + "</feComponentTransfer></filter>";
  image.after(svg);
  image.style.filter = `url(#${name})`;
  return [...svg.querySelectorAll("[type=linear]")];
}

function explain() {
  const {maps = {}, names = {}} = value;
  const beside = state.panes.length > 1;
  const chosen = beside ? "" : state.finding;
  const seen = state.panes.map((pane, at) => {
    const cells = at === 0 && chosen ? maps[chosen] : pane.data.cells;
    return drawEvidence(pane.canvas, state.evidence ? cells : null, state.cells);
  }).includes(true);
  const on = state.evidence && (chosen || state.panes.some((pane) => pane.data.cells));
  const what = (names[chosen] ?? chosen).toLowerCase();
  const idle = value.region ? "Similar images are those of this box. Search region again: those of the whole image."
    : state.evidence && Object.keys(maps).length ? "Choose a finding to see what speaks for it." : "";
  find(".note").textContent = !on ? idle
    : !seen ? "Nothing is outlined: the evidence is spread evenly over the image."
    : chosen ? `Outlined: where the image speaks for ${what} more than for the other findings.`
    : "Outlined: what makes the two images similar.";
  document.dispatchEvent(new CustomEvent("cbmir-explained", {detail: chosen}));
}

function drawAll() {
  for (const pane of state.panes) pane.draw();
  const look = state.panes[0]?.look ?? {width: 1, level: 0.5, inverted: false};
  find("[data-slide=width]").value = 100 * look.width;
  find("[data-slide=level]").value = 100 * look.level;
  const pressed = {
    invert: look.inverted, region: state.region || Boolean(value.region), evidence: state.evidence,
    cells: state.cells, link: state.linked, stack: state.stack, boxes: state.boxes,
  };
  find("[data-do=boxes]").hidden = !value.boxed;
  find(".panes").classList.toggle("boxed", state.boxes);
  element.classList.toggle("drawing", state.region);
  for (const [name, on] of Object.entries(pressed)) find(`[data-do=${name}]`).setAttribute("aria-pressed", on);
}

function setLook(pane, width, level) {
  Object.assign(pane.look, {width: clamp(width, 0.05, 2), level: clamp(level, 0, 1)});
  drawAll();
}

function link() {
  const [first, ...others] = state.panes;
  for (const pane of others) {
    pane.view = state.linked ? first.view : {...pane.view};
    pane.look = state.linked ? first.look : {...pane.look};
  }
}

// The box to search by: what is drawn now, or what was searched.
let box = null;
let outline = null;
function showRegion(now) {
  box = now && grown(now);
  outline?.remove();
  outline = box && state.panes[0].outline(box, "region");
}
// At least as large as what a search takes (half a cell, with a margin), and inside what the model sees.
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
  state.region = false;
  trigger("region", {box});
  drawAll();
}

const act = {
  in: (pane) => pane?.zoom(1.3),
  out: (pane) => pane?.zoom(1 / 1.3),
  fit: (pane) => pane?.move(1, 0, 0),
  real: async (pane) => {
    if (!pane) return;
    if (pane.data.key && pane.whole === undefined) await pane.sharpen(); // 100% is that of the whole image
    pane.move(clamp(pane.image.naturalWidth / pane.data.width / devicePixelRatio / pane.fit, 1, MOST), pane.view.x, pane.view.y);
  },
  reset: (pane) => {
    if (!pane) return;
    Object.assign(pane.look, {width: 1, level: 0.5, inverted: false});
    pane.move(1, 0, 0);
  },
  invert: (pane) => { if (pane) pane.look.inverted = !pane.look.inverted; },
  region: (pane) => {
    if (!value.grid || state.panes.length > 1) return;
    if (!state.region && value.region) { trigger("region", {box: null}); return; }
    state.region = !state.region;
    showRegion(state.region ? [0.35, 0.35, 0.65, 0.65] : value.region ?? null);
    if (state.region) pane.film.focus();
    find(".note").textContent = state.region ? "Click or drag on the X-ray, or move this box with the arrow keys and press Enter." : "";
  },
  evidence: () => { state.evidence = !state.evidence; explain(); },
  cells: () => { state.cells = !state.cells; state.evidence = true; explain(); },
  boxes: () => {
    state.boxes = !state.boxes;
    document.dispatchEvent(new CustomEvent("cbmir-boxes", {detail: state.boxes}));
  },
  link: () => { state.linked = !state.linked; link(); },
  stack: () => { state.stack = !state.stack; find(".panes").classList.toggle("stack", state.stack); },
  flip: () => find(".panes").classList.toggle("flipped"),
  keys: () => { const dialog = find("dialog"); if (dialog.open) dialog.close(); else dialog.showModal(); },
  close: () => { if (state.panes.length > 1) trigger("close", {}); },
};

function run(name) {
  const pane = state.panes.find((one) => one.film === document.activeElement) ?? state.panes[0];
  act[name](pane);
  drawAll();
}

element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-do]");
  if (button) run(button.dataset.do);
});
for (const slider of element.querySelectorAll("[data-slide]")) {
  slider.addEventListener("input", () => {
    const [width, level] = ["width", "level"].map((name) => find(`[data-slide=${name}]`).value / 100);
    if (state.panes[0]) setLook(state.panes[0], width, level);
  });
}

// Keys work wherever the focus is, but where text is written or chosen.
const KEYS = {
  "+": "in", "=": "in", "-": "out", 0: "fit", 1: "real", i: "invert", r: "region", e: "evidence", c: "cells", b: "boxes", l: "link",
  o: "stack", f: "flip", "?": "keys",
};
document.addEventListener("keydown", (event) => {
  const {target, key} = event;
  if (event.ctrlKey || event.metaKey || event.altKey || !element.offsetParent && !element.closest(".wide")) return;
  if (target.closest?.("textarea, select, [role=listbox], [contenteditable]")) return;
  if (target.matches?.("input:not([type=checkbox], [type=radio])")) return;
  if (target.closest?.("dialog") && key !== "?") return;
  const pane = state.panes.find((one) => one.film === target) ?? state.panes[0];
  if (!pane && key !== "?") return;
  const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[key];
  const nudge = {"[": [-0.05, 0], "]": [0.05, 0], ",": [0, -0.03], ".": [0, 0.03]}[key];
  if (state.region && (step || key === "Enter" || key === "Escape")) {
    if (key === "Enter") searchRegion();
    else if (key === "Escape") run("region");
    else {
      const [x0, y0, x1, y1] = box;
      const [dx, dy] = step.map((one) => 0.02 * one);
      const moved = event.shiftKey ? [x0, y0, x1 + dx, y1 + dy] : [x0 + dx, y0 + dy, x1 + dx, y1 + dy];
      if (Math.min(...moved) >= 0 && Math.max(...moved) <= 1) showRegion(moved);
    }
  } else if (step) {
    if (pane.view.zoom > 1 && target === pane.film) pane.move(pane.view.zoom, pane.view.x - 0.05 * step[0], pane.view.y - 0.05 * step[1]);
    else if (state.panes.length > 1 && step[0] && target.type !== "radio") document.dispatchEvent(new CustomEvent("cbmir-next", {detail: step[0]}));
    else return; // the page scrolls
  } else if (nudge) setLook(pane, pane.look.width + nudge[0], pane.look.level + nudge[1]);
  else if (key === "Escape" && state.panes.length > 1) run("close");
  else if (KEYS[key.toLowerCase()]) run(KEYS[key.toLowerCase()]);
  else return;
  event.preventDefault();
});

// The X-ray stays in sight, small, while the page is scrolled.
const mini = find(".mini");
const watcher = new IntersectionObserver((entries) => {
  const entry = entries.at(-1);
  mini.hidden = entry.isIntersecting || entry.boundingClientRect.bottom > 0 || state.panes.length !== 1;
});
mini.addEventListener("click", () => find(".film").scrollIntoView({block: "center"}));

function show() {
  read();
  const {panes = [], region = null, note = ""} = value;
  const same = state.panes.length === panes.length && panes.every((pane, at) => pane.src === state.panes[at].data.src);
  const before = state.panes[0];
  watcher.disconnect();
  if (!same || panes.some((pane, at) => JSON.stringify(pane) !== JSON.stringify(state.panes[at].data))) {
    state.panes = panes.map((pane, at) => new Pane(pane, at));
    if (before && panes[0]?.src === before.data.src) Object.assign(state.panes[0].look, before.look);
  }
  const box = find(".panes");
  box.className = `panes of-${panes.length}`;
  state.stack = false;
  state.region = false;
  element.classList.toggle("wide", panes.length > 1);
  element.classList.toggle("empty", !panes.length);
  box.replaceChildren(...(panes.length ? state.panes.map((pane) => pane.root) : [make("div", {class: "film rest"},
    make("p", {}, note || "Drop a chest X-ray here, paste it, or open a file."))]));
  if (!panes[0] || !((value.maps ?? {})[state.finding])) state.finding = "";
  showRegion(region);
  link();
  explain();
  drawAll();
  document.dispatchEvent(new CustomEvent("cbmir-beside", {detail: panes[1]?.caption ?? ""}));
  if (panes.length === 1) {
    mini.querySelector("img").src = panes[0].src;
    watcher.observe(state.panes[0].film);
  }
  mini.hidden = true;
}
document.addEventListener("cbmir-explain", ({detail}) => {
  state.finding = state.finding === detail ? "" : detail;
  state.evidence = true;
  explain();
  drawAll();
});
new ResizeObserver(drawAll).observe(element);
watch("value", show);
show();
