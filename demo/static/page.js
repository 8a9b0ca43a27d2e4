// The page: it asks the server by `ask` and puts what is answered into its parts.

import {Compare} from "./compare.js";
import {listenForFiles, send} from "./inputs.js";
import {GalleryProjection} from "./map.js";
import {Viewer} from "./viewer.js";

const SLOW = 150; // milliseconds that controls wait for another change
const BEAT = 3000; // milliseconds between looks at whether the server is still there, while it is asked something
const PATIENCE = 10_000; // milliseconds within which it says so
const LONGEST = 120_000; // milliseconds without an answer, or another place in the queue, after which the page says so
const OPENING = ["open", "example", "member", "like", "findings"]; // what puts another image on the page

/** `trigger(question)` sends a question to the server; `upload(file)` a file. */
export function start(element, trigger, upload) {
  const root = element.querySelector("#cbmir");
  const find = (selector) => root.querySelector(selector);
  const [state, desk, legend] = [find("#state"), find(".desk"), find(".legend .shared")];
  const viewer = new Viewer(find("#viewer"));
  const narrow = window.matchMedia("(max-width: 780px)");
  const parts = ["alerts", "findings", "novelty", "agreement", "wall", "members", "search", "map-note"];
  const noEvidence = find("#evidence-text").textContent;
  const blank = Object.fromEntries(parts.map((id) => [id, find(`#${id}`).innerHTML]));
  const asked = new Map(); // what is under way, by numbers: what is said of it, since when, if it opens and is sent
  let [number, evidence, chosen, picture] = [0, {}, "", null];
  let about = 0; // the number of the question that brought what is on the page
  let [given, first] = [0, 0]; // an image that was given up, by its `about`; answers before number `first` are late
  let ends = 0; // the number from which on a good answer ends the error on the page
  let heard = 0; // when the server last said anything

  /** Wait for something, and answer its number. What opens an image gives up files that are still being sent. */
  function begin(said, opens, sent = true) {
    if (opens) for (const [n, one] of asked) if (!one.sent) asked.delete(n);
    number += 1;
    heard = performance.now();
    asked.set(number, {said, opens, sent, since: heard});
    tell();
    return number;
  }

  function ask(question, said = "Looking …") {
    const n = begin(said, OPENING.includes(question.action));
    trigger({n, about, controls: controls(), ...question});
  }

  /** Say what is under way, else `text`. While that opens an image, the one on the page must not be taken for it. */
  function tell(text = "") {
    const under = [...asked.values()];
    state.textContent = under.at(-1)?.said ?? text;
    desk.setAttribute("aria-busy", under.some((one) => one.opens));
    find("#viewer .resting").textContent = under.findLast((one) => one.opens)?.said ?? "No image yet";
  }

  const controls = () => ({
    k: Number(find("#k").value), exclude: find("#exclude").checked, patient: find("#patient").value,
    view: find("#view").value, having: find("#having").value, without: find("#without").value,
  });
  const ids = () => [...root.querySelectorAll(".card")].map((card) => card.dataset.id);
  const boxes = (id) => find(`.card[data-id="${CSS.escape(id)}"] .boxes`)?.innerHTML ?? "";
  const compare = new Compare(find("#compare"), (question) => ask(question), ids, boxes);
  const chart = new GalleryProjection(find(".page[data-page=map]"), (id) => { turnTo("read"); ask({action: "like", id}); });

  async function open(files, more) {
    turnTo("read");
    const sending = begin("Sending …", true, false);
    try {
      const paths = await send(files, upload);
      if (asked.delete(sending)) ask({action: "open", paths, more}, "Reading …"); // else another was opened meanwhile
    } catch (error) {
      if (!asked.has(sending)) return;
      fail([sending], `The file could not be sent: it may be too large (${error.message ?? error}).`);
    }
  }

  /** Give up these questions. Where one was to open an image, the one before goes, as it could be taken for it. */
  function fail(numbers, text) {
    const opening = numbers.findLast((n) => asked.get(n).opens);
    for (const n of numbers) asked.delete(n);
    if (opening) {
      [given, first] = [about, opening];
      put({about: 0, html: blank, picture: null, evidence: {}, place: null});
    }
    tell();
    refuse(text, numbers.at(-1));
  }

  /** Say what went wrong, above everything, until question `end` is answered: what is on the page stays. */
  function refuse(text, end = number + 1) {
    const note = document.createElement("div");
    note.className = "note bad";
    note.textContent = text;
    find("#errors").replaceChildren(note);
    ends = end;
    compare.close();
    find("#errors").scrollIntoView({block: "nearest"});
  }

  function explain(key) {
    chosen = evidence[key] ? key : "";
    viewer.explain(evidence[chosen]);
    for (const button of root.querySelectorAll("[data-evidence]")) {
      button.setAttribute("aria-pressed", button.dataset.evidence === chosen);
    }
    const text = find("#evidence-text");
    text.textContent = noEvidence;
    if (!chosen) return;
    const {name, sum} = evidence[chosen];
    text.innerHTML = '<span class="key more"></span>orange and +: speaks for <b></b> and not for other ' +
      'findings, more than an even share · <span class="key less"></span>blue and −: less · dashed: what the model ' +
      "sees. Exact: the cells sum to its lead over the other findings’ mean, <b></b>.";
    [text.querySelectorAll("b")[0].textContent, text.querySelectorAll("b")[1].textContent] = [name, sum.toFixed(3)];
  }

  document.addEventListener("cbmir-answer", ({detail: answer}) => {
    if (!answer?.n) return;
    heard = performance.now();
    const since = asked.get(answer.n)?.since;
    for (const [n, one] of asked) if (one.sent && n <= answer.n) asked.delete(n);
    tell();
    const [failed, replaces] = [answer.action === "error", "picture" in answer];
    if (answer.action === "late" || answer.action === "idle") return; // there is nothing to show
    if (answer.n < first || (given && given === answer.about && !replaces)) return; // about what was given up
    if (!failed && !replaces && answer.about !== about) {
      refuse("The answer was about another image than the one on this page. Open the image again.");
      return;
    }
    put(answer);
    if (answer.compare) compare.show(answer.compare, picture);
    if (answer.download) save(answer.download);
    if (answer.action === "findings") find("#look-alikes").scrollIntoView();
    if (answer.html?.errors) {
      ends = answer.n + 1;
      compare.close();
      find("#errors").scrollIntoView({block: "nearest"});
      return;
    }
    if (answer.n >= ends) find("#errors").replaceChildren();
    const found = "wall" in (answer.html ?? {}) ? `${ids().length} look-alikes` : "Answered";
    tell(since === undefined ? found : `${found} in ${((heard - since) / 1000).toFixed(1)} s`);
  });

  function put(answer) {
    for (const [id, html] of Object.entries(answer.html ?? {})) find(`#${id}`).innerHTML = html;
    find("#box-tools").hidden = !find(".card .boxes");
    const replaces = "picture" in answer;
    if (replaces) replace(answer);
    if ("evidence" in answer) {
      evidence = answer.evidence;
      explain(replaces ? "" : chosen);
    }
    if ("place" in answer) chart.query = answer.place;
  }

  /** Another picture, or none: its flags come into view, and the focus is not lost with what was there. */
  function replace(answer) {
    about = answer.about;
    compare.close();
    viewer.show(picture = answer.picture);
    root.toggleAttribute("data-answered", Boolean(picture));
    legend.textContent = about && !picture ? "= asked for and there" : "= on both";
    if (!picture) return;
    (narrow.matches ? find("#alerts") : root).scrollIntoView();
    if (document.activeElement === document.body) find("#film").focus({preventScroll: true});
  }

  // What Gradio could not have answered: it does not say which, but what a full queue refuses is the last.
  const sent = () => [...asked.keys()].filter((n) => asked.get(n).sent);
  document.addEventListener("cbmir-failed", () => {
    const text = "The server did not answer: it has too much to do, or it failed. Try again in a moment.";
    if (sent().length) fail(sent().slice(-1), text);
    else refuse(text);
  });
  let looking = false;
  setInterval(async () => {
    if (!asked.size || looking) return;
    looking = true;
    const how = {method: "HEAD", cache: "no-store", signal: AbortSignal.timeout(PATIENCE)};
    const there = await fetch("page/page.js", how).then(({ok}) => ok, () => false);
    looking = false;
    if (!asked.size) return; // answered meanwhile
    if (!there) {
      fail([...asked.keys()], "The server cannot be reached. What is on this page was answered before; open it anew later.");
    } else if (sent().length && performance.now() - heard > LONGEST) {
      fail(sent(), "The server has not answered for two minutes. Try again, or ask who runs it.");
    }
  }, BEAT);

  // Gradio tells the place in its queue inside the channel, where it is not seen.
  const channel = document.querySelector("#channel");
  new MutationObserver(() => {
    const place = channel.textContent.match(/queue: (\d+)\/(\d+)/);
    if (!place || !sent().length) return;
    const said = `Waiting: place ${place[1]} of ${place[2]}`;
    const last = asked.get(sent().at(-1));
    if (last.said === said) return;
    [last.said, heard] = [said, performance.now()];
    tell();
  }).observe(channel, {subtree: true, childList: true, characterData: true});

  const acts = {
    example: ({at}) => ask({action: "example", at: Number(at)}, "Reading …"),
    member: ({at}) => ask({action: "member", at: Number(at)}),
    like: ({id}) => ask({action: "like", id}),
    "like-this": () => { compare.close(); acts.like({id: compare.id}); },
    compare: ({id}) => compare.open(id),
    previous: () => compare.step(-1),
    next: () => compare.step(1),
    shut: () => compare.close(),
    report: () => ask({action: "report", chosen}),
    boxes: () => {
      const on = root.toggleAttribute("data-boxes");
      for (const button of root.querySelectorAll("[data-act=boxes]")) button.setAttribute("aria-pressed", on);
    },
    findings: () => {
      const labels = [...root.querySelectorAll(".chip[aria-pressed=true]")].map((chip) => chip.dataset.label);
      if (labels.length) ask({action: "findings", labels});
      else refuse("Choose one or several findings first.");
    },
  };

  root.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const {act, evidence: key, label, page} = button.dataset;
    if (act) acts[act](button.dataset);
    if (key) explain(key === chosen ? "" : key);
    if (label) button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    if (page) turnTo(page);
  });

  // A card's film is square, its picture need not be: the boxes lie over the picture alone.
  root.addEventListener("load", ({target: image}) => {
    const layer = image.closest(".shown")?.querySelector(".boxes");
    if (!layer) return;
    const {naturalWidth: width, naturalHeight: height} = image;
    [layer.style.width, layer.style.height] = [width, height].map((side) => `${100 * side / Math.max(width, height)}%`);
  }, true);

  let waiting = 0;
  for (const id of ["k", "having", "without", "view", "exclude", "patient"]) {
    find(`#${id}`).addEventListener("change", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        if (about || sent().length) ask({action: "search"}); // else there is nothing to search for
      }, SLOW);
    });
  }
  find("#k").addEventListener("input", () => { find("#k-shown").textContent = find("#k").value; });

  function turnTo(page) {
    for (const section of root.querySelectorAll(".page")) section.hidden = section.dataset.page !== page;
    for (const button of root.querySelectorAll("nav button")) {
      if (button.dataset.page === page) button.setAttribute("aria-current", "page");
      else button.removeAttribute("aria-current");
    }
    if (page === "map") chart.open().catch(() => refuse("The map could not be had from the server. Try again."));
  }

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const wear = (name) => {
    document.documentElement.dataset.theme = name;
    document.body.classList.toggle("dark", name === "dark");
    chart.draw();
  };
  find("#theme").addEventListener("click", () =>
    wear(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => wear(dark.matches ? "dark" : "light"));
  wear(dark.matches ? "dark" : "light");

  listenForFiles(root, open);
  document.documentElement.lang = "en";
  root.dataset.ready = "yes";
}

function save({name, html}) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([html], {type: "text/html"}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the browser has taken it by then
}
