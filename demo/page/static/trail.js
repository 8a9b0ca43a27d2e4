// Breadcrumbs, lists of images and cases, and the browser's history: Back and a reload return to a step.
let shown = null;
function choose(name, options, chosen) {
  const list = find(`[data-choice=${name}]`);
  list.hidden = options.length < 2;
  list.replaceChildren(...options.map(([text, value]) => make("option", {value, selected: value === chosen}, text)));
  if (chosen == null) list.selectedIndex = -1;
}
find("[data-choice=images]").addEventListener("change", ({target}) => trigger("member", {at: Number(target.value)}));
find("[data-choice=cases]").addEventListener("change", ({target}) => trigger("go", {step: Number(target.value)}));
const draw = () => {
  const {step = 0, link = "", crumbs = [], images = [], image, cases = [], case: opened, has = {}} = props.value ?? {};
  for (const name of ["step", "analysis", "dicom"]) document.body.classList.toggle(`has-${name}`, Boolean(has[name]));
  choose("images", images.map((caption, at) => [`${at + 1}. ${caption}`, at]), image);
  choose("cases", cases.map(({step: number, text}) => [text, number]), opened);
  find("nav").replaceChildren(...crumbs.map(({step: number, text}, at) => {
    if (at === crumbs.length - 1) return make("span", {"aria-current": "page"}, text);
    const crumb = make("button", {}, text);
    crumb.addEventListener("click", () => trigger("go", {step: number}));
    return crumb;
  }));
  const address = location.pathname + (link && `?${link}`);
  if (shown === step) return;
  if (shown === null || history.state?.step === step) history.replaceState({step}, "", step ? address : location.href);
  else history.pushState({step}, "", address);
  shown = step;
};
watch("value", draw);
window.addEventListener("popstate", (event) => {
  shown = event.state?.step ?? 0;
  trigger("go", {step: shown});
});
