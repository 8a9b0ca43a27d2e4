// A click on a row chooses the finding whose evidence the viewer draws; the viewer listens on the page.
element.addEventListener("click", (event) => {
  const row = event.target.closest("[data-finding]");
  if (row) document.dispatchEvent(new CustomEvent("cbmir-explain", {detail: row.dataset.finding}));
  const said = event.target.closest("[data-say]");
  if (!said) return;
  const taken = said.getAttribute("aria-pressed") === "true"; // it is taken back
  for (const one of said.parentNode.children) one.setAttribute("aria-pressed", one === said && !taken);
  trigger("say", {similar: "", label: said.parentNode.dataset.label, value: taken ? null : Number(said.dataset.say)});
});
const mark = (name) => element.querySelectorAll("[data-finding]").forEach((row) => {
  row.setAttribute("aria-pressed", row.dataset.finding === name);
});
let chosen = "";
let opened = ""; // the image whose findings are shown although they are worthless
element.addEventListener("toggle", ({target}) => { opened = target.open ? target.dataset.image : ""; }, true);
document.addEventListener("cbmir-explained", ({detail}) => mark(chosen = detail));
watch("value", () => { // other rows, of which the same one is chosen
  mark(chosen);
  const gate = element.querySelector(".gate");
  if (gate) gate.open = gate.dataset.image === opened;
});
