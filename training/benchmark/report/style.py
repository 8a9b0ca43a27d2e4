"""Style and script of index.html. The page reads the same without the script, which sorts tables."""

STYLE = """
:root {
  --ink: #1b1f24; --muted: #57606a; --paper: #ffffff; --panel: #f6f8fa; --line: #d5dbe1; --strong: #8c959f;
  --link: #0550ae; --notice: #fff8e1; --notice-line: #9a6700;
  color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ed; --muted: #a3acb7; --paper: #14171b; --panel: #1c2127; --line: #353c45; --strong: #6e7883;
    --link: #82b7ff; --notice: #2a2410; --notice-line: #d4a72c;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2.5rem 1.5rem 5rem; max-width: 80rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
}
h1, h2, h3 { line-height: 1.25; text-wrap: pretty; }
h1 { margin: 0 0 1.5rem; font-size: clamp(1.6rem, 1.2rem + 1.8vw, 2.3rem); letter-spacing: -0.015em; }
h2 { margin: 3.25rem 0 0.9rem; padding-bottom: 0.35rem; border-bottom: 1px solid var(--line); font-size: 1.4rem; }
h3 { margin: 1.9rem 0 0.6rem; font-size: 1.06rem; }
p, li, figcaption { max-width: 46rem; overflow-wrap: anywhere; }
p { margin: 0.7rem 0; }
ul, ol { padding-left: 1.3rem; }
li { margin: 0.3rem 0; }
a { color: var(--link); text-underline-offset: 0.15em; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
nav { margin: 0 0 1.75rem; font-size: 0.92rem; }
nav h2 { margin: 0 0 0.35rem; padding: 0; border: 0; font-size: 0.92rem; color: var(--muted); }
nav ol { display: flex; flex-wrap: wrap; gap: 0.2rem 1.4rem; margin: 0; padding: 0; list-style: none; }
nav li { margin: 0; }
.notice {
  padding: 0.7rem 1rem; background: var(--notice); border-left: 4px solid var(--notice-line);
  border-radius: 0 6px 6px 0;
}
.file { margin-left: 0.4rem; font-size: 0.8rem; font-weight: 400; }
pre {
  margin: 0.8rem 0; padding: 0.9rem 1rem; overflow-x: auto; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; font: 0.88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.scroll { width: fit-content; max-width: 100%; overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums lining-nums; }
th, td { padding: 0.42rem 0.55rem; text-align: left; vertical-align: top; }
thead th { border-bottom: 1px solid var(--strong); background: var(--panel); vertical-align: bottom; font-weight: 600; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody th { position: sticky; left: 0; min-width: 9rem; background: var(--paper); font-weight: 500; }
thead th:first-child { position: sticky; left: 0; }
tbody tr:hover > * { background: var(--panel); }
.number { text-align: right; white-space: nowrap; }
thead .number, .number small { white-space: normal; }
strong { font-weight: 750; }
small { display: block; color: var(--muted); font-size: 0.86em; line-height: 1.35; }
.notes { margin: 0.6rem 0 0; color: var(--muted); font-size: 0.88rem; }
figure { margin: 2rem 0; }
.card {
  padding: 1rem; overflow-x: auto; background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
  text-align: center;
}
.card img { max-width: 100%; height: auto; }
figcaption { margin-top: 0.6rem; color: var(--muted); font-size: 0.92rem; }
th button {
  all: unset; cursor: pointer; font: inherit; text-align: inherit;
  text-decoration: underline dotted var(--strong); text-underline-offset: 0.25em;
}
th button:focus-visible { outline: 2px solid var(--link); outline-offset: 3px; }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
@media (max-width: 40rem) {
  body { padding: 1.25rem 1rem 3rem; }
  table { font-size: 0.84rem; }
  th, td { padding: 0.4rem 0.5rem; }
  tbody th { min-width: 7rem; max-width: 9rem; }
  .card { padding: 0.4rem; text-align: left; }
  .card img { max-width: 180%; }
}
@media print {
  :root {
    --ink: #000000; --muted: #333333; --paper: #ffffff; --panel: #ffffff; --line: #bbbbbb; --strong: #000000;
    --link: #000000; --notice: #ffffff; --notice-line: #000000;
  }
  @page { size: A4 landscape; margin: 12mm; }
  html { font-size: 9pt; }
  body { max-width: none; padding: 0; }
  nav, .file { display: none; }
  .scroll { width: auto; overflow: visible; border: 0; }
  table { font-size: 7.5pt; }
  th, td { padding: 2pt 4pt; }
  tbody th, thead th:first-child { position: static; }
  h2, h3 { break-after: avoid; }
  tr, figure { break-inside: avoid; }
}
"""

SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], original = Array.from(body.rows);
  table.querySelectorAll("thead th").forEach((head, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort; a third click restores the order";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const numeric = head.classList.contains("number");
      const [first, second] = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
      const now = head.ariaSort === first ? second : head.ariaSort === second ? null : first;
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      if (now) head.setAttribute("aria-sort", now);
      const sign = now === "descending" ? -1 : 1;
      const value = (row) => Number(row.cells[index].dataset.value ?? NaN);
      const compare = (a, b) => {
        if (!numeric) return sign * a.cells[index].textContent.localeCompare(b.cells[index].textContent);
        const [x, y] = [value(a), value(b)];
        return Number.isNaN(x) - Number.isNaN(y) || sign * (x - y) || 0;
      };
      body.append(...(now ? [...original].sort(compare) : original));
    });
  });
}
"""
