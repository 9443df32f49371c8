// Code with its colours, its language and a button that copies it.

import highlight from "./vendor/highlight/core.min.js";
import bash from "./vendor/highlight/languages/bash.min.js";
import cpp from "./vendor/highlight/languages/cpp.min.js";
import go from "./vendor/highlight/languages/go.min.js";
import javascript from "./vendor/highlight/languages/javascript.min.js";
import json from "./vendor/highlight/languages/json.min.js";
import python from "./vendor/highlight/languages/python.min.js";
import rust from "./vendor/highlight/languages/rust.min.js";
import xml from "./vendor/highlight/languages/xml.min.js";
import yaml from "./vendor/highlight/languages/yaml.min.js";
import "./vendor/dompurify/purify.min.js";
import { announce, make } from "./dom.js";

const LANGUAGES = { bash, cpp, go, javascript, json, python, rust, xml, yaml };
for (const [name, language] of Object.entries(LANGUAGES)) highlight.registerLanguage(name, language);
highlight.registerAliases(["c", "cuda", "cu", "java"], { languageName: "cpp" });
highlight.registerAliases(["typescript", "ts", "tsx"], { languageName: "javascript" });
const MOST = 60_000; // characters that are coloured: beyond, a frame would be late
const PLAIN = 4_096; // characters of a piece of text that is still growing: a longer one is laid out again whole

const STATEMENT = /^\s*(def|class|for|while|if|fn|func|function|import|from|const|let|public|static|#include)\b.*[:;{})>"]\s*$/m;

const SPANS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

/** Nodes or text of code in a language, coloured where that is known and the text is short enough. */
export function colored(text, language) {
  if (text.length > MOST || !highlight.getLanguage(language)) return text;
  return globalThis.DOMPurify.sanitize(highlight.highlight(text, { language }).value, SPANS);
}

/** The language of a text that may be code; "" if it seems to be prose. */
export function guess(text) {
  if (!STATEMENT.test(text)) return "";
  return highlight.highlightAuto(text.slice(0, 2000), ["python", "javascript", "cpp", "go", "rust"]).language ?? "";
}

/** A button that copies what `text` gives. */
export function copyButton(text, label) {
  const button = make("button", { type: "button", className: "quiet copy", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
      announce("Copied");
    } catch {
      button.textContent = "Not allowed";
      announce("The browser does not let this page copy");
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

/** A block of code: `growing` while it comes, then `set` with colours. */
export class CodeBlock {
  constructor(language) {
    this.language = language;
    this.code = make("code");
    const pre = make("pre", { tabIndex: 0, role: "region", "aria-label": `Code: ${language || "plain"}` }, this.code);
    const head = make("figcaption", {}, make("span", {}, language || "text"));
    head.append(copyButton(() => this.code.textContent, "Copy this code"));
    this.element = make("figure", { className: "code" }, head, pre);
    this.growing = new GrowingText(this.code);
  }

  /** The whole text: with colours. */
  set(text) {
    this.code.replaceChildren(colored(text, this.language));
  }
}

/** Text that is appended to, in pieces: a browser lays out again the piece that grew alone. */
export class GrowingText {
  constructor(parent) {
    this.parent = parent;
    this.node = null;
  }

  append(text) {
    let from = 0;
    while (from < text.length) {
      if (!this.node) {
        this.node = document.createTextNode("");
        this.parent.append(make("span", { className: "piece" }, this.node));
      }
      let end = text.length;
      if (this.node.length > PLAIN) {
        const line = text.indexOf("\n", from);
        if (line >= 0) end = line + 1;
      }
      this.node.appendData(text.slice(from, end));
      if (end < text.length || (this.node.length > PLAIN && text.endsWith("\n"))) this.node = null;
      from = end;
    }
  }
}
