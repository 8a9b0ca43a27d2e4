// Two images side by side, with what makes them alike on both; they zoom and move together.

import {Viewer} from "./viewer.js";

export class Compare {
  /** `ask(question)` asks the server; `ids()` are the look-alikes on the wall, in order; `boxes(id)` is the HTML of one's. */
  constructor(dialog, ask, ids, boxes) {
    this.dialog = dialog;
    this.ask = ask;
    this.ids = ids;
    this.boxes = boxes;
    this.here = new Viewer(dialog.querySelector("#here"));
    this.there = new Viewer(dialog.querySelector("#there"));
    this.here.moved = (view) => this.there.follow(view);
    this.there.moved = (view) => this.here.follow(view);
    const slider = dialog.querySelector("#compare-opacity");
    const fade = () => { this.here.opacity = this.there.opacity = slider.value / 100; };
    slider.addEventListener("input", fade);
    fade();
    dialog.addEventListener("keydown", (event) => {
      if (event.target.matches("input")) return;
      if (event.key === "ArrowLeft") this.step(-1);
      if (event.key === "ArrowRight") this.step(1);
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(); // the backdrop
    });
    dialog.addEventListener("close", () => { this.asked = null; });
  }

  open(id) {
    this.asked = id;
    this.ask({action: "compare", id});
  }

  close() {
    this.asked = null;
    this.dialog.close();
  }

  step(by) {
    const ids = this.ids();
    const at = ids.indexOf(this.asked) + by;
    if (at >= 0 && at < ids.length) this.open(ids[at]);
  }

  /** Show an answer beside `picture`, the one in the viewer (or null). */
  show(answer, picture) {
    const find = (id) => this.dialog.querySelector(id);
    const {id, src, here, there, exact, title, labels, report} = answer;
    if (id !== this.asked) return; // another was asked for meanwhile, or the dialog was closed
    const rank = this.ids().indexOf(id) + 1;
    this.id = id;
    find("#compare-title").textContent = `Look-alike ${rank || ""} · ${id}`;
    find("#compare-labels").innerHTML = labels;
    find("#compare-report").innerHTML = report;
    find("#compare-text").textContent = !here ? title :
      `${title}. Orange and + on both: what makes these two alike; all cells of a map sum to the cosine.` +
      (exact ? "" : " The right map was made from the thumbnail, or from a changed file, and is approximate.");
    if (!this.dialog.open) this.dialog.showModal();
    this.here.show(picture);
    this.here.explain(here);
    const resting = this.dialog.querySelector("#there .resting");
    this.there.show(null); // another's image and evidence must not stand under this one's name
    resting.textContent = "";
    const [layer, boxes] = [find("#there .boxes"), this.boxes(id)];
    layer.innerHTML = "";
    find("[data-act=boxes]").hidden = !boxes;
    const image = new Image();
    image.onload = () => {
      if (this.id !== id) return; // another is shown meanwhile
      const [width, height] = [image.naturalWidth, image.naturalHeight];
      this.there.show({src, width, height, caption: `${id} (thumbnail)`, box: picture?.box});
      this.there.explain(there);
      layer.innerHTML = boxes;
    };
    image.onerror = () => { if (this.id === id) resting.textContent = "No thumbnail"; };
    image.src = src;
  }
}
