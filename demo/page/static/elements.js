// What our components build their page with; it stands before their own script.
let value = {}; // of the viewer and of the similar images, which comes as JSON
const read = () => { value = JSON.parse(props.value || "{}"); };
const find = (selector) => element.querySelector(selector);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// A box (x0, y0, x1, y1) in fractions of what it lies on.
function place(part, [x0, y0, x1, y1]) {
  Object.assign(part.style, {
    left: `${100 * x0}%`, top: `${100 * y0}%`, width: `${100 * (x1 - x0)}%`, height: `${100 * (y1 - y0)}%`,
  });
}

function outline(parent, box, kind) {
  const made = make("span", {class: kind});
  place(made, box);
  parent.append(made);
  return made;
}

// A report's words, with the names of findings marked.
const words = (report) => report.map(([text, marked]) => (marked ? make("mark", {}, text) : text));
