// Vercel's AI SDK over @ai-sdk/openai-compatible: text, streams, objects, tools.

import { equal, idle, model, run, that, throws, url } from "./checks.mjs"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { generateObject, generateText, jsonSchema, streamObject, streamText, tool } from "ai"
import { z } from "zod"

const settings = { name: "reef", baseURL: `${url}/v1`, supportsStructuredOutputs: true }
const provider = createOpenAICompatible({ ...settings, includeUsage: true })
const ask = {
  model: provider(model), prompt: "Name three rivers of Europe.", maxOutputTokens: 16, temperature: 0,
  maxRetries: 0,
}

async function texts() {
  const whole = await generateText(ask)
  that("generateText", whole.text.length > 0 && ["stop", "length"].includes(whole.finishReason), whole.text)
  that("generateText: usage", whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0, whole.usage)
  const stream = streamText(ask)
  let told = ""
  for await (const part of stream.textStream) told += part
  equal("streamText", told, whole.text)
  equal("streamText: usage", (await stream.usage).outputTokens, whole.usage.outputTokens)
  const silent = streamText({ ...ask, model: createOpenAICompatible(settings)(model) })
  equal("streamText: usage unasked", (await silent.usage).outputTokens, undefined)
  const completion = await generateText({ ...ask, model: provider.completionModel(model) })
  that("completionModel", completion.text.length > 0, completion.text)
}

async function objects() {
  const schema = z.object({ mood: z.enum(["calm", "merry"]), level: z.number().int() })
  const whole = await generateObject({ ...ask, schema, maxOutputTokens: 100 })
  that("generateObject", schema.safeParse(whole.object).success, whole.object)
  const stream = streamObject({ ...ask, schema, maxOutputTokens: 100 })
  for await (const _ of stream.partialObjectStream);
  equal("streamObject", await stream.object, whole.object)
}

async function tools() {
  const inputSchema = jsonSchema({
    type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"],
    additionalProperties: false,
  })
  const weather = tool({ description: "The weather of a city.", inputSchema })
  const more = { tools: { weather }, toolChoice: "required", maxOutputTokens: 100 }
  const whole = await generateText({ ...ask, ...more })
  equal("generateText: tool call", Object.keys(whole.toolCalls[0].input), ["city"])
  equal("generateText: finish reason", whole.finishReason, "tool-calls")
  const calls = await streamText({ ...ask, ...more }).toolCalls
  equal("streamText: tool call", calls[0].input, whole.toolCalls[0].input)
}

async function failures() {
  await throws("an unknown model", () => generateText({ ...ask, model: provider("no-such-model") }),
    (error) => error.statusCode === 404 && error.message.includes("no-such-model"))
  const controller = new AbortController()
  const stream = streamText({ ...ask, maxOutputTokens: 4000, abortSignal: controller.signal, onError() {} })
  for await (const _ of stream.textStream) controller.abort()
  that("an abort ends the request", await idle())
}

await run([texts, objects, tools, failures], "generateText, streamText, objects, tools, completions, errors, abort")
