// Breadcrumbs, and the browser's history: each step is an entry of it, to which Back and a reload return.
let shown = null;
const draw = () => {
  const {step = 0, link = "", crumbs = []} = props.value ?? {};
  find("nav").replaceChildren(...crumbs.map(({step: number, text}, at) => {
    if (at === crumbs.length - 1) return make("span", {"aria-current": "page"}, text);
    const crumb = make("button", {}, text);
    crumb.addEventListener("click", () => trigger("go", {step: number}));
    return crumb;
  }));
  const address = location.pathname + (link ? `?${link.split("=")[0]}=${encodeURIComponent(link.slice(link.indexOf("=") + 1))}` : "");
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
