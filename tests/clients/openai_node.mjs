// The `openai` package for Node: what it parses, throws and aborts.

import { equal, idle, model, run, that, throws, url } from "./checks.mjs"
import OpenAI from "openai"
import { zodResponseFormat } from "openai/helpers/zod"
import { z } from "zod"

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 })
const messages = [{ role: "user", content: "Name three rivers of Europe." }]
const plain = { model, messages, max_tokens: 16, temperature: 0 }

async function models() {
  const ids = []
  for await (const entry of client.models.list()) ids.push(entry.id)
  that("models: list", ids.includes(model), ids)
  equal("models: retrieve", (await client.models.retrieve(model)).id, model)
}

async function chats() {
  const answer = await client.chat.completions.create(plain)
  const text = answer.choices[0].message.content
  that("chat: text", text.length > 0, answer)
  equal("chat: usage", answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage.total_tokens)
  const stream = await client.chat.completions.create({
    ...plain, stream: true, stream_options: { include_usage: true },
  })
  const chunks = []
  for await (const chunk of stream) chunks.push(chunk)
  const told = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("")
  equal("chat: streamed text", told, text)
  equal("chat: streamed usage", chunks.at(-1).usage.completion_tokens, answer.usage.completion_tokens)
  equal("chat: last chunk has no choices", chunks.at(-1).choices, [])
  const helper = client.chat.completions.stream(plain)
  equal("chat: the helper's text", await helper.finalContent(), text)
}

async function completions() {
  const settings = { model, prompt: ["The capital of France is"], max_tokens: 8, temperature: 0 }
  const whole = (await client.completions.create({ ...settings, logprobs: 1 })).choices[0]
  equal("completions: logprobs", whole.logprobs.tokens.join(""), whole.text)
  let told = ""
  for await (const chunk of await client.completions.create({ ...settings, stream: true })) {
    told += chunk.choices[0]?.text ?? ""
  }
  equal("completions: streamed text", told, whole.text)
}

async function structured() {
  const mood = z.object({ mood: z.enum(["calm", "merry"]), level: z.number().int() })
  const parsed = await client.chat.completions.parse({
    ...plain, max_tokens: 100, response_format: zodResponseFormat(mood, "mood"),
  })
  that("parse(): a zod object", mood.safeParse(parsed.choices[0].message.parsed).success, parsed.choices[0])
}

async function tools() {
  const tool = {
    type: "function",
    function: {
      name: "get_weather",
      parameters: {
        type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"],
        additionalProperties: false,
      },
    },
  }
  const helper = client.chat.completions.stream({
    ...plain, max_tokens: 100, tools: [tool], tool_choice: "required",
  })
  const call = (await helper.finalMessage()).tool_calls[0]
  equal("tools: streamed", Object.keys(JSON.parse(call.function.arguments)), ["city"])
}

async function errors() {
  const { create } = client.chat.completions
  const ask = (more) => () => create.call(client.chat.completions, { ...plain, ...more })
  await throws("errors: unknown model", ask({ model: "no-such-model" }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found")
  await throws("errors: temperature", ask({ temperature: -1 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature")
  await throws("errors: embeddings, asked for in base64", () => client.embeddings.create({ model, input: "x" }),
    (error) => error instanceof OpenAI.BadRequestError)
}

async function aborts() {
  const stream = await client.chat.completions.create({ ...plain, max_tokens: 4000, stream: true })
  for await (const chunk of stream) if (chunk.choices[0]?.delta.content) break
  that("abort: leaving the loop ends the request", await idle())
  const controller = new AbortController()
  setTimeout(() => controller.abort(), 500)
  const long = { ...plain, max_tokens: 4000, ignore_eos: true }
  await throws("abort: a signal", () => client.chat.completions.create(long, { signal: controller.signal }),
    (error) => error instanceof OpenAI.APIUserAbortError)
  that("abort: the signal ends the request", await idle())
}

await run([models, chats, completions, structured, tools, errors, aborts],
  "models, chat, completions, streams, parse() with zod, tools, errors, aborts")
