// Elements, and figures as people read them.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A new element: properties, then children. Names with a dash are attributes. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export const NOTHING = "–"; // where a figure has no meaning

/** 1234.5 -> "1,235"; below 100 with one digit behind the point, unless it is a count. */
export function number(value, digits = value < 100 ? 1 : 0) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const count = (value) => (value == null ? NOTHING : number(value, 0));
export const rate = (value) => (value == null ? NOTHING : number(value));
export const percent = (share) => (share == null ? NOTHING : `${number(100 * share, 0)} %`);

/** Milliseconds, or seconds from one on. */
export function duration(ms) {
  if (ms == null) return NOTHING;
  return ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000, 2)} s`;
}

/** A line for screen readers alone. */
export function announce(text) {
  byId("said").textContent = text;
}
