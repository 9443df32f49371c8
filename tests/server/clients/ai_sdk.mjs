// The AI SDK's openai-compatible provider on scripted answers: what it makes of them, as JSON. Input: {url, prompts}.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

let input = "";
for await (const piece of process.stdin) input += piece;
const { url, prompts } = JSON.parse(input);
const kog = createOpenAICompatible({
  name: "kog",
  baseURL: `${url}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = kog("");
const schema = (properties) =>
  jsonSchema({ type: "object", properties, required: Object.keys(properties), additionalProperties: false });
const tools = {
  weather: tool({
    description: "weather of a city",
    inputSchema: schema({ city: { type: "string" } }),
    execute: async ({ city }) => `${prompts.after_call} of ${city}`,
  }),
};
const settings = { model, maxRetries: 0 };

const plain = await generateText({ ...settings, prompt: prompts.plain });
const stream = streamText({ ...settings, prompt: prompts.fast });
let deltas = 0;
for await (const _ of stream.textStream) deltas += 1;
const thinks = await generateText({ ...settings, prompt: prompts.thinks });
const called = await generateText({ ...settings, tools, prompt: prompts.call, stopWhen: stepCountIs(3) });
const streamed = streamText({ ...settings, tools, prompt: prompts.call, stopWhen: stepCountIs(3) });
const parts = [];
for await (const part of streamed.fullStream) parts.push(part.type);
const made = await generateObject({ ...settings, prompt: prompts.json, schema: schema({ name: { type: "string" } }) });
let refused = null;
try {
  await generateText({ ...settings, prompt: prompts.plain, temperature: 9 });
} catch (error) {
  refused = [error.statusCode, error.message];
}
console.log(
  JSON.stringify({
    plain: [plain.text, plain.finishReason, plain.usage.outputTokens],
    fast: [await stream.text, await stream.finishReason, (await stream.usage).outputTokens, deltas],
    thinks: [thinks.reasoningText, thinks.text],
    called: [called.steps.map((step) => step.toolCalls.map((call) => call.input)), called.text],
    streamed: [await streamed.text, parts.filter((type) => type === "tool-call").length, parts.includes("error")],
    json: made.object,
    refused,
  }),
);
