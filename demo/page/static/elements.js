// What both of our components build their page with; it stands before their own script.
let value = {}; // of the component, which comes as JSON
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

