// The figures of the request that runs, or of the last one: the head of the page.

import { NOTHING, byId, count, duration, number, percent, rate } from "./dom.js";

const EVERY_MS = 100; // between figures that change: a reader follows ten a second

export class Figures {
  constructor() {
    this.context = null; // positions of a slot
    this.shownAt = -Infinity;
  }

  /** A request was sent. */
  begin() {
    this.#put({});
    this.drawCurve([]);
    byId("figures").dataset.state = "running";
  }

  /** While it runs: `speed` is a Rate, `progress` the server's word in the last event. */
  live(speed, ttftMs, progress, now = performance.now()) {
    if (now - this.shownAt < EVERY_MS) return;
    this.shownAt = now;
    this.#put({ rate: speed.average, tokens: speed.tokens, ttft_ms: ttftMs, kv_depth: progress.kv_depth });
    this.drawCurve(speed.curve);
  }

  /** It has ended, with these figures. */
  end(figures, curve) {
    this.shownAt = -Infinity;
    this.#put(figures ?? {});
    this.drawCurve(curve ?? []);
    byId("figures").dataset.state = figures ? "ended" : "";
  }

  #put(f) {
    byId("rate-value").textContent = rate(f.rate);
    byId("tokens").textContent = count(f.tokens);
    byId("ttft").textContent = duration(f.ttft_ms);
    byId("itl").textContent = f.itl_p50_us == null ? NOTHING : `${micro(f.itl_p50_us)} / ${micro(f.itl_p99_us)}`;
    byId("kv").textContent = count(f.kv_depth);
    byId("kv-share").value = f.kv_depth && this.context ? f.kv_depth / this.context : 0;
    byId("mbu").textContent = percent(f.mbu);
    byId("mbu-share").value = f.mbu ?? 0;
  }

  drawCurve(values) {
    const most = Math.max(...values, 0);
    const svg = byId("curve");
    const [area, line] = svg.querySelectorAll("path");
    byId("curve-text").textContent = most ? `peak ${rate(most)}` : "";
    if (!values.length) {
      area.setAttribute("d", "");
      line.setAttribute("d", "");
      return;
    }
    const shown = values.length > 1 ? values : [values[0], values[0]];
    const points = shown.map((value, i) => `${((100 * i) / (shown.length - 1)).toFixed(2)} ${(100 - (92 * value) / (most || 1)).toFixed(2)}`);
    const path = `M${points.join("L")}`;
    line.setAttribute("d", path);
    area.setAttribute("d", `${path}L100 100L0 100Z`);
    const ends = `from ${rate(values[0])} to ${rate(values.at(-1))}, at most ${rate(most)}`;
    svg.setAttribute("aria-label", `Tokens a second over time: ${ends}`);
  }
}

function micro(us) {
  return us < 1000 ? `${number(us, 0)} µs` : `${number(us / 1000, us < 10_000 ? 1 : 0)} ms`;
}
