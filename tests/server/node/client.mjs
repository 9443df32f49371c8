// Runs cases with OpenAI's client for Node: {url, cases} on stdin, the answers as a JSON list on stdout.
import OpenAI from "openai";

const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const { url, cases } = JSON.parse(Buffer.concat(chunks).toString());
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });

const message = (choice) => ({
  content: choice.message.content ?? null,
  calls: (choice.message.tool_calls ?? []).map((c) => [c.function.name, c.function.arguments]),
  finish: choice.finish_reason,
});

const kinds = {
  async chat(body) {
    const answer = await client.chat.completions.create(body);
    return { choices: answer.choices.map(message), made: answer.usage.completion_tokens };
  },
  async chat_stream(body) {
    const stream = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
    const answer = await stream.finalChatCompletion();
    return { choices: answer.choices.map(message), made: answer.usage.completion_tokens };
  },
  async completions(body) {
    const answer = await client.completions.create(body);
    return {
      choices: answer.choices.map((c) => [c.text, c.finish_reason, c.logprobs?.tokens ?? null]),
      made: answer.usage.completion_tokens,
    };
  },
  async completions_stream(body) {
    const texts = {};
    for await (const part of await client.completions.create({ ...body, stream: true })) {
      for (const c of part.choices) texts[c.index] = (texts[c.index] ?? "") + c.text;
    }
    return texts;
  },
  async responses(body) {
    const answer = await client.responses.create(body);
    return {
      status: answer.status,
      text: answer.output_text,
      items: answer.output.map((item) => item.type),
      made: answer.usage.output_tokens,
    };
  },
  async responses_stream(body) {
    const answer = await client.responses.stream(body).finalResponse();
    return {
      status: answer.status,
      text: answer.output_text,
      items: answer.output.map((item) => item.type),
      made: answer.usage.output_tokens,
    };
  },
  async abort(body) {
    const stream = await client.chat.completions.create({ ...body, stream: true });
    for await (const part of stream) {
      if (part.choices[0].delta.content) break; // which aborts the request
    }
    return "left";
  },
};

const found = [];
for (const { kind, body } of cases) {
  try {
    found.push(await kinds[kind](body));
  } catch (error) {
    found.push({ status: error.status ?? String(error), code: error.code ?? null });
  }
}
console.log(JSON.stringify(found));
