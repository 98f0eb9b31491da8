// The ai SDK over its providers of OpenAI, compatible servers, Anthropic and Ollama: text, objects, tools, embeddings.

import assert from 'node:assert/strict';
import { describe, test } from 'node:test';

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { createOllama as createOllamaClient } from 'ai-sdk-ollama';
import { createOllama } from 'ollama-ai-provider-v2';
import { z } from 'zod';

const { ADDRESS, EMBEDDER } = process.env;
const ASK = 'Tell me the capital of France in one short sentence.';
const PERSON = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
const apiKey = 'none';

const openai = createOpenAI({ baseURL: `${ADDRESS}/v1`, apiKey });
const compatible = createOpenAICompatible({
  name: 'plait', baseURL: `${ADDRESS}/v1`, supportsStructuredOutputs: true, includeUsage: true,
});
const MODELS = {
  'openai, responses': openai('default'),
  'openai, chat': openai.chat('default'),
  'openai-compatible': compatible('default'),
  anthropic: createAnthropic({ baseURL: `${ADDRESS}/v1`, apiKey })('default'),
  'ollama-ai-provider-v2': createOllama({ baseURL: `${ADDRESS}/api` })('default'),
  'ai-sdk-ollama': createOllamaClient({ baseURL: ADDRESS })('default'),
};
// Ollama's protocol cannot require a call, and ai-sdk-ollama does not send toolChoice.
const WITHOUT_TOOL_CHOICE = ['ai-sdk-ollama'];

function clock() {
  return tool({
    description: 'The time in a time zone',
    inputSchema: z.object({ zone: z.enum(['CET', 'UTC']) }),
    execute: async ({ zone }) => `It is noon in ${zone}.`,
  });
}

/** The result of a stream that has ended; raises its error. */
async function ended(options) {
  let failure;
  const result = streamText({ ...options, onError: ({ error }) => { failure = error; } });
  await result.consumeStream();
  if (failure) throw failure;
  return result;
}

for (const [name, model] of Object.entries(MODELS)) {
  const options = { model, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
  describe(name, () => {
    test('streamed text equals the answer', async () => {
      const { text, usage } = await generateText({ ...options, prompt: ASK });
      assert.match(text, /Paris/);
      assert.ok(usage.outputTokens > 0);
      assert.equal(await (await ended({ ...options, prompt: ASK })).text, text);
    });

    test('output of a schema', async () => {
      const fields = { ...options, prompt: 'Anna is 12 years old.', output: Output.object({ schema: PERSON }) };
      const { output } = await generateText(fields);
      assert.equal(output.age, 12);
      assert.deepEqual(await (await ended(fields)).output, output);
    });

    test('a tool turn', { skip: WITHOUT_TOOL_CHOICE.includes(name) }, async () => {
      const fields = {
        ...options,
        prompt: 'What time is it?',
        tools: { clock: clock() },
        stopWhen: stepCountIs(2),
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? 'none' : 'required' }),
      };
      for (const result of [await generateText(fields), await ended(fields)]) {
        const [first, second] = await result.steps;
        assert.ok(first.toolResults.length >= 1);
        assert.match(first.toolResults[0].output, /^It is noon in/);
        assert.equal(second.toolCalls.length, 0);
      }
    });
  });
}

test('embeddings', async () => {
  const models = [
    createOpenAI({ baseURL: `${EMBEDDER}/v1`, apiKey }).embedding('default'),
    createOpenAICompatible({ name: 'plait', baseURL: `${EMBEDDER}/v1` }).embeddingModel('default'),
    createOllama({ baseURL: `${EMBEDDER}/api` }).embedding('default'),
    createOllamaClient({ baseURL: EMBEDDER }).embedding('default'),
  ];
  for (const model of models) {
    const { embeddings } = await embedMany({ model, values: ['a cat', 'a dog'] });
    assert.deepEqual(embeddings.map((vector) => vector.length), [576, 576]);
  }
});
