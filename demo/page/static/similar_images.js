// The cards of similar images. All data is inserted as text, never as HTML.
const marks = {alike: new Set(), unlike: new Set(), pinned: new Set()};
let step = null; // the step that the marks belong to

const button = (text, label, act, attributes = {}) => {
  const made = make("button", {type: "button", title: label, "aria-label": label, ...attributes}, text);
  made.addEventListener("click", act);
  return made;
};

const ids = () => (value.cards ?? []).map((card) => card.id);

function toggle(kind, id) {
  const other = {alike: "unlike", unlike: "alike"}[kind];
  if (!marks[kind].delete(id)) marks[kind].add(id);
  marks[other]?.delete(id);
  if (other && value.feedback) {
    trigger("say", {similar: id, label: "", value: marks.alike.has(id) ? 1 : marks.unlike.has(id) ? 0 : null});
  }
  if (marks.pinned.size > 3) marks.pinned.delete([...marks.pinned][0]); // only three fit beside the query
  if (kind === "pinned") trigger("pin", {ids: [...marks.pinned]});
  mark();
}

// Show the marks on the cards and in words.
function mark() {
  for (const card of element.querySelectorAll(".card")) {
    for (const one of card.querySelectorAll("[data-mark]")) {
      one.setAttribute("aria-pressed", marks[one.dataset.mark].has(card.dataset.id));
    }
  }
  const here = ids();
  const beside = [...marks.pinned].filter((id) => here.includes(id));
  const parts = [];
  if (marks.alike.size) parts.push(`${marks.alike.size} alike`);
  if (marks.unlike.size) parts.push(`${marks.unlike.size} not alike`);
  if (beside.length) parts.push(`${beside.length} pinned`);
  find(".marked").hidden = !parts.length;
  find(".marked span").textContent = parts.join(", ");
  find("[data-do=refine]").hidden = !(marks.alike.size || marks.unlike.size);
  find("[data-do=beside]").hidden = !beside.length;
}

function card(one, canRefine) {
  const which = `similar image ${one.rank}`;
  const film = button("", `Side by side: ${which}`, () => trigger("compare", {ids: [one.id]}), {class: "film"});
  const picture = make("span", {class: "picture"}, make("img", {src: one.src, alt: ""}));
  film.append(picture, make("span", {class: "rank"}, one.rank));
  const places = one.place ? [[one.place, "box place"]] : []; // the best match of the region
  for (const [box, kind] of [...one.boxes.map((box) => [box, "box"]), ...places]) outline(picture, box, kind);
  const labels = one.labels.map(({text, kind, words}) =>
    make("li", {class: kind, title: `${text}: ${words}`}, text, make("span", {class: "unseen"}, ` (${words})`)));
  const acts = make("div", {class: "acts"},
    button("Like this", `More like this: ${which}`, () => trigger("like", {id: one.id})),
    ...(canRefine ? [
      button("✓", `Alike: ${which}`, () => toggle("alike", one.id), {"data-mark": "alike"}),
      button("✕", `Not alike: ${which}`, () => toggle("unlike", one.id), {"data-mark": "unlike"}),
    ] : []),
    button("Pin", `Pin ${which}`, () => toggle("pinned", one.id), {"data-mark": "pinned"}));
  const made = make("li", {class: "card", "data-id": one.id}, film,
    make("p", {class: "line"}, make("strong", {title: "Distance of the embeddings: 0 if they are equal, at most 2"}, one.words)),
    make("ul", {class: "labels"}, ...labels),
    make("p", {class: "facts", title: one.id}, [one.facts, one.id].filter(Boolean).join(" · ")));
  if (one.report.length) {
    made.append(make("details", {class: "report"}, make("summary", {}, "Report"),
      make("p", {}, ...words(one.report))));
  }
  made.append(acts);
  return made;
}

function show() {
  read();
  const {cards = [], chips = [], heading = "Similar images", note = "", searched = "", empty = ""} = value;
  find("h2").textContent = heading;
  find(".how").textContent = [note, searched].filter(Boolean).join("; ");
  const shown = chips.map(({name, text}) => button(`${text} ×`, `Remove the filter: ${text}`, () => trigger("unfilter", {name}), {class: "chip"}));
  if (chips.length > 1 || (chips.length && !cards.length)) {
    shown.push(button("Clear filters", "Clear filters", () => trigger("unfilter", {name: ""}), {class: "chip add"}));
  }
  find(".chips").replaceChildren(...shown);
  const rest = find(".rest");
  rest.hidden = cards.length > 0;
  rest.textContent = value.heading ? empty : "Similar images appear here, with their labels and reports.";
  const held = find(".card :focus")?.getAttribute("aria-label"); // keep the focus on the same button
  find(".cards").replaceChildren(...cards.map((one) => card(one, value.can_refine)));
  if (held) find(`[aria-label="${CSS.escape(held)}"]`)?.focus({preventScroll: true});
  if (value.step !== step) for (const kind of Object.keys(marks)) marks[kind] = new Set(value[kind] ?? []);
  step = value.step;
  mark();
}

element.addEventListener("click", (event) => {
  const name = event.target.closest("[data-do]")?.dataset.do;
  if (name === "refine") trigger("refine", {alike: [...marks.alike], unlike: [...marks.unlike]});
  if (name === "beside") trigger("compare", {ids: [...marks.pinned].filter((id) => ids().includes(id))});
  if (name === "clear") {
    for (const kind of ["alike", "unlike"]) for (const id of [...marks[kind]]) toggle(kind, id); // this also withdraws the feedback
    marks.pinned.clear();
    trigger("pin", {ids: []});
    mark();
  }
});
// Side by side, the arrow keys move between similar images.
let beside = "";
document.addEventListener("cbmir-beside", ({detail}) => { beside = detail; });
document.addEventListener("cbmir-next", ({detail}) => {
  const here = ids();
  const next = here[here.indexOf(beside) + detail];
  if (next) trigger("compare", {ids: [next]});
});
document.addEventListener("cbmir-boxes", ({detail}) => element.classList.toggle("boxed", detail));
watch("value", show);
show();
