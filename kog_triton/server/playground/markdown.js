// A closed block of Markdown as nodes that are safe to show: no scripts, no styles, nothing that is fetched.

import { Marked } from "./vendor/marked/marked.esm.js";
import "./vendor/dompurify/purify.min.js";
import { CodeBlock } from "./code.js";
import { make } from "./dom.js";

const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  renderer: {
    code: ({ text, lang }) => `<pre data-language="${escaped((lang ?? "").split(/\s/)[0])}">${escaped(text)}</pre>`,
    html: ({ text }) => escaped(text), // tags are text: a model that says <b> means to be read
  },
});

const TAGS = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" ");
const SAFE = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

/** The nodes of a block. */
export function render(text) {
  const nodes = globalThis.DOMPurify.sanitize(marked.parse(text), SAFE);
  for (const pre of nodes.querySelectorAll("pre")) {
    const block = new CodeBlock(pre.dataset.language ?? "");
    block.set(pre.textContent);
    pre.replaceWith(block.element);
  }
  for (const link of nodes.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of nodes.querySelectorAll("table")) {
    const box = make("div", { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const heading of nodes.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const level = Math.min(6, Number(heading.tagName[1]) + 2); // below the page's own headings
    const lower = make(`h${level}`, { className: `as-${heading.tagName.toLowerCase()}` });
    lower.append(...heading.childNodes);
    heading.replaceWith(lower);
  }
  return nodes;
}
