// How fast the tokens of one request come, by the times that the server wrote into its events.

const APART_MS = 50; // between points of the curve, at first
const MOST_POINTS = 240; // beyond, every second point goes and they stand twice as far apart

export class Rate {
  constructor() {
    this.tokens = 0;
    this.first = null; // {ms, tokens} of the first event: its token waited for the prompt
    this.last = null;
    this.points = [];
    this.apart = APART_MS;
  }

  /** So many tokens were made `ms` after the request. */
  add(ms, tokens) {
    this.tokens = tokens;
    this.last = { ms, tokens };
    this.first ??= this.last;
    const before = this.points.at(-1);
    if (!before || ms - before.ms >= this.apart) this.points.push(this.last);
    if (this.points.length > MOST_POINTS) {
      this.points = this.points.filter((_, i) => i % 2 === 0);
      this.apart *= 2;
    }
  }

  /** Tokens a second since the first event, which is left out; null until there are two. */
  get average() {
    if (!this.first || this.last.ms <= this.first.ms) return null;
    return ((this.last.tokens - this.first.tokens) * 1000) / (this.last.ms - this.first.ms);
  }

  /** Tokens a second between every two points, and up to now if that is far enough from the last one. */
  get curve() {
    const points = [...this.points];
    const since = this.last ? this.last.ms - points.at(-1).ms : 0;
    if (since > this.apart / 2 || (since > 0 && points.length === 1)) points.push(this.last);
    return points.slice(1).map((point, i) => {
      const before = points[i];
      return ((point.tokens - before.tokens) * 1000) / (point.ms - before.ms);
    });
  }
}
