// The page: what is asked, what comes, and how the server is.

import { AnswerView, figuresOf, question } from "./answer.js";
import { asMarkdown, forget, keep, keptConversations, newConversation, saveAs, titleOf } from "./conversations.js";
import { announce, byId, make, number, rate } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { Figures } from "./figures.js";
import { Rate } from "./rate.js";
import { ServerError, getProps, getState, setKey, stream } from "./server.js";
import { CONTINUED, Settings } from "./settings.js";

const LOOK_MS = 5000; // between looks at the server; each second while something is wrong
const STATES = {
  ok: "ready", loading: "the model is loading", restarting: "the engine starts again",
  draining: "the server is shutting down", lost: "the server does not answer", key: "wants an API key",
};

let props = null;
let conversation = newConversation("chat");
let nextLook = 0;
let running = null; // an AbortController while an answer comes
const figures = new Figures();
const settings = new Settings((summary) => {
  byId("changed").textContent = summary.join(" · ");
  byId("settings-open").dataset.count = summary.length || "";
});
const prompt = byId("prompt");
const scroll = byId("scroll");

// ---- the server ----

async function open() {
  try {
    props = await getProps();
  } catch (error) {
    if (error.status !== 401) return;
    byId("key-error").textContent = byId("key-form").elements.key.value ? error.message : "";
    if (!byId("key").open) byId("key").showModal();
    return;
  }
  const context = props.default_generation_settings.n_ctx;
  figures.context = context;
  byId("model").textContent = props.model_alias.split("/").at(-1);
  byId("model").title = props.model_alias;
  const where = [`${props.backend.name} backend`, props.gpu ? props.gpu.toUpperCase() : "CPU", `${number(context, 0)} positions`];
  byId("where").textContent = where.join(" · ");
  byId("where").title = props.backend.reason;
  settings.setDefaults(props.default_generation_settings.params);
  const chat = document.querySelector("[name=mode][value=chat]");
  chat.disabled = !props.chat_template;
  chat.parentElement.title = chat.disabled ? "This model has no chat template: it continues texts" : "";
  if (chat.disabled && !conversation.messages.length) setMode("text");
}

async function look() {
  const state = await getState();
  if (state === "ok" && !props) await open();
  const shown = state === "ok" && !props ? "key" : state;
  const changed = byId("state").dataset.state !== shown;
  if (changed) {
    byId("state").dataset.state = shown;
    byId("state-text").textContent = STATES[shown] ?? shown;
    byId("banner").hidden = shown === "ok" || shown === "key";
    byId("banner").textContent = byId("banner").hidden ? "" : `${sentence(STATES[shown] ?? shown)}. This page looks again each second.`;
  }
  clearTimeout(nextLook);
  nextLook = setTimeout(look, shown === "ok" ? LOOK_MS : 1000);
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1);

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(event.target.elements.key.value.trim());
  open().then(() => props && byId("key").close());
});

// ---- asking ----

function mode() {
  return document.querySelector("[name=mode]:checked").value;
}

function setMode(name) {
  document.querySelector(`[name=mode][value=${name}]`).checked = true;
  prompt.placeholder = name === "chat" ? "Ask something" : "Begin a text; the model continues it";
  showExamples();
}

function request(text) {
  const shared = { ...settings.fields, stream: true, stream_options: { include_usage: true } };
  if (conversation.mode === "text") return ["v1/completions", { prompt: text, max_tokens: CONTINUED, ...shared }];
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const said = conversation.messages.filter((m) => m.role === "user" || m.content);
  return ["v1/chat/completions", { messages: [...system, ...said.map(({ role, content }) => ({ role, content }))], ...shared }];
}

async function send(text) {
  if (running || !text.trim() || !props) return;
  if (settings.wrong) {
    byId("changed").textContent = settings.wrong;
    byId("settings").showModal();
    return;
  }
  if (conversation.messages.length && conversation.mode !== mode()) conversation = newConversation(mode());
  if (!conversation.messages.length) {
    conversation.mode = mode();
    byId("thread").replaceChildren();
  }
  conversation.messages.push({ role: "user", content: text });
  if (conversation.mode === "chat") byId("thread").append(question(text));
  prompt.value = "";
  size();
  await answer();
}

async function answer() {
  const asked = conversation;
  const text = asked.messages.at(-1).content;
  const [path, body] = request(text);
  const message = { role: "assistant", content: "", thought: "", figures: null, curve: [], finish: null, error: null };
  const view = new AnswerView(asked.mode === "text" ? text : null, () => again(asked, message));
  byId("thread").append(view.element);
  showEmpty();
  setRunning(new AbortController());
  figures.begin();
  announce("The answer begins");
  follow(true);
  const speed = new Rate();
  let ttft = null;
  let last = null; // the server's last word on how far it is
  try {
    for await (const events of stream(path, body, running.signal)) {
      for (const event of events) {
        const choice = event.choices[0];
        if (event.progress) {
          last = event.progress;
          speed.add(event.progress.elapsed_ms, event.progress.completion_tokens);
          ttft ??= event.progress.elapsed_ms;
        }
        const part = choice?.delta?.content ?? choice?.text ?? "";
        const thought = choice?.delta?.reasoning_content ?? "";
        message.content += part;
        message.thought += thought;
        if (part || thought) view.add(part, thought);
        if (choice?.finish_reason) message.finish = choice.finish_reason;
        if (event.timings) message.figures = figuresOf(event.timings);
      }
      if (last) figures.live(speed, ttft, last);
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish = "abort";
    else if (error instanceof ServerError) {
      message.error = sentence(error.message);
      look();
    } else throw error;
  } finally {
    setRunning(null);
    byId("figures").dataset.measured = speed.average ?? ""; // by the events alone, whatever the server says at the end
    message.curve = speed.curve.map(Math.round);
    if (last) message.figures ??= { rate: speed.average, tokens: speed.tokens, ttft_ms: ttft, kv_depth: last.kv_depth };
    view.end(message);
    figures.end(message.figures, message.curve);
    asked.messages.push(message);
    if (!keep(asked)) byId("changed").textContent = "The browser’s storage is full: this conversation is not kept.";
    showConversations();
    const speedText = message.figures ? `${number(message.figures.tokens, 0)} tokens, ${rate(message.figures.rate)} a second` : "";
    announce(message.error ?? (message.finish === "abort" ? `Stopped. ${speedText}` : `The answer is complete. ${speedText}`));
  }
}

/** Ask once more what the answer `message` was for; what came behind it goes. */
function again(asked, message) {
  if (running || asked !== conversation) return;
  asked.messages.length = asked.messages.indexOf(message);
  show(asked);
  answer();
}

function setRunning(controller) {
  running = controller;
  byId("history").inert = Boolean(running);
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
}

// ---- what is shown ----

function show(which) {
  conversation = which;
  const articles = [];
  which.messages.forEach((message, i) => {
    if (message.role === "user") {
      if (which.mode === "chat") articles.push(question(message.content));
      return;
    }
    const view = new AnswerView(which.mode === "text" ? which.messages[i - 1].content : null, () => again(which, message));
    view.add(message.content, message.thought);
    view.end(message);
    articles.push(view.element);
  });
  byId("thread").replaceChildren(...articles);
  const last = which.messages.findLast((message) => message.figures);
  figures.end(last?.figures, last?.curve);
  setMode(which.mode);
  showEmpty();
  showConversations();
  follow(true);
}

function showEmpty() {
  byId("empty").hidden = conversation.messages.length > 0;
}

function showExamples() {
  byId("examples").replaceChildren(
    ...EXAMPLES[mode()].map((example) => {
      const button = make("button", { type: "button" }, make("b", {}, example.title), make("span", {}, example.prompt));
      button.addEventListener("click", () => {
        if (example.schema) settings.set("schema", JSON.stringify(example.schema, null, 2));
        prompt.value = example.prompt;
        size();
        prompt.focus();
      });
      return make("li", {}, button);
    }),
  );
}

function showConversations() {
  const entries = keptConversations().map((kept) => {
    const title = titleOf(kept);
    const button = make("button", { type: "button" }, title);
    if (kept.id === conversation.id) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => running || (show(kept), closeHistory()));
    const remove = make("button", { type: "button", className: "icon", "aria-label": `Delete: ${title}` }, "×");
    remove.addEventListener("click", () => {
      if (running) return;
      forget(kept.id);
      if (kept.id === conversation.id) show(newConversation(mode()));
      else showConversations();
    });
    return make("li", {}, button, remove);
  });
  byId("conversations").replaceChildren(...entries);
}

const closeHistory = () => byId("history").matches(":popover-open") && byId("history").hidePopover();

/** Stay at the end of the text while the reader is there. */
let following = true;
function follow(now = following) {
  following = now;
  if (following) scroll.scrollTop = conversation.messages.length ? scroll.scrollHeight : 0;
}
scroll.addEventListener("scroll", () => (following = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80), { passive: true });
new ResizeObserver(() => follow()).observe(byId("thread"));

/** The prompt is as high as its text. */
function size() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight / 3)}px`;
}

// ---- controls ----

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(prompt.value);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => {
  if (running) return;
  show(newConversation(mode()));
  closeHistory();
  prompt.focus();
});
byId("settings-open").addEventListener("click", () => byId("settings").showModal());
byId("mode").addEventListener("change", () => setMode(mode()));
prompt.addEventListener("input", size);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(prompt.value);
});
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") running?.abort();
  const writing = event.target.closest?.("input, textarea, select");
  if (event.key === "/" && !writing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    prompt.focus();
  }
});

const EXPORTS = {
  copy: async () => {
    await navigator.clipboard.writeText(asMarkdown(conversation, props?.model_alias ?? ""));
    announce("Copied");
  },
  markdown: () => saveAs("conversation.md", "text/markdown", asMarkdown(conversation, props?.model_alias ?? "")),
  json: () => saveAs("conversation.json", "application/json", JSON.stringify(conversation, null, 2)),
  print: () => window.print(),
};
byId("export").addEventListener("click", (event) => {
  const chosen = event.target.dataset.export;
  if (!chosen) return;
  byId("export").hidePopover();
  EXPORTS[chosen]();
});

const theme = byId("theme");
theme.value = localStorage.getItem("kog.theme") ?? "";
const applyTheme = () => document.documentElement.style.setProperty("color-scheme", theme.value || "light dark");
theme.addEventListener("change", () => {
  localStorage.setItem("kog.theme", theme.value);
  applyTheme();
});

applyTheme();
showExamples();
showConversations();
look();
