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
