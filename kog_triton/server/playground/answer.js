// One answer as it comes: text is appended to nodes once a frame, Markdown parsed once a block is closed.

import { Blocks } from "./blocks.js";
import { CodeBlock, GrowingText, colored, copyButton, guess } from "./code.js";
import { count, duration, make, percent, rate } from "./dom.js";
import { render } from "./markdown.js";

/** The figures of an answer that has ended, from the server's `timings`. */
export function figuresOf(timings) {
  return {
    rate: timings.predicted_per_second,
    ttft_ms: timings.prompt_ms === null ? null : timings.queue_ms + timings.prompt_ms,
    tokens: timings.predicted_n,
    cached: timings.cache_n,
    kv_depth: timings.kv_depth,
    mbu: timings.mbu,
    itl_p50_us: timings.itl_p50_us,
    itl_p99_us: timings.itl_p99_us,
  };
}

const ENDS = { stop: "", length: "ended by the limit of tokens", abort: "stopped", tool_calls: "asks for a tool" };

function summary(message) {
  const f = message.figures;
  const parts = [];
  if (f) {
    parts.push(`${rate(f.rate)} tokens/s`, `${count(f.tokens)} tokens`, `first after ${duration(f.ttft_ms)}`);
    if (f.cached) parts.push(`${count(f.cached)} of the prompt reused`);
    if (f.mbu != null) parts.push(`MBU ${percent(f.mbu)}`);
  }
  const end = ENDS[message.finish] ?? message.finish;
  if (end) parts.push(end);
  return parts.join(" · ");
}

export class AnswerView {
  /** given: the text that is continued, or null in a conversation; retry: called to ask again. */
  constructor(given, retry) {
    this.given = given;
    this.text = "";
    this.thought = "";
    this.pending = "";
    this.pendingThought = "";
    this.frame = 0;
    this.blocks = new Blocks();
    this.open = null; // {element, code, growing}: of the block that is open
    this.body = make("div", { className: "body" });
    this.foot = make("footer");
    this.retry = make("button", { type: "button", className: "quiet" }, "Ask again");
    this.retry.addEventListener("click", retry);
    this.element = make("article", { className: "answer", "aria-busy": "true" }, make("h2", { className: "hidden" }, "Answer"), this.body, this.foot);
    if (given !== null) this.#startText();
  }

  /** More of the answer, and of what the model thinks before it. */
  add(text, thought = "") {
    this.pending += text;
    this.pendingThought += thought;
    this.frame ||= requestAnimationFrame(() => this.#show());
  }

  /** The answer has ended: colours for what was open, figures, buttons. */
  end(message) {
    cancelAnimationFrame(this.frame);
    this.#show();
    if (this.thinking) this.thinking.open = false;
    if (this.given === null) {
      this.#replaceOpen(this.blocks.end());
      if (isJson(this.text)) this.#showJson();
    } else {
      const language = guess(this.given + this.text);
      this.code.replaceChildren(make("span", { className: "given" }, colored(this.given, language)), colored(this.text, language));
    }
    if (message.error) this.body.append(make("p", { className: "wrong", role: "alert" }, message.error));
    this.foot.append(make("p", {}, summary(message)));
    if (this.text) this.foot.append(copyButton(() => this.text, "Copy this answer"));
    this.foot.append(this.retry);
    this.element.removeAttribute("aria-busy");
  }

  #show() {
    this.frame = 0;
    const { pending, pendingThought } = this;
    this.pending = this.pendingThought = "";
    this.text += pending;
    if (pendingThought) this.#think(pendingThought);
    if (!pending) return;
    if (this.given !== null) {
      this.growing.append(pending);
      return;
    }
    const closed = this.blocks.add(pending);
    const code = this.blocks.code;
    if (!closed.length && this.open && this.open.code === (code !== null)) this.open.growing.append(pending);
    else this.#replaceOpen(closed);
  }

  /** What was open is closed; what is open now grows in an element of its own. */
  #replaceOpen(closed) {
    this.open?.element.remove();
    this.open = null;
    for (const block of closed) this.body.append(render(block));
    const { code, open } = this.blocks;
    if (code) {
      const block = new CodeBlock(code.language);
      block.growing.append(code.text);
      this.open = { element: block.element, code: true, growing: block.growing };
    } else if (open.trim()) {
      const element = make("div", { className: "open" });
      this.open = { element, code: false, growing: new GrowingText(element) };
      this.open.growing.append(open);
    }
    if (this.open) this.body.append(this.open.element);
  }

  #showJson() {
    const block = new CodeBlock("json");
    block.set(this.text.trim());
    this.body.replaceChildren(block.element);
  }

  #think(text) {
    if (!this.thinking) {
      const inside = make("div", { className: "open" });
      this.thinking = make("details", { className: "thinking", open: true }, make("summary", {}, "Reasoning"), inside);
      this.thoughts = new GrowingText(inside);
      this.body.before(this.thinking);
    }
    this.thought += text;
    this.thoughts.append(text);
  }

  #startText() {
    this.code = make("code", {}, make("span", { className: "given" }, this.given));
    this.growing = new GrowingText(this.code);
    const pre = make("pre", { className: "continued", tabIndex: 0, role: "region", "aria-label": "The prompt and its continuation" }, this.code);
    this.body.append(pre);
  }
}

function isJson(text) {
  if (!/^\s*[[{]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** What the user said. */
export function question(text) {
  return make("article", { className: "question" }, make("h2", { className: "hidden" }, "Prompt"), make("p", {}, text));
}
