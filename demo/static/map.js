// The gallery as points on a canvas, by what is known of the chosen label: 1 has it, u uncertain, 0 without, ? not known.

const NEAR = 14; // pixels within which a point is meant
const MARGIN = 24;

export class GalleryProjection {
  /** `like(id)` asks for more like an image. */
  constructor(page, like) {
    this.canvas = page.querySelector("#map");
    this.tip = page.querySelector("#map-tip");
    this.label = page.querySelector("#map-label");
    this.about = page.querySelector("#map-about");
    this.count = page.querySelector("#map-count");
    this.at = -1;
    this.label.addEventListener("change", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event));
    this.canvas.addEventListener("pointerleave", () => this.#point(-1));
    this.canvas.addEventListener("click", (event) => {
      this.#hover(event);
      if (this.at >= 0) like(this.data.ids[this.at]);
    });
    this.canvas.addEventListener("keydown", (event) => this.#key(event, like));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  /** Fetch the map when the page is first looked at. */
  async open() {
    if (!this.data) {
      const answer = await fetch("map.json");
      if (!answer.ok && answer.status !== 404) throw new Error(answer.statusText); // 404: there is no map yet
      this.data = answer.ok ? await answer.json() : {ids: [], points: [], labels: {}, method: ""};
      if (this.data.ids.length) this.about.textContent = `${this.data.ids.length} images by ${this.data.method}`;
    }
    this.draw();
  }

  /** Mark where the image on the page belongs, [x, y] or null. */
  set query(place) {
    this.place = place;
    this.draw();
  }

  draw() {
    const box = this.canvas.getBoundingClientRect();
    if (!this.data || !box.width) return;
    const dense = window.devicePixelRatio || 1;
    [this.canvas.width, this.canvas.height] = [box.width * dense, box.height * dense];
    const context = this.canvas.getContext("2d");
    context.scale(dense, dense);
    const style = getComputedStyle(this.canvas);
    const [accent, soft] = ["--accent", "--soft"].map((name) => style.getPropertyValue(name));
    const known = this.data.labels[this.label.value] ?? "";
    this.spots = this.data.points.map((point) => this.#spot(point, box));
    const count = (sign) => [...known].filter((one) => one === sign).length;
    this.count.textContent = this.spots.length ? `${count("1")} of ${this.spots.length}, ${count("u")} uncertain` : "";
    for (const sign of "?0u1") { // what is there lies on top
      this.spots.forEach(([x, y], at) => {
        if ((known[at] ?? "?") === sign) this.#dot(context, x, y, sign, "u1".includes(sign) ? accent : soft);
      });
    }
    if (this.at >= 0) ring(context, ...this.spots[this.at], style.getPropertyValue("--ink"));
    if (this.place) cross(context, ...this.#spot(this.place, box), style);
  }

  #spot([x, y], box) {
    const side = Math.min(box.width, box.height) - 2 * MARGIN;
    return [(box.width - side) / 2 + x * side, (box.height - side) / 2 + (1 - y) * side];
  }

  #dot(context, x, y, sign, colour) {
    context.fillStyle = context.strokeStyle = colour;
    context.beginPath();
    context.arc(x, y, {1: 4, u: 4, 0: 2}[sign] ?? 3, 0, 7);
    if (sign === "?" || sign === "u") context.stroke();
    else context.fill();
    if (sign !== "u") return;
    context.beginPath(); // half of it
    context.arc(x, y, 4, Math.PI / 2, 1.5 * Math.PI);
    context.fill();
  }

  #hover(event) {
    if (!this.spots) return;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    this.#point(nearest(this.spots, x, y, NEAR));
  }

  #key(event, like) {
    if (!this.spots?.length) return;
    const [dx, dy] = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key] ?? [0, 0];
    if (dx || dy) {
      event.preventDefault();
      this.#point(this.at < 0 ? 0 : ahead(this.spots, this.at, dx, dy));
    } else if (event.key === "Enter" && this.at >= 0) {
      like(this.data.ids[this.at]);
    } else if (event.key === "Escape") {
      this.#point(-1);
    }
  }

  /** Show what image a point is. */
  #point(at) {
    if (at === this.at) return;
    this.at = at;
    this.tip.hidden = at < 0;
    this.draw();
    if (at < 0) return;
    const id = this.data.ids[at];
    const [x, y] = this.spots[at];
    const said = {1: "", u: " (uncertain)"};
    const labels = Object.entries(this.data.labels)
      .filter(([, signs]) => signs[at] in said).map(([label, signs]) => label + said[signs[at]]);
    const image = this.tip.querySelector("img");
    image.removeAttribute("src"); // another's must not stand above this one's name until its own is there
    image.alt = "";
    image.onerror = () => { image.alt = "No thumbnail"; };
    image.src = `thumbnail?id=${encodeURIComponent(id)}`;
    this.tip.querySelector("figcaption").textContent =
      `${id}: ${labels.join(", ").replaceAll("_", " ") || "no finding marked"}`;
    const [right, low] = [x > this.canvas.clientWidth / 2, y > this.canvas.clientHeight / 2];
    this.tip.style.transform = `translate(${right ? "calc(-100% - 14px)" : "14px"}, ${low ? "calc(-100% - 14px)" : "14px"})`;
    [this.tip.style.left, this.tip.style.top] = [`${x}px`, `${y}px`];
  }
}

function nearest(spots, x, y, within) {
  let [best, least] = [-1, within];
  spots.forEach(([a, b], at) => {
    const distance = Math.hypot(a - x, b - y);
    if (distance < least) [best, least] = [at, distance];
  });
  return best;
}

/** The nearest point in a direction: within the quarter that it is the middle of. */
function ahead(spots, from, dx, dy) {
  const [x, y] = spots[from];
  let [best, least] = [from, Infinity];
  spots.forEach(([a, b], at) => {
    const [along, across] = [(a - x) * dx + (b - y) * dy, Math.abs((a - x) * dy) + Math.abs((b - y) * dx)];
    if (at !== from && along > 0 && across <= along && along + across < least) [best, least] = [at, along + across];
  });
  return best;
}

function ring(context, x, y, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.beginPath();
  context.arc(x, y, 8, 0, 7);
  context.stroke();
}

function cross(context, x, y, style) {
  for (const [width, colour] of [[8, style.getPropertyValue("--panel")], [4, style.getPropertyValue("--warm")]]) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke(new Path2D(`M${x - 11} ${y}h22M${x} ${y - 11}v22`));
  }
}
