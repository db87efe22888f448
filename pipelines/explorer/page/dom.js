// Elements of the page.

export const $ = (id) => document.getElementById(id);

export function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) {
    made.textContent = text;
  }
  made.append(...children);
  return made;
}

export function button(text, label, click) {
  const made = element("button", text);
  made.type = "button";
  if (label) {
    made.setAttribute("aria-label", label);
  }
  made.addEventListener("click", click);
  return made;
}
