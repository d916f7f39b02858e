// Vercel's AI SDK: it runs the loop of calls itself, through its providers for the three dialects.

import assert from "node:assert/strict";

import * as common from "./common.mjs";

const { load, version } = common.packages("ai-sdk");
const { generateText, isStepCount, jsonSchema, streamText, tool } = await load("ai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const { BASE_URL: baseURL, API_KEY: apiKey, MODEL } = common;
const compatible = createOpenAICompatible({ name: "homing", baseURL, apiKey, includeUsage: true });
const openai = createOpenAI({ baseURL, apiKey });
// This provider wants the /v1 that Anthropic's own SDK adds.
const anthropic = createAnthropic({ baseURL, apiKey });

async function conversation(model, streamed) {
  const calls = [];
  const forecast = tool({
    description: common.DESCRIPTION,
    inputSchema: jsonSchema(common.PARAMETERS),
    execute: async (args) => {
      calls.push(args);
      return common.RESULT;
    },
  });
  const instructions = common.system();
  const messages = [{ role: "user", content: common.QUESTION }];
  const turns = new common.Turns();
  // The first step of a conversation calls the tool, the later ones answer.
  const prepareStep = () => {
    if (!common.FORCED) return {};
    const toolChoice = turns.prompt.length === 0 ? { type: "tool", toolName: common.TOOL } : "none";
    return { toolChoice };
  };
  const onStepEnd = ({ usage }) => {
    const { inputTokens, inputTokenDetails, outputTokens } = usage;
    turns.add(inputTokens, inputTokenDetails.cacheReadTokens, outputTokens);
  };
  const ask = async () => {
    const request = {
      model,
      instructions,
      messages,
      tools: { [common.TOOL]: forecast },
      maxOutputTokens: common.MAX_TOKENS,
      maxRetries: 0,
      stopWhen: isStepCount(4),
      prepareStep,
      onStepEnd,
    };
    if (!streamed) {
      const { text, responseMessages } = await generateText(request);
      return { text, responseMessages };
    }
    let failure = null;
    const result = streamText({ ...request, onError: ({ error }) => (failure = error) });
    await result.consumeStream();
    if (failure) throw failure;
    return { text: await result.text, responseMessages: await result.responseMessages };
  };

  for (const question of [common.THANKS, null]) {
    const { text, responseMessages } = await ask();
    assert(text, "an answer without text");
    messages.push(...responseMessages);
    if (question) messages.push({ role: "user", content: question });
  }
  assert(calls.length > 0, "the tool was not called");
  calls.forEach(common.valid);
  return turns;
}

const checks = [
  ["chat by openai-compatible", compatible(MODEL)],
  ["chat by openai", openai.chat(MODEL)],
  ["responses by openai", openai.responses(MODEL)],
  ["messages by anthropic", anthropic(MODEL)],
].flatMap(([name, model]) => [
  [`${name}, whole`, () => conversation(model, false)],
  [`${name}, streamed`, () => conversation(model, true)],
]);
await common.run("ai (AI SDK)", version("ai"), checks);
