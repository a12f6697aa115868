// OpenAI's SDK for Node: chat, streams, tools, structured output, errors, retries, cancel.
import assert from "node:assert/strict";
import OpenAI from "openai";

const { CITADEL_URL, CITADEL_API_KEY: apiKey, CITADEL_MODEL: model } = process.env;
const baseURL = `${CITADEL_URL}/v1`;
const client = new OpenAI({ baseURL, apiKey });
const messages = (content) => [{ role: "user", content }];
const ask = (content, fields = {}) => client.chat.completions.create({ model, messages: messages(content), ...fields });

assert.equal((await ask("hi")).choices[0].message.content, "Hello, world.");

let text = "";
let usage;
for await (const chunk of await ask("hi", { stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, "Hello, world.");
assert.equal(usage.completion_tokens, 4);

const results = { get_weather: "18 degrees", to_fahrenheit: "64.4" };
const called = [];
const tool = (name, property, type) => ({
  type: "function",
  function: {
    name,
    function: (given) => (called.push([name, given]), results[name]),
    parse: JSON.parse,
    parameters: { type: "object", properties: { [property]: { type } }, required: [property] },
  },
});
const runner = client.chat.completions.runTools({
  model,
  messages: messages("What is the weather in Paris?"),
  stream: true,
  tools: [tool("get_weather", "city", "string"), tool("to_fahrenheit", "celsius", "number")],
});
assert.equal(await runner.finalContent(), "It is 64.4 degrees Fahrenheit in Paris.");
assert.deepEqual(called, [["get_weather", { city: "Paris" }], ["to_fahrenheit", { celsius: 18 }]]);

const schema = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const parsed = await client.chat.completions.parse({
  model,
  messages: messages("Who is Ada?"),
  response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
});
assert.deepEqual(JSON.parse(parsed.choices[0].message.content), { name: "Ada", age: 36 });

const response = await client.responses.create({ model, input: "hi" });
assert.equal(response.output_text, "Hello, world.");
assert.equal((await client.embeddings.create({ model: "embedder", input: ["one", "two"] })).data.length, 2);

const stranger = new OpenAI({ baseURL, apiKey: "hlk_00000000_wrong" });
await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
await assert.rejects(ask("hi", { model: "nobody" }), OpenAI.NotFoundError);
await assert.rejects(ask("hi", { temperature: 9 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
await assert.rejects(async () => {
  for await (const _ of await ask("breaks off", { stream: true }));
}, /error here/);

const again = new OpenAI({ baseURL, apiKey, maxRetries: 5, defaultHeaders: { "X-LLM-Wait": "0" } });
assert.equal((await again.chat.completions.create({ model: "asleep", messages: messages("hi") })).model, "asleep");

for (let index = 0; index < 8; index++) {
  for await (const _ of await ask("endless", { stream: true })) break; // which ends the request
}
assert.equal((await ask("hi")).choices[0].finish_reason, "stop");
