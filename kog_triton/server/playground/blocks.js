// Cuts a growing Markdown text into blocks that no later text can change, and the one that is still open.

const FENCE = /^ *(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^#{1,6} /;
const ITEM = /^ {0,3}([-*+]|\d{1,9}[.)]) /;

export class Blocks {
  constructor() {
    this.lines = ""; // whole lines of the open block
    this.line = ""; // the last one, not ended yet
    this.fence = null; // what closes the code that the open block is in
    this.blank = false; // whether the last whole line was blank
  }

  /** Text of the open block. */
  get open() {
    return this.lines + this.line;
  }

  /** Whether the open block is code alone, and in which language: {language, text}, or null. */
  get code() {
    if (!this.fence || !FENCE.test(this.lines.split("\n", 1)[0])) return null;
    const start = this.lines.indexOf("\n") + 1;
    const language = FENCE.exec(this.lines.slice(0, start - 1))[2].trim().split(/\s/)[0];
    return { language, text: this.open.slice(start) };
  }

  /** Take more text; the blocks that it closed. */
  add(text) {
    const closed = [];
    const pieces = (this.line + text).split("\n");
    this.line = pieces.pop();
    for (const piece of pieces) this.#take(piece, closed);
    return closed;
  }

  /** The text has ended: what was open. */
  end() {
    const closed = this.line ? this.add("\n") : [];
    this.#close(closed);
    return closed;
  }

  #take(line, closed) {
    if (this.fence) {
      this.lines += line + "\n";
      const marks = FENCE.exec(line);
      if (marks && !marks[2].trim() && marks[1].startsWith(this.fence)) {
        this.fence = null;
        if (!this.#isList) this.#close(closed);
      }
      return;
    }
    if (!line.trim()) {
      if (this.lines) this.lines += "\n";
      this.blank = true;
      return;
    }
    const goesOn = this.#isList && (/^\s/.test(line) || ITEM.test(line));
    if (this.blank && !goesOn) this.#close(closed);
    this.blank = false;
    const marks = FENCE.exec(line);
    const heading = HEADING.test(line);
    if ((marks && !goesOn) || heading) this.#close(closed);
    this.lines += line + "\n";
    if (marks) this.fence = marks[1];
    if (heading) this.#close(closed);
  }

  get #isList() {
    return ITEM.test(this.lines);
  }

  #close(closed) {
    if (this.lines.trim()) closed.push(this.lines);
    this.lines = "";
  }
}
