// A click on a row selects the finding whose evidence the viewer draws; the viewer listens for the event.
element.addEventListener("click", (event) => {
  const row = event.target.closest("[data-finding]");
  if (row) document.dispatchEvent(new CustomEvent("cbmir-explain", {detail: row.dataset.finding}));
  const said = event.target.closest("[data-say]");
  if (!said) return;
  const taken = said.getAttribute("aria-pressed") === "true"; // clicked again: withdraw it
  for (const one of said.parentNode.children) one.setAttribute("aria-pressed", one === said && !taken);
  trigger("say", {similar: "", label: said.parentNode.dataset.label, value: taken ? null : Number(said.dataset.say)});
});
const mark = (name) => element.querySelectorAll("[data-finding]").forEach((row) => {
  row.setAttribute("aria-pressed", row.dataset.finding === name);
});
let chosen = "";
let opened = ""; // the image whose findings were opened despite the warning
element.addEventListener("toggle", ({target}) => { opened = target.open ? target.dataset.image : ""; }, true);
document.addEventListener("cbmir-explained", ({detail}) => mark(chosen = detail));
watch("value", () => { // new rows, in which the same finding stays selected
  mark(chosen);
  const gate = element.querySelector(".gate");
  if (gate) gate.open = gate.dataset.image === opened;
});
