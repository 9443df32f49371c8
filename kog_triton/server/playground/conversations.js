// Conversations in this browser's own storage, one entry each, and as files.

const PREFIX = "kog.conversation.";

/** mode: "chat" or "text". Messages: {role, content} and, of answers, {thought, figures, curve, finish, error}. */
export function newConversation(mode) {
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), mode, created: Date.now(), messages: [] };
}

/** All that are kept, the newest first. What cannot be read is left out. */
export function keptConversations() {
  const found = [];
  for (const key of Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))) {
    try {
      found.push(JSON.parse(localStorage.getItem(key)));
    } catch {
      localStorage.removeItem(key);
    }
  }
  return found.sort((a, b) => b.created - a.created);
}

/** False if the browser has no room for it. */
export function keep(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function forget(id) {
  localStorage.removeItem(PREFIX + id);
}

export function titleOf(conversation) {
  const first = conversation.messages[0]?.content ?? "";
  return first.trim().split("\n", 1)[0].slice(0, 80) || "New conversation";
}

export function asMarkdown(conversation, model) {
  const lines = [`# ${titleOf(conversation)}`, "", `${model}, ${new Date(conversation.created).toISOString().slice(0, 16).replace("T", " ")}`, ""];
  for (const message of conversation.messages) {
    lines.push(message.role === "user" ? "## Prompt" : "## Answer", "", message.content, "");
    if (message.figures?.rate) lines.push(`*${message.figures.rate} tokens/s, ${message.figures.tokens} tokens*`, "");
    if (message.error) lines.push(`*${message.error}*`, "");
  }
  return lines.join("\n");
}

/** Hand a text to the browser as a file. */
export function saveAs(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
