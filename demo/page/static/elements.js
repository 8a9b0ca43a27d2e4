// Helpers of our components, loaded before each component's own script.
let value = {}; // of the viewer or the similar images, parsed from JSON
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

// Position an element by a box (x0, y0, x1, y1) in fractions of its parent.
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

// A report's text with the names of findings marked.
const words = (report) => report.map(([text, marked]) => (marked ? make("mark", {}, text) : text));
