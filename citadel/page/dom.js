// The little that all parts of the page need of the document.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Writes only what differs, so that a screen reader is not told the same again each second.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const bytes = (count) => `${(count / 1e9).toFixed(1)} GB`;

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return `${Math.round(seconds / 60)} min`;
}
