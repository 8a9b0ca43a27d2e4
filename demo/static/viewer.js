// A viewer for one image: zoom, pan, invert, window and level, and an evidence map over it. All of it is CSS and an SVG
// filter in the browser, so that nothing waits for the server.

import {drawEvidence} from "./evidence.js";

const SVG = "http://www.w3.org/2000/svg";
const MOST = 16; // times as large as fits
let filters = 0;

export class Viewer {
  /** `root` has the parts film, stage, picture, evidence, seen, resting, caption, readout; perhaps tools. */
  constructor(root) {
    this.parts = Object.fromEntries(
      [...root.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
    this.tools = Object.fromEntries(
      [...root.querySelectorAll("[data-tool]")].map((tool) => [tool.dataset.tool, tool]));
    this.slope = windowFilter(this.parts.picture);
    drawEvidence(this.parts.evidence, null);
    this.moved = () => {}; // called with zoom and place, so that two viewers can move together
    this.reset();
    this.#listen();
  }

  /** Show {src, width, height, caption, box}, or nothing. */
  show(picture) {
    const {picture: image, resting, caption, seen, stage} = this.parts;
    this.picture = picture;
    image.hidden = !picture;
    resting.hidden = Boolean(picture);
    caption.textContent = picture?.caption ?? "";
    seen.hidden = !picture?.box;
    this.explain(null);
    this.reset();
    if (!picture) return;
    image.src = picture.src;
    image.alt = picture.caption;
    [stage.style.width, stage.style.height] = [`${picture.width}px`, `${picture.height}px`];
    if (picture.box) {
      const [top, bottom, left, right] = picture.box.map((share) => 100 * share);
      for (const part of [seen, this.parts.evidence]) {
        Object.assign(part.style, {
          top: `${top}%`, left: `${left}%`, height: `${bottom - top}%`, width: `${right - left}%`,
        });
      }
    }
  }

  /** Lay an evidence map {cells} over the image, or none. */
  explain(evidence) {
    drawEvidence(this.parts.evidence, evidence?.cells);
    this.parts.seen.classList.toggle("on", Boolean(evidence));
  }

  set opacity(share) {
    this.parts.evidence.style.opacity = share;
  }

  /** The whole image, as it came. */
  reset() {
    this.look = {width: 1, level: 0.5, inverted: false};
    this.fit();
  }

  /** The whole image, as it looks. */
  fit() {
    this.#move({zoom: 1, x: 0, y: 0}); // x and y: how far the middle is moved, in parts of the film's side
  }

  /** Zoom by a factor about a point of the film, given in parts of its side from its middle. */
  zoom(factor, x = 0, y = 0) {
    const zoom = Math.min(MOST, Math.max(1, this.view.zoom * factor));
    const real = zoom / this.view.zoom;
    this.#move({zoom, x: x - (x - this.view.x) * real, y: y - (y - this.view.y) * real});
  }

  pan(x, y) {
    this.#move({...this.view, x: this.view.x + x, y: this.view.y + y});
  }

  window(width, level) {
    this.look.width = Math.min(2, Math.max(0.05, width));
    this.look.level = Math.min(1, Math.max(0, level));
    this.#draw();
  }

  invert() {
    this.look.inverted = !this.look.inverted;
    this.#draw();
  }

  /** Take over another viewer's view, without a call of `moved`. */
  follow(view) {
    this.view = {...view};
    this.#draw();
  }

  #move(view) {
    const far = (view.zoom - 1) / 2; // no farther than to the image's edge
    this.view = {zoom: view.zoom, x: clamp(view.x, far), y: clamp(view.y, far)};
    this.#draw();
    this.moved(this.view);
  }

  #draw() {
    const {film, stage, readout} = this.parts;
    const {width, level, inverted} = this.look;
    const [slope, intercept] = [1 / width, 0.5 - level / width];
    for (const line of this.slope) {
      line.setAttribute("slope", inverted ? -slope : slope);
      line.setAttribute("intercept", inverted ? 1 - intercept : intercept);
    }
    if (this.tools.window) {
      this.tools.window.value = 100 * width;
      this.tools.level.value = 100 * level;
      this.tools.invert.setAttribute("aria-pressed", inverted);
    }
    film.classList.toggle("zoomed", this.view.zoom > 1);
    if (!this.picture) {
      readout.textContent = "";
      return;
    }
    const box = film.getBoundingClientRect();
    if (!box.width) return; // in a page that is not shown
    const fit = Math.min(box.width / this.picture.width, box.height / this.picture.height);
    const {zoom, x, y} = this.view;
    stage.style.transform =
      `translate(-50%, -50%) translate(${x * box.width}px, ${y * box.height}px) scale(${fit * zoom})`;
    stage.style.setProperty("--scale", fit * zoom);
    readout.textContent = `${zoom.toFixed(1)}×  W ${Math.round(255 * width)}  L ${Math.round(255 * level)}` +
      (inverted ? "  inverted" : "");
  }

  #listen() {
    const {film} = this.parts;
    const pointers = new Map();
    film.addEventListener("wheel", (event) => {
      if (!this.picture || !(event.ctrlKey || this.clicked)) return; // the page scrolls
      if (!event.ctrlKey && event.deltaY > 0 && this.view.zoom === 1) return; // it scrolls on
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 400), ...this.#place(event));
    }, {passive: false});
    film.addEventListener("contextmenu", (event) => event.preventDefault());
    film.addEventListener("blur", () => { this.clicked = false; });
    film.addEventListener("pointerdown", (event) => {
      this.clicked = true; // and has the focus: from now on the wheel is meant for the image
      film.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, this.#place(event));
    });
    film.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before || !this.picture) return;
      const now = this.#place(event);
      const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
      if (pointers.size === 2) { // two fingers: their distance zooms
        const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
        this.zoom(apart(now, other) / Math.max(apart(before, other), 0.01), ...other);
      } else if (event.shiftKey || event.buttons === 2) {
        this.window(this.look.width + dx, this.look.level - dy);
      } else {
        this.pan(dx, dy);
      }
      pointers.set(event.pointerId, now);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      film.addEventListener(end, (event) => pointers.delete(event.pointerId));
    }
    film.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(film);

    this.tools.in?.addEventListener("click", () => this.zoom(1.4));
    this.tools.out?.addEventListener("click", () => this.zoom(1 / 1.4));
    this.tools.fit?.addEventListener("click", () => this.fit());
    this.tools.reset?.addEventListener("click", () => this.reset());
    this.tools.invert?.addEventListener("click", () => this.invert());
    for (const name of ["window", "level"]) {
      this.tools[name]?.addEventListener("input", () =>
        this.window(this.tools.window.value / 100, this.tools.level.value / 100));
    }
    this.tools.opacity?.addEventListener("input", () => { this.opacity = this.tools.opacity.value / 100; });
    if (this.tools.opacity) this.opacity = this.tools.opacity.value / 100;
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const {width, level} = this.look;
    const keys = {
      "+": () => this.zoom(1.25), "=": () => this.zoom(1.25), "-": () => this.zoom(0.8), 0: () => this.fit(),
      i: () => this.invert(), I: () => this.invert(),
      "[": () => this.window(width - 0.05, level), "]": () => this.window(width + 0.05, level),
      ",": () => this.window(width, level - 0.03), ".": () => this.window(width, level + 0.03),
      ArrowLeft: () => this.pan(0.05, 0), ArrowRight: () => this.pan(-0.05, 0),
      ArrowUp: () => this.pan(0, 0.05), ArrowDown: () => this.pan(0, -0.05),
    };
    if (!keys[event.key]) return;
    if (event.key.startsWith("Arrow") && this.view.zoom === 1) return; // the page scrolls, or the dialog goes on
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  }

  #place(event) {
    const box = this.parts.film.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width - 0.5, (event.clientY - box.top) / box.height - 0.5];
  }
}

/** An SVG filter of its own on an element: the three lines that window, level and inversion set. */
function windowFilter(element) {
  const name = `window-${filters++}`;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "unseen");
  svg.setAttribute("aria-hidden", "true");
  svg.innerHTML = `<filter id="${name}" color-interpolation-filters="sRGB"><feComponentTransfer>` +
    ["R", "G", "B"].map((one) => `<feFunc${one} type="linear"/>`).join("") + "</feComponentTransfer></filter>";
  element.after(svg);
  element.style.filter = `url(#${name})`;
  return [...svg.querySelectorAll("[type=linear]")];
}

const clamp = (value, most) => Math.min(most, Math.max(-most, value));
const apart = (one, other) => Math.hypot(one[0] - other[0], one[1] - other[1]);
