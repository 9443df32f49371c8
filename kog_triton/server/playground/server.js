// What the page asks of the server: JSON, and streams of server-sent events. All addresses are relative to the page.

const KEY = "kog.key";

/** status 0: nobody answered; code: the server's word for what is wrong, or one of "lost", "cut". */
export class ServerError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Keep the API key until the tab is closed. */
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function reach(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it running?", 0, "lost");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  const message = told.error?.message ?? told.status ?? `The server answered ${response.status}.`;
  throw new ServerError(message, response.status, told.error?.code ?? null);
}

/** How the server was opened. */
export async function getProps() {
  return (await reach("props", {})).json();
}

/** "ok", or what keeps the server from taking requests: "loading", "restarting", "draining", "lost". */
export async function getState() {
  try {
    const response = await fetch("ready", { cache: "no-store" });
    return (await response.json()).status;
  } catch {
    return "lost";
  }
}

/** The events of a streamed answer, in lists: those of one read. ServerError if it breaks off. */
export async function* stream(path, body, signal) {
  const response = await reach(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let ended = false;
  while (!ended) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection broke before the answer was complete.", 0, "cut");
    }
    if (part.done) throw new ServerError("The stream ended before the answer was complete.", 0, "cut");
    const pieces = (rest + part.value).split("\n\n");
    rest = pieces.pop();
    const found = [];
    let broken = null;
    for (const piece of pieces) {
      if (!piece.startsWith("data: ")) continue; // a comment that keeps the connection open
      if (piece === "data: [DONE]") {
        ended = true;
        break;
      }
      const event = JSON.parse(piece.slice(6));
      if (event.error) {
        broken = new ServerError(event.error.message, 500, event.error.code);
        break;
      }
      found.push(event);
    }
    if (found.length) yield found;
    if (broken) throw broken;
  }
}
