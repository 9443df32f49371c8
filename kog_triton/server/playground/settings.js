// Sampling, length and shape of answers, as the form has them; kept in this browser.

import { byId } from "./dom.js";

const KEPT = "kog.settings";
const NUMBERS = ["max_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const TEXTS = ["system", "stop", "schema"];
export const CONTINUED = 512; // tokens of a continuation: many models have no end for one
const WORDS = { schema: "JSON schema", system: "system message", stop: "stop texts" };

export class Settings {
  /** changed: called when a field is. */
  constructor(changed) {
    this.form = byId("settings-form");
    this.changed = changed;
    const kept = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
    for (const name of [...NUMBERS, ...TEXTS]) this.form.elements[name].value = kept[name] ?? "";
    this.form.addEventListener("input", () => this.#read());
    byId("settings-reset").addEventListener("click", () => {
      this.form.reset();
      this.#read();
    });
    this.#read();
  }

  /** What the model's own files say, where a field is empty. */
  setDefaults(params) {
    for (const name of NUMBERS) this.form.elements[name].placeholder = params[name] ?? "";
    this.form.elements.max_tokens.placeholder = `no limit; ${CONTINUED} to continue`;
  }

  set(name, value) {
    this.form.elements[name].value = value;
    this.#read();
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  /** Why the fields cannot be sent, or "". */
  get wrong() {
    const field = NUMBERS.map((name) => this.form.elements[name]).find((input) => !input.validity.valid);
    if (field) return `Settings, ${field.labels[0].textContent.trim()}: ${field.validationMessage}`;
    return this.schemaError && `Settings, JSON schema: ${this.schemaError}`;
  }

  /** Fields of a request. */
  get fields() {
    const found = {};
    for (const name of NUMBERS) {
      const { value } = this.form.elements[name];
      if (value !== "") found[name] = Number(value);
    }
    const stops = this.form.elements.stop.value.split("\n").filter(Boolean);
    if (stops.length) found.stop = stops;
    if (this.schema) found.structured_outputs = { json: this.schema };
    return found;
  }

  /** The fields that are not empty, as people call them. */
  get summary() {
    const named = [...NUMBERS, ...TEXTS].filter((name) => this.form.elements[name].value.trim() !== "");
    return named.map((name) => WORDS[name] ?? `${name.replaceAll("_", " ")} ${this.form.elements[name].value}`);
  }

  #read() {
    const text = this.form.elements.schema.value.trim();
    this.schema = null;
    this.schemaError = "";
    try {
      if (text) this.schema = JSON.parse(text);
      if (text && (typeof this.schema !== "object" || this.schema === null || Array.isArray(this.schema))) {
        this.schemaError = "it must be an object";
      }
    } catch (error) {
      this.schemaError = error.message;
    }
    byId("schema-error").textContent = this.schemaError;
    const values = Object.fromEntries([...NUMBERS, ...TEXTS].map((name) => [name, this.form.elements[name].value]));
    localStorage.setItem(KEPT, JSON.stringify(values));
    this.changed(this.summary);
  }
}
