// The X-rays of the viewer: zoom is CSS, window and level are a look-up table. The server is only asked once, for all pixels
// and values of a file that has more of them than its picture.
const MOST = 24; // maximum zoom; at 1 the image fits
const AS_IT_CAME = {width: 1, level: 0.5, inverted: false}; // width and level in fractions of the original window

// One image with its view and look; linked panes share both objects.
class Pane {
  constructor(data, at) {
    this.data = data;
    this.view = {zoom: 1, x: 0, y: 0}; // x and y: shift of the centre, in fractions of the film
    this.look = {...AS_IT_CAME};
    this.picture = new Picture(data.name);
    this.canvas = make("canvas");
    this.length = make("span", {class: "length"});
    this.ruler = make("div", {class: "ruler"});
    this.boxes = make("div", {class: "boxes"}, this.ruler, this.length);
    this.stage = make("div", {class: "stage"}, this.picture.canvas, this.canvas, this.boxes);
    this.readout = make("span", {class: "readout"});
    this.film = make("div", {
      class: "film", tabindex: "0", role: "group", "aria-label": `${data.name}. Press ? for the keys.`,
    }, this.stage, make("span", {class: "name"}, data.name), this.readout,
    ...[...data.sides].map((side) => make("span", {class: "side"}, side))); // the patient's, at the left and right edge
    this.root = make("figure", {}, this.film, make("figcaption", {}, ...facts(data)));
    [this.stage.style.width, this.stage.style.height] = [`${data.width}px`, `${data.height}px`];
    place(this.canvas, data.seen);
    for (const box of data.boxes ?? []) outline(this.boxes, box, "known");
    if (data.place) outline(this.boxes, data.place, "place"); // the best match of the region
    this.measure(null);
    this.listen(at);
    this.picture.load(data).then(drawAll);
  }

  // Take over the look, the ruler and the whole image, if fetched, from an earlier pane of the same image.
  adopt({look, line, picture, whole}) {
    Object.assign(this.look, look);
    this.measure(line);
    if (!whole) return;
    this.picture.canvas.replaceWith(picture.canvas);
    Object.assign(this, {picture, whole});
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

  // Screen pixels per pixel of the picture, when the image fits.
  get fit() {
    const box = this.film.getBoundingClientRect();
    return Math.min(box.width / this.data.width, box.height / this.data.height);
  }

  draw() {
    const box = this.film.getBoundingClientRect();
    if (!box.width) return; // the tab is hidden
    const {width, level} = this.look;
    const {zoom, x, y} = this.view;
    const scale = this.fit * zoom;
    this.film.classList.toggle("zoomed", zoom > 1);
    this.stage.style.transform =
      `translate(-50%, -50%) translate(${x * box.width}px, ${y * box.height}px) scale(${scale})`;
    this.stage.style.setProperty("--unit", 1 / scale); // one screen pixel
    if (!this.picture.ranks) return; // not decoded yet
    const size = scale * devicePixelRatio; // device pixels per pixel of the picture
    this.picture.draw(this.look, this.data.width * 2 ** Math.ceil(Math.log2(size)));
    this.readout.textContent =
      `${zoom.toFixed(1)}×  ${this.picture.words(this.look)}${this.whole ? "  full resolution" : ""}`;
    const coarse = size > 1.05 && this.data.size[0] > this.data.width;
    if (this.whole === undefined && (coarse || this.data.deep && (width !== 1 || level !== 0.5))) this.fetch();
  }

  // Replace the picture of at most 1,024 pixels by the whole image with all its values.
  async fetch() {
    this.whole = false;
    const answer = this.data.key && await server.whole(this.data.key);
    if (!answer) return;
    await this.picture.load(answer);
    this.whole = true;
    drawAll();
  }

  // Show a line between two points, in fractions of the image, and its length; null removes it.
  measure(line) {
    this.line = line;
    this.ruler.hidden = this.length.hidden = !line;
    if (!line) return;
    const {width, height, size, mm, where, approximate} = this.data;
    const [x0, y0, x1, y1] = line;
    const long = ([across, down]) => Math.hypot((x1 - x0) * across, (y1 - y0) * down);
    const angle = Math.atan2((y1 - y0) * height, (x1 - x0) * width);
    Object.assign(this.ruler.style, {
      left: `${100 * x0}%`, top: `${100 * y0}%`, width: `${long([width, height])}px`, transform: `rotate(${angle}rad)`,
    });
    Object.assign(this.length.style, {left: `${100 * x1}%`, top: `${100 * y1}%`});
    this.length.textContent = mm ? `${long(mm).toFixed(1)} mm ${where}`.trim()
      : `${Math.round(long(size))} pixels${approximate ? " of the thumbnail" : ""}`;
  }

  spot(event) {
    const box = this.film.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width - 0.5, (event.clientY - box.top) / box.height - 0.5];
  }

  // The position of an event in fractions of the image.
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
      if (!event.ctrlKey && event.deltaY > 0 && this.view.zoom === 1) return; // already fits: let the page scroll
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 400), ...this.spot(event));
    }, {passive: false});
    film.addEventListener("contextmenu", (event) => event.preventDefault());
    film.addEventListener("blur", () => { clicked = false; });
    film.addEventListener("pointerdown", (event) => {
      clicked = true; // it now has the focus, so the wheel zooms
      film.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, this.spot(event));
      const draws = state.tool === "region" ? at === 0 : state.tool === "measure";
      start = draws && event.button === 0 && !event.shiftKey && pointers.size === 1 ? this.fraction(event) : null;
      if (start && state.tool === "region") showRegion([...start, ...start]); // a click makes the smallest box
    });
    film.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return;
      const now = this.spot(event);
      const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
      pointers.set(event.pointerId, now);
      if (start) {
        tools[state.tool].show(this, [...start, ...this.fraction(event)]);
      } else if (pointers.size === 2) { // two fingers zoom by their distance
        const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
        const apart = (one) => Math.max(Math.hypot(one[0] - other[0], one[1] - other[1]), 0.01);
        this.zoom(apart(now) / apart(before), ...other);
      } else if (event.shiftKey || event.buttons === 2) {
        const wide = Math.max(1, this.look.width);
        setLook(this, this.look.width + dx * wide, this.look.level - dy * wide);
      } else {
        this.move(this.view.zoom, this.view.x + dx, this.view.y + dy);
      }
    });
    const end = (event) => {
      pointers.delete(event.pointerId);
      if (start && event.type === "pointerup") tools[state.tool]?.drawn?.();
      start = null;
    };
    film.addEventListener("pointerup", end);
    film.addEventListener("pointercancel", end);
  }
}

// An image on a canvas: its 256 greys, or the ranks of all its values before windowing.
class Picture {
  constructor(name) {
    this.canvas = make("canvas", {class: "picture", role: "img", "aria-label": name});
  }

  async load({src, values, low = 0, high = 255, inverted = false, edge = 0}) {
    const image = new Image();
    image.src = src;
    await image.decode();
    const full = make("canvas", {width: image.naturalWidth, height: image.naturalHeight});
    const context = full.getContext("2d", {willReadFrequently: true});
    context.drawImage(image, 0, 0);
    const frame = context.getImageData(0, 0, full.width, full.height);
    const pixels = new Uint32Array(frame.data.buffer); // red is the lowest byte of a pixel, and holds the high byte of a rank
    const ranks = Uint16Array.from(pixels, values ? (one) => (one & 255) << 8 | one >> 8 & 255 : (one) => one & 255);
    const known = values ? new Float32Array(Uint8Array.from(atob(values), (one) => one.charCodeAt(0)).buffer)
      : Float32Array.from({length: 256}, (_, grey) => grey);
    const span = Math.max(high - low, 1e-6);
    // In fractions of the original window: 0 is its black, 1 its white, and values may lie outside.
    const greys = known.map((value) => (inverted ? high - value : value - low) / span);
    Object.assign(this, {full, context, frame, pixels, ranks, greys, low, high, span, inverted, edge, drawn: ""});
  }

  // `across`: width of the canvas in pixels. Browsers shrink a canvas badly to less than half its size.
  draw({width, level, inverted}, across) {
    const look = `${width} ${level} ${inverted}`;
    const side = Math.min(this.full.width, Math.round(across));
    if (this.drawn === `${look} ${side}`) return;
    if (!this.drawn.startsWith(`${look} `)) this.shade(width, level, inverted);
    this.drawn = `${look} ${side}`;
    const {canvas, full} = this;
    [canvas.width, canvas.height] = [side, Math.round(side * full.height / full.width)];
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(full, 0, 0, canvas.width, canvas.height);
  }

  shade(width, level, inverted) {
    const shade = (part) => (0xff000000 | 0x10101 * Math.round(255 * (inverted ? 1 - part : part))) >>> 0;
    const shades = new Uint32Array(65536).fill(shade(0)); // padding, whose rank is after the last value, stays black
    this.greys.forEach((grey, rank) => { shades[rank] = shade(clamp((grey - level) / width + 0.5, 0, 1)); });
    const {pixels, ranks} = this;
    for (let i = 0; i < ranks.length; i++) pixels[i] = shades[ranks[i]];
    this.context.putImageData(this.frame, 0, 0);
  }

  // The narrowest and widest useful window, and the lowest and highest level.
  get reach() {
    const ends = [0, 1, this.greys[0], this.greys.at(-1)];
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    return [this.greys.length > 256 ? 0.01 : 0.05, Math.max(2, high - low), low, high];
  }

  // Window width and centre in the units of the DICOM file.
  words({width, level}) {
    const middle = this.inverted ? this.high - level * this.span : this.low + level * this.span;
    const words = (number) => (this.span < 100 ? number.toPrecision(3) : Math.round(number));
    return `W ${words(width * this.span + this.edge)}  L ${words(middle + this.edge / 2)}`;
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
    parts.push(make("p", {class: "report", tabindex: "0", role: "region", "aria-label": "Report"}, ...words(data.report)));
  }
  return parts;
}
