// Prompts to begin with.

const SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string" },
    country: { type: "string" },
    length_km: { type: "integer" },
  },
  required: ["name", "country", "length_km"],
};

export const EXAMPLES = {
  chat: [
    { title: "Write code", prompt: "Write a Python function that merges two sorted lists, and a test for it." },
    { title: "Explain", prompt: "Why does a language model answer one request no faster than its memory can be read?" },
    { title: "Compare", prompt: "Compare quicksort, mergesort and heapsort in a table: time, memory, stability." },
    { title: "Fill a schema", prompt: "Name a river in Europe.", schema: SCHEMA },
  ],
  text: [
    { title: "A function", prompt: "def read_lines(path):" },
    { title: "A class", prompt: "class Stack:\n    def __init__(self):" },
    { title: "A test", prompt: "def test_add():" },
    { title: "A loop", prompt: "for i, line in enumerate(lines):" },
  ],
};
