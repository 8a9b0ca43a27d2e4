// The viewer's buttons and keys, and how it shows a new answer.
const state = {panes: [], finding: "", evidence: true, cells: false, tool: "", linked: true, stack: false, boxes: false};

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
  const idle = value.region ? "These images are similar to the box. Press Search region again to use the whole image."
    : state.evidence && Object.keys(maps).length ? "Select a finding to see its evidence." : "";
  find(".note").textContent = !on ? idle
    : !seen ? "Nothing is outlined, because no part of the image speaks for it."
    : chosen ? `Outlined: where the image speaks most for ${what}.`
    : "Outlined: what makes the two images similar.";
  document.dispatchEvent(new CustomEvent("cbmir-explained", {detail: chosen}));
}

function drawAll() {
  for (const pane of state.panes) pane.draw();
  const look = state.panes[0]?.look ?? AS_IT_CAME;
  const [narrowest, widest, lowest, highest] = reach(state.panes[0]);
  for (const [name, min, max] of [["width", narrowest, widest], ["level", lowest, highest]]) {
    Object.assign(find(`[data-slide=${name}]`), {min: 100 * min, max: 100 * max, value: 100 * look[name]});
  }
  const pressed = {
    invert: look.inverted, region: state.tool === "region" || Boolean(value.region), measure: state.tool === "measure",
    evidence: state.evidence, cells: state.cells, link: state.linked, stack: state.stack, boxes: state.boxes,
  };
  find("[data-do=boxes]").hidden = !value.boxed;
  find(".panes").classList.toggle("boxed", state.boxes);
  element.classList.toggle("drawing", state.tool !== "");
  for (const [name, on] of Object.entries(pressed)) find(`[data-do=${name}]`).setAttribute("aria-pressed", on);
}

// The limits of window and level; for linked panes, the widest of them.
function reach(pane) {
  const reaches = (pane && state.linked ? state.panes : [pane]).map((one) => (one?.picture.ranks ? one.picture.reach : [0.05, 2, 0, 1]));
  const [narrowest, widest, lowest, highest] = [0, 1, 2, 3].map((i) => reaches.map((one) => one[i]));
  return [Math.min(...narrowest), Math.max(...widest), Math.min(...lowest), Math.max(...highest)];
}

function setLook(pane, width, level) {
  const [narrowest, widest, lowest, highest] = reach(pane);
  Object.assign(pane.look, {width: clamp(width, narrowest, widest), level: clamp(level, lowest, highest)});
  drawAll();
}

function link() {
  const [first, ...others] = state.panes;
  for (const pane of others) {
    pane.view = state.linked ? first.view : {...pane.view};
    pane.look = state.linked ? first.look : {...pane.look};
  }
}

const act = {
  in: (pane) => pane?.zoom(1.3),
  out: (pane) => pane?.zoom(1 / 1.3),
  fit: (pane) => pane?.move(1, 0, 0),
  real: (pane) => pane?.move(
    clamp(pane.data.size[0] / pane.data.width / devicePixelRatio / pane.fit, 1, MOST), pane.view.x, pane.view.y),
  reset: (pane) => {
    if (!pane) return;
    Object.assign(pane.look, AS_IT_CAME);
    pane.measure(null);
    pane.move(1, 0, 0);
  },
  invert: (pane) => { if (pane) pane.look.inverted = !pane.look.inverted; },
  region: (pane) => {
    if (!value.grid || state.panes.length > 1) return;
    if (state.tool === "region") { tools.region.drop(); leave(); }
    else if (value.region) trigger("region", {box: null});
    else take("region", pane, [0.35, 0.35, 0.65, 0.65]);
  },
  measure: (pane) => {
    if (state.tool === "measure") leave();
    else if (pane) take("measure", pane, pane.line ?? [0.35, 0.5, 0.65, 0.5]);
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

// Keys work everywhere, except in text fields and lists.
const KEYS = {
  "+": "in", "=": "in", "-": "out", 0: "fit", 1: "real", i: "invert", r: "region", m: "measure", e: "evidence", c: "cells", b: "boxes", l: "link",
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
  const nudge = {"[": [0.95, 0], "]": [1 / 0.95, 0], ",": [1, -0.03], ".": [1, 0.03]}[key];
  if (state.tool && drawByKey(pane, key, step, event.shiftKey)) { event.preventDefault(); return; }
  if (step) {
    if (pane.view.zoom > 1 && target === pane.film) pane.move(pane.view.zoom, pane.view.x - 0.05 * step[0], pane.view.y - 0.05 * step[1]);
    else if (state.panes.length > 1 && step[0] && target.type !== "radio") document.dispatchEvent(new CustomEvent("cbmir-next", {detail: step[0]}));
    else return; // the page scrolls
  } else if (nudge) setLook(pane, pane.look.width * nudge[0], pane.look.level + nudge[1] * Math.max(1, pane.look.width));
  else if (key === "Escape" && state.panes.length > 1) run("close");
  else if (KEYS[key.toLowerCase()]) run(KEYS[key.toLowerCase()]);
  else return;
  event.preventDefault();
});

// A small X-ray stays visible while the page is scrolled.
const mini = find(".mini");
const watcher = new IntersectionObserver((entries) => {
  const entry = entries.at(-1);
  mini.hidden = entry.isIntersecting || entry.boundingClientRect.bottom > 0 || state.panes.length !== 1;
});
mini.addEventListener("click", () => find(".film").scrollIntoView({block: "center"}));

// Side by side, the viewer covers the page, and the parts under it must not take the focus.
let left = ""; // the label of the element that had the focus before
function cover(wide) {
  if (wide && !element.classList.contains("wide")) left = document.activeElement.getAttribute("aria-label");
  element.classList.toggle("wide", wide);
  for (const part of document.querySelectorAll("#bar, #tabs > .tab-wrapper, #way, #alerts, #found, #answers")) part.inert = wide;
  if (wide || !left) return;
  requestAnimationFrame(() => { document.querySelector(`[aria-label="${CSS.escape(left)}"]`)?.focus({preventScroll: true}); left = ""; });
}

function show() {
  read();
  const {panes = [], region = null, note = ""} = value;
  for (const pane of panes) pane.src ??= state.panes.find((one) => one.data.picture === pane.picture)?.data.src;
  if (panes.some((pane) => !pane.src)) { trigger("again", {}); return; } // an earlier answer was lost
  const same = state.panes.length === panes.length && panes.every((pane, at) => pane.src === state.panes[at].data.src);
  const before = state.panes[0];
  watcher.disconnect();
  if (!same || panes.some((pane, at) => JSON.stringify(pane) !== JSON.stringify(state.panes[at].data))) {
    state.panes = panes.map((pane, at) => new Pane(pane, at));
    if (before && panes[0]?.src === before.data.src) state.panes[0].adopt(before);
  }
  const box = find(".panes");
  box.className = `panes of-${panes.length}`;
  state.stack = false;
  state.tool = "";
  cover(panes.length > 1);
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
