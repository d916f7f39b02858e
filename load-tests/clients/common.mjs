// What the Node drivers share: the conversation, what must hold of it, the line that comes out.
// See common.py: the same arguments, the same conversation, the same line of JSON.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

export const [BASE_URL, API_KEY, MODEL, MODE] = process.argv.slice(2);
// Anthropic's own SDK appends /v1 itself.
export const ROOT_URL = BASE_URL.replace(/\/v1$/, "");
export const FORCED = MODE === "forced";

export const MAX_TOKENS = 96;
export const TIMEOUT_MS = 300_000;

export const TOOL = "get_weather";
export const DESCRIPTION = "Gives the weather forecast of a city.";
export const PARAMETERS = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Paris", "Oslo", "Rome"] },
    days: { type: "integer", minimum: 1, maximum: 7 },
  },
  required: ["city", "days"],
  additionalProperties: false,
};
export const QUESTION = "What will the weather in Paris be tomorrow? Look it up.";
export const RESULT = "Sunny, 21 degrees, a light wind from the west.";
export const THANKS = "Thank you. What should I wear?";

// The form of a small model's later answers, so that `max_tokens` does not cut them: some clients take
// that for a failure.
export const SHORT_ANSWER = {
  type: "object",
  properties: { advice: { type: "string", enum: ["a coat", "a shirt", "boots"] } },
  required: ["advice"],
  additionalProperties: false,
};

// Instructions that no earlier conversation began with, so that what is cached is its own.
export function system() {
  const rules = "Use the tool for any question about weather, and answer in one short sentence. ";
  return `You are assistant ${randomUUID()}. ` + rules.repeat(6);
}

// The arguments of a call satisfy PARAMETERS.
export function valid(args) {
  const { city, days, ...more } = typeof args === "string" ? JSON.parse(args) : args;
  assert.deepEqual(more, {});
  assert(PARAMETERS.properties.city.enum.includes(city), JSON.stringify(args));
  assert(Number.isInteger(days) && days >= 1 && days <= 7, JSON.stringify(args));
}

// What a client's own usage objects say, turn by turn.
export class Turns {
  prompt = [];
  cached = [];

  // `prompt` counts all its tokens, `cached` those of them that were.
  add(prompt, cached, output) {
    assert(cached >= 0 && cached < prompt, `${cached} cached tokens of ${prompt}`);
    assert(output > 0, `${output} tokens of output`);
    this.prompt.push(prompt);
    this.cached.push(cached);
  }

  // Each turn found the one before it in the cache: all of it but a last part of a block.
  check(count = 3) {
    const said = `prompts of ${this.prompt}, cached ${this.cached}`;
    assert.equal(this.prompt.length, count, said);
    this.prompt.slice(0, -1).forEach((before, at) => {
      const cached = this.cached[at + 1];
      assert(cached > 0 && cached >= before - 32, said);
    });
  }
}

// The packages that install-clients put into one folder.
export function packages(folder) {
  const root = fileURLToPath(new URL(`../../.tools/clients/${folder}/`, import.meta.url));
  const require = createRequire(join(root, "package.json"));
  return {
    load: (name) => import(pathToFileURL(require.resolve(name))),
    version: (name) =>
      JSON.parse(readFileSync(join(root, "node_modules", name, "package.json"))).version,
  };
}

// Runs every check, whatever becomes of the others; each gives its `Turns`.
export async function run(client, version, checks) {
  const done = [];
  for (const [check, work] of checks) {
    const result = { check, cached: null, error: null };
    try {
      const turns = await work();
      turns.check();
      result.cached = turns.cached;
    } catch (error) {
      console.error(error);
      result.error = String(error).slice(0, 2000);
    }
    done.push(result);
  }
  console.log(JSON.stringify({ client, version, checks: done }));
  process.exitCode = done.some((result) => result.error) ? 1 : 0;
}
