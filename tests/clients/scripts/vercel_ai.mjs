// Vercel's AI SDK with @ai-sdk/openai-compatible: text, streams, reasoning, a loop of two tools, objects, errors, retries.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { CITADEL_URL, CITADEL_API_KEY: apiKey, CITADEL_MODEL } = process.env;
const settings = { name: "citadel", baseURL: `${CITADEL_URL}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true };
const citadel = createOpenAICompatible(settings);
const model = citadel(CITADEL_MODEL);

assert.equal((await generateText({ model, prompt: "hi" })).text, "Hello, world.");

const streamed = streamText({ model, prompt: "think" });
let text = "";
for await (const part of streamed.textStream) text += part;
assert.equal(text, "Four.");
assert.equal((await streamed.reasoningText).trim(), "Two and two are four.");
assert.equal(await streamed.finishReason, "stop");
assert.ok((await streamed.usage).outputTokens > 0);

const called = [];
const tools = {
  get_weather: tool({
    inputSchema: z.object({ city: z.string() }),
    execute: async (given) => (called.push(given), "18 degrees"),
  }),
  to_fahrenheit: tool({
    inputSchema: z.object({ celsius: z.number() }),
    execute: async (given) => (called.push(given), "64.4"),
  }),
};
const loop = streamText({ model, tools, stopWhen: stepCountIs(5), prompt: "What is the weather in Paris?" });
for await (const _ of loop.fullStream);
assert.equal(await loop.text, "It is 64.4 degrees Fahrenheit in Paris.");
assert.deepEqual(called, [{ city: "Paris" }, { celsius: 18 }]);
assert.equal((await loop.steps).length, 3);

const schema = z.object({ name: z.string(), age: z.number().int() });
const described = await generateText({ model, output: Output.object({ schema }), prompt: "Who is Ada?" });
assert.deepEqual(described.output, { name: "Ada", age: 36 });

const embedder = (citadel.embeddingModel ?? citadel.textEmbeddingModel)("embedder");
assert.equal((await embedMany({ model: embedder, values: ["one", "two"] })).embeddings.length, 2);

const once = { maxRetries: 0, prompt: "hi" };
const stranger = createOpenAICompatible({ ...settings, apiKey: "hlk_00000000_wrong" });
const status = (code) => (error) => APICallError.isInstance(error) && error.statusCode === code;
await assert.rejects(generateText({ model: stranger(CITADEL_MODEL), ...once }), status(401));
await assert.rejects(generateText({ model: citadel("nobody"), ...once }), (error) => status(404)(error) && /nobody/.test(error.message));

const impatient = createOpenAICompatible({ ...settings, headers: { "X-LLM-Wait": "0" } });
assert.equal((await generateText({ model: impatient("asleep"), prompt: "hi", maxRetries: 5 })).text, "Hello, world.");

for (let index = 0; index < 8; index++) {
  const abort = new AbortController();
  const endless = streamText({ model, prompt: "endless", abortSignal: abort.signal });
  for await (const _ of endless.textStream) abort.abort();
}
assert.equal((await generateText({ model, prompt: "hi" })).finishReason, "stop");
