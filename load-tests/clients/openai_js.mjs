// The official Node SDK of OpenAI: Chat Completions and Responses, whole and streamed.

import assert from "node:assert/strict";

import * as common from "./common.mjs";

const { load, version } = common.packages("node-sdks");
const { default: OpenAI } = await load("openai");
const client = new OpenAI({
  baseURL: common.BASE_URL,
  apiKey: common.API_KEY,
  maxRetries: 0,
  timeout: common.TIMEOUT_MS,
});
const FUNCTION = {
  name: common.TOOL,
  description: common.DESCRIPTION,
  parameters: common.PARAMETERS,
};
// The SDK's helpers of streams raise on an answer that was cut.
const SHORT = { name: "advice", schema: common.SHORT_ANSWER, strict: true };

async function chat(streamed) {
  const messages = [
    { role: "system", content: common.system() },
    { role: "user", content: common.QUESTION },
  ];
  const turns = new common.Turns();
  const turn = async (choice) => {
    const request = {
      model: common.MODEL,
      messages,
      tools: [{ type: "function", function: FUNCTION }],
      max_tokens: common.MAX_TOKENS,
      ...(common.FORCED && { tool_choice: choice }),
      ...(common.FORCED &&
        turns.prompt.length > 0 && {
          response_format: { type: "json_schema", json_schema: SHORT },
        }),
    };
    const answer = streamed
      ? await client.chat.completions
          .stream({ ...request, stream_options: { include_usage: true } })
          .finalChatCompletion()
      : await client.chat.completions.create(request);
    const { prompt_tokens, prompt_tokens_details, completion_tokens } = answer.usage;
    turns.add(prompt_tokens, prompt_tokens_details.cached_tokens, completion_tokens);
    const { message, finish_reason } = answer.choices[0];
    messages.push(message);
    return { message, finish_reason };
  };

  const called = await turn({ type: "function", function: { name: common.TOOL } });
  assert(["tool_calls", "stop"].includes(called.finish_reason), called.finish_reason);
  assert(called.message.tool_calls?.length > 0, JSON.stringify(called));
  for (const call of called.message.tool_calls) {
    assert(call.id && call.type === "function" && call.function.name === common.TOOL);
    common.valid(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: common.RESULT });
  }
  for (const question of [common.THANKS, null]) {
    const { message, finish_reason } = await turn("none");
    assert.equal(finish_reason, "stop");
    assert(message.content && !message.tool_calls?.length, JSON.stringify(message));
    if (question) messages.push({ role: "user", content: question });
  }
  return turns;
}

// `chained` names the response before; otherwise every item is sent again.
async function responses(streamed, chained) {
  const instructions = common.system();
  const history = [];
  const turns = new common.Turns();
  let last = null;
  const turn = async (choice, items) => {
    history.push(...items);
    const request = {
      model: common.MODEL,
      instructions,
      input: last && chained ? items : history,
      tools: [{ type: "function", ...FUNCTION, strict: false }],
      max_output_tokens: common.MAX_TOKENS,
      store: chained,
      ...(common.FORCED && { tool_choice: choice }),
      ...(common.FORCED && last && { text: { format: { type: "json_schema", ...SHORT } } }),
      ...(last && chained && { previous_response_id: last.id }),
    };
    last = streamed
      ? await client.responses.stream(request).finalResponse()
      : await client.responses.create(request);
    const { input_tokens, input_tokens_details, output_tokens } = last.usage;
    turns.add(input_tokens, input_tokens_details.cached_tokens, output_tokens);
    // What the streaming helper adds for its caller is no field of an item.
    history.push(...last.output.map(({ parsed_arguments, ...item }) => item));
    return last;
  };

  const asked = [{ role: "user", content: common.QUESTION }];
  const called = await turn({ type: "function", name: common.TOOL }, asked);
  assert.equal(called.status, "completed");
  const calls = called.output.filter((item) => item.type === "function_call");
  assert(calls.length > 0, JSON.stringify(called.output));
  const results = calls.map((call) => {
    assert(call.call_id && call.name === common.TOOL, JSON.stringify(call));
    common.valid(call.arguments);
    return { type: "function_call_output", call_id: call.call_id, output: common.RESULT };
  });
  for (const items of [results, [{ role: "user", content: common.THANKS }]]) {
    const answer = await turn("none", items);
    assert.equal(answer.status, "completed");
    assert(answer.output_text, JSON.stringify(answer.output));
    assert(answer.output.every((item) => item.type !== "function_call"));
  }
  return turns;
}

await common.run("openai (Node)", version("openai"), [
  ["chat, whole", () => chat(false)],
  ["chat, streamed", () => chat(true)],
  ["responses, whole", () => responses(false, false)],
  ["responses, streamed", () => responses(true, false)],
  ["responses, whole, by previous_response_id", () => responses(false, true)],
  ["responses, streamed, by previous_response_id", () => responses(true, true)],
]);
