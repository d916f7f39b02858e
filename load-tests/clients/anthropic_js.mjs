// The official Node SDK of Anthropic: Messages, whole and streamed, and the counting of tokens.

import assert from "node:assert/strict";

import * as common from "./common.mjs";

const { load, version } = common.packages("node-sdks");
const { default: Anthropic } = await load("@anthropic-ai/sdk");
const client = new Anthropic({
  baseURL: common.ROOT_URL,
  apiKey: common.API_KEY,
  maxRetries: 0,
  timeout: common.TIMEOUT_MS,
});
const TOOL = {
  name: common.TOOL,
  description: common.DESCRIPTION,
  input_schema: common.PARAMETERS,
};

async function messages(streamed) {
  const history = [{ role: "user", content: common.QUESTION }];
  const instructions = common.system();
  const turns = new common.Turns();
  const turn = async (choice) => {
    const asked = {
      model: common.MODEL,
      system: instructions,
      messages: history,
      tools: [TOOL],
      ...(common.FORCED && { tool_choice: choice }),
      ...(common.FORCED &&
        turns.prompt.length > 0 && {
          output_config: { format: { type: "json_schema", schema: common.SHORT_ANSWER } },
        }),
    };
    const counted = (await client.messages.countTokens(asked)).input_tokens;
    const request = { ...asked, max_tokens: common.MAX_TOKENS };
    const answer = streamed
      ? await client.messages.stream(request).finalMessage()
      : await client.messages.create(request);
    // Anthropic counts what was cached beside the input, not within it.
    const { input_tokens, cache_read_input_tokens, output_tokens } = answer.usage;
    const prompt = input_tokens + cache_read_input_tokens;
    turns.add(prompt, cache_read_input_tokens, output_tokens);
    assert(counted > 0, String(counted));
    if (common.FORCED) assert.equal(counted, prompt);
    history.push({ role: "assistant", content: answer.content });
    return answer;
  };

  const called = await turn({ type: "tool", name: common.TOOL });
  assert.equal(called.stop_reason, "tool_use");
  const calls = called.content.filter((block) => block.type === "tool_use");
  assert(calls.length > 0, JSON.stringify(called.content));
  const results = calls.map((call) => {
    assert(call.id && call.name === common.TOOL, JSON.stringify(call));
    common.valid(call.input);
    return { type: "tool_result", tool_use_id: call.id, content: common.RESULT };
  });
  for (const content of [results, common.THANKS]) {
    history.push({ role: "user", content });
    const answer = await turn({ type: "none" });
    assert.equal(answer.stop_reason, "end_turn");
    assert(answer.content.some((block) => block.type === "text" && block.text));
    assert(answer.content.every((block) => block.type !== "tool_use"));
  }
  return turns;
}

await common.run("@anthropic-ai/sdk", version("@anthropic-ai/sdk"), [
  ["messages, whole", () => messages(false)],
  ["messages, streamed", () => messages(true)],
]);
