"""The `openai` package for Python, sync and async: what it parses, raises, retries and cancels."""

import asyncio
import enum
import json
import os
import socket
import subprocess
from typing import Annotated

import openai
from checks import MODEL, URL, Checks, metric, post, settles
from pydantic import BaseModel, Field

checks = Checks()
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "Name three rivers of Europe."}]
RUNNING = "vllm:num_requests_running"


def chat(**more):
    settings = {"model": MODEL, "messages": ASK, "max_tokens": 16, "temperature": 0}
    return client.chat.completions.create(**(settings | more))


def complete(**more):
    settings = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    return client.completions.create(**(settings | more))


def models():
    entry = next(model for model in client.models.list() if model.id == MODEL)
    checks.that("models: created and owner", entry.created > 1_600_000_000 and entry.owned_by, entry)
    checks.that("models: max_model_len and root", entry.max_model_len > 0 and entry.root, entry)
    checks.equal("models: retrieve", client.models.retrieve(MODEL).id, MODEL)
    with checks.raises("models: an unknown id is NotFoundError", openai.NotFoundError):
        client.models.retrieve("no-such-model")


def chats():
    answer = chat()
    choice, usage = answer.choices[0], answer.usage
    checks.that("chat: text", choice.message.role == "assistant" and choice.message.content, answer)
    checks.that("chat: finish_reason", choice.finish_reason in ("stop", "length"), choice)
    checks.equal("chat: usage adds up", usage.prompt_tokens + usage.completion_tokens, usage.total_tokens)
    checks.that("chat: cached tokens are told", usage.prompt_tokens_details.cached_tokens >= 0, usage)
    checks.that("chat: usage.kv", usage.model_extra["kv"]["budget_bytes"] > 0, usage.model_extra)
    checks.equal("chat: greedy is repeatable", chat().choices[0].message.content, choice.message.content)
    six = chat(max_tokens=openai.omit, max_completion_tokens=6, extra_body={"ignore_eos": True})
    checks.equal("chat: max_completion_tokens", six.usage.completion_tokens, 6)
    checks.equal("chat: length is told", six.choices[0].finish_reason, "length")
    warm = [chat(temperature=1, seed=7).choices[0].message.content for _ in range(2)]
    checks.equal("chat: seed", warm[0], warm[1])
    two = chat(n=2, temperature=1)
    checks.equal("chat: n", [one.index for one in two.choices], [0, 1])
    parts = [{"role": "user", "content": [{"type": "text", "text": "Name three rivers of Europe."}]}]
    checks.equal("chat: content parts", chat(messages=parts).choices[0].message.content, choice.message.content)
    word = choice.message.content.split()[2]
    stopped = chat(stop=[word])
    checks.that("chat: stop cuts before the word", word not in stopped.choices[0].message.content, stopped)
    checks.equal("chat: stop is told", stopped.choices[0].finish_reason, "stop")
    roles = [{"role": "developer", "content": "Be brief."}, *ASK, {"role": "assistant", "content": "The Rhine."},
             {"role": "user", "content": "Another?"}]
    checks.that("chat: roles", chat(messages=roles).choices[0].message.content, roles)
    nulls = {"seed": None, "stop": None, "logit_bias": None, "user": "u", "metadata": None, "no_such_field": [1]}
    checks.that("chat: nulls and unknown fields", chat(extra_body=nulls).choices, nulls)


def logprobs():
    answer = chat(logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    said = answer.choices[0].message.content
    checks.that("logprobs: one a token", len(content) in (answer.usage.completion_tokens,
                answer.usage.completion_tokens - 1), (len(content), answer.usage))
    text = b"".join(bytes(token.bytes) for token in content).decode()
    checks.that("logprobs: bytes are the text", text.startswith(said), (text, said))
    checks.that("logprobs: three, greatest first, the greedy token among them", all(
        len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob <= 0
        and sorted(token.top_logprobs, key=lambda top: -top.logprob) == token.top_logprobs
        for token in content), content)
    chunks = list(chat(logprobs=True, top_logprobs=1, stream=True))
    streamed = [entry.logprob for chunk in chunks for choice in chunk.choices if choice.logprobs
                for entry in choice.logprobs.content]
    checks.equal("logprobs: streamed alike", streamed, [entry.logprob for entry in content])
    words = complete(logprobs=2, echo=True).choices[0]
    tokens = words.logprobs.tokens
    checks.that("logprobs: completions echo", "".join(tokens).startswith(words.text[:20]), words)
    checks.that("logprobs: first is null", words.logprobs.token_logprobs[0] is None, words.logprobs)
    offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
    checks.equal("logprobs: text_offset", words.logprobs.text_offset, offsets)


def streams():
    whole = chat().choices[0].message.content
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    checks.equal("stream: role comes first", deltas[0].delta.role, "assistant")
    checks.equal("stream: same text", "".join(one.delta.content or "" for one in deltas), whole)
    reasons = [one.finish_reason for one in deltas if one.finish_reason]
    checks.that("stream: one finish_reason, at the end", len(reasons) == 1 and deltas[-1].finish_reason, reasons)
    checks.that("stream: usage in a last chunk without choices", chunks[-1].usage and not chunks[-1].choices,
                chunks[-1])
    checks.equal("stream: one id", len({chunk.id for chunk in chunks}), 1)
    plain = list(chat(stream=True))
    checks.that("stream: no usage unasked", all(chunk.usage is None and chunk.choices for chunk in plain), plain)
    sentence = {"model": MODEL, "messages": ASK, "max_tokens": 200, "temperature": 0, "stop": ["."]}
    with client.chat.completions.stream(**sentence) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    whole_sentence = chat(**sentence).choices[0].message.content
    checks.that("stream: the helper's events", {"chunk", "content.delta", "content.done"} <= kinds, kinds)
    checks.equal("stream: the helper's text", final.choices[0].message.content, whole_sentence)
    both = list(chat(stream=True, n=2))
    checks.equal("stream: n", {chunk.choices[0].index for chunk in both}, {0, 1})
    said = ["".join(c.choices[0].delta.content or "" for c in both if c.choices[0].index == at) for at in (0, 1)]
    checks.equal("stream: greedy choices agree", said, [whole, whole])


def completions():
    one = complete()
    text = one.choices[0].text
    checks.that("completions: text", text and one.choices[0].finish_reason in ("stop", "length"), one)
    checks.equal("completions: [string]", complete(prompt=["The capital of France is"]).choices[0].text, text)
    ids = post("/tokenize", {"model": MODEL, "prompt": "The capital of France is"})["tokens"]
    checks.equal("completions: ids", complete(prompt=ids).choices[0].text, text)
    lists = complete(prompt=[ids, ids[:3]])
    checks.equal("completions: [[ids]]", [choice.index for choice in lists.choices], [0, 1])
    checks.equal("completions: [[ids]] text", lists.choices[0].text, text)
    checks.equal("completions: echo", complete(echo=True).choices[0].text, f"The capital of France is{text}")
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    checks.equal("completions: streamed", "".join(c.choices[0].text for c in chunks if c.choices), text)
    checks.equal("completions: streamed usage", chunks[-1].usage.completion_tokens, one.usage.completion_tokens)
    checks.equal("completions: best_of", len(complete(best_of=2, n=1, temperature=1).choices), 1)
    forced = complete(logit_bias={str(ids[0]): 100}, max_tokens=3)
    checks.equal("completions: logit_bias", forced.choices[0].text.replace("The", ""), "")
    least = complete(extra_body={"min_tokens": 8, "repetition_penalty": 1.1}, presence_penalty=0.5)
    checks.equal("completions: min_tokens", least.usage.completion_tokens, 8)
    empty = complete(max_tokens=0, echo=True)
    checks.equal("completions: max_tokens 0 with echo", empty.choices[0].text, "The capital of France is")


class Mood(enum.Enum):
    calm = "calm"
    merry = "merry"


class City(BaseModel):
    name: str = Field(max_length=20)
    population_millions: int = Field(ge=0, le=100)
    is_capital: bool
    mood: Mood
    rivers: list[Annotated[str, Field(max_length=20)]] = Field(max_length=2)


def structured():
    ask = [{"role": "user", "content": "Describe Paris as JSON."}]
    loose = chat(messages=ask, response_format={"type": "json_object"}, max_tokens=200)
    if loose.choices[0].finish_reason == "stop":
        json.loads(loose.choices[0].message.content)
    checks.that("json_object", loose.choices[0].message.content.lstrip().startswith("{"), loose)
    parsed = client.chat.completions.parse(model=MODEL, messages=ask, response_format=City, max_tokens=400,
                                           temperature=0)
    checks.that("parse(): a pydantic object", isinstance(parsed.choices[0].message.parsed, City), parsed)
    schema = {"type": "json_schema", "json_schema": {"name": "mood", "strict": True, "schema": {
        "type": "object", "properties": {"mood": {"enum": ["calm", "merry"]}}, "required": ["mood"],
        "additionalProperties": False}}}
    chunks = list(chat(messages=ask, response_format=schema, max_tokens=60, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    checks.that("json_schema streamed", json.loads(text)["mood"] in ("calm", "merry"), text)
    with client.chat.completions.stream(model=MODEL, messages=ask, response_format=City, max_tokens=400,
                                        temperature=0) as stream:
        final = stream.get_final_completion()
    checks.that("parse() streamed", isinstance(final.choices[0].message.parsed, City), final)
    choice = chat(messages=ask, extra_body={"guided_choice": ["yes", "no"]})
    checks.that("guided_choice", choice.choices[0].message.content in ("yes", "no"), choice)
    with checks.raises("a broken schema is BadRequestError", openai.BadRequestError):
        schema["json_schema"]["schema"] = {"type": "no-such-type"}
        chat(messages=ask, response_format=schema)


def tools():
    weather = {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.",
               "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}},
                              "required": ["city"], "additionalProperties": False}}}
    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(messages=ask, tools=[weather], tool_choice=named, max_tokens=100)
    call = answer.choices[0].message.tool_calls[0]
    checks.equal("tools: the named one is called", call.function.name, "get_weather")
    checks.equal("tools: its arguments", list(json.loads(call.function.arguments)), ["city"])
    checks.that("tools: the call has an id", call.id and call.type == "function", call)
    required = chat(messages=ask, tools=[weather], tool_choice="required", max_tokens=100)
    checks.that("tools: required", required.choices[0].message.tool_calls, required)
    checks.equal("tools: finish_reason", required.choices[0].finish_reason, "tool_calls")
    with client.chat.completions.stream(model=MODEL, messages=ask, tools=[weather], tool_choice="required",
                                        max_tokens=100, temperature=0) as stream:
        final = stream.get_final_completion()
    streamed = final.choices[0].message.tool_calls[0].function
    checks.equal("tools: streamed arguments", list(json.loads(streamed.arguments)), ["city"])
    silent = chat(messages=ask, tools=[weather], tool_choice="none")
    checks.that("tools: none", not silent.choices[0].message.tool_calls, silent)
    told = [*ask, {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."}]
    checks.that("tools: a result goes back", chat(messages=told, tools=[weather]).choices, told)
    checks.that("tools: auto", chat(messages=ask, tools=[weather]).choices, ask)


def errors():
    def about(param):
        return lambda error: error.param == param and error.type == "invalid_request_error" and error.message

    refused = checks.raises
    with refused("errors: unknown model", openai.NotFoundError, lambda e: e.code == "model_not_found"):
        chat(model="no-such-model")
    with refused("errors: temperature", openai.BadRequestError, about("temperature")):
        chat(temperature=-1)
    with refused("errors: max_tokens", openai.BadRequestError, about("max_tokens")):
        chat(max_tokens=-1)
    with refused("errors: n", openai.BadRequestError, about("n")):
        chat(n=0)
    with refused("errors: no messages", openai.BadRequestError, about("messages")):
        chat(messages=[])
    with refused("errors: role", openai.BadRequestError):
        chat(messages=[{"role": "emperor", "content": "x"}])
    with refused("errors: prompt too long", openai.BadRequestError, lambda e: e.code == "context_length_exceeded"):
        complete(prompt=[5] * 20_000)
    with refused("errors: an id outside the vocabulary", openai.BadRequestError):
        complete(prompt=[10_000_000])
    with refused("errors: the stream is refused before it starts", openai.BadRequestError):
        chat(stream=True, top_p=2)
    with refused("errors: embeddings are no gift of this model", openai.BadRequestError):
        client.embeddings.create(model=MODEL, input="x")
    with refused("errors: an unknown path", openai.NotFoundError):
        client.images.generate(model=MODEL, prompt="x")
    with refused("errors: a wrong type", openai.BadRequestError, about("max_tokens")):
        chat(max_tokens="many")


def extensions():
    answer = chat(extra_body={"kv": {"fidelity": "int8", "priority": 3}})
    checks.equal("kv: fidelity as asked", answer.usage.model_extra["kv"]["fidelity"], "int8")
    raw = client.with_raw_response.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, extra_headers={"X-Request-Id": "mine-17"})
    checks.that("headers: the request's id comes back", raw.headers.get("x-request-id") == "mine-17",
                dict(raw.headers))


def cancels():
    stream = chat(stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    for _, _ in zip(range(3), stream):
        pass
    checks.that("cancel: it runs", metric(RUNNING) == 1, metric(RUNNING))
    stream.close()
    checks.that("cancel: a closed stream ends the request", settles(RUNNING, 0), metric(RUNNING))
    with checks.raises("cancel: a time-out is the client's", openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=4000, extra_body={"ignore_eos": True})
    checks.that("cancel: a client that left ends the request", settles(RUNNING, 0), metric(RUNNING))


async def concurrent():
    whole = chat(max_tokens=12).choices[0].message.content
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as many:
        async def one(tokens):
            stream = await many.chat.completions.create(model=MODEL, messages=ASK, max_tokens=tokens,
                                                        temperature=0, stream=True,
                                                        extra_body={"ignore_eos": tokens > 1000})
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        told = await asyncio.gather(*(one(12) for _ in range(8)))
        checks.equal("async: eight streams tell what one tells", set(told), {whole})
        ids = [model.id async for model in many.models.list()]
        checks.that("async: models", MODEL in ids, ids)
        task = asyncio.create_task(one(4000))
        await asyncio.sleep(1)
        task.cancel()
        with checks.raises("async: cancelled", asyncio.CancelledError):
            await task
        parsed = await many.chat.completions.parse(model=MODEL, messages=ASK, response_format=City,
                                                   max_tokens=400, temperature=0)
        checks.that("async: parse()", isinstance(parsed.choices[0].message.parsed, City), parsed)
    checks.that("async: nothing is left running", settles(RUNNING, 0), metric(RUNNING))


def retries():
    """A client that came before the server was ready gets its answer in the end, by its own retries."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [os.environ["REEF_BINARY"], "serve", os.environ["REEF_MODEL_PATH"], "--port", str(port)]
    with subprocess.Popen([*command, "--api-key", "secret"], stderr=subprocess.DEVNULL) as server:
        early = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=30)
        settings = {"model": early.models.list().data[0].id, "messages": ASK, "max_tokens": 4}
        checks.that("retries: until it is ready", early.chat.completions.create(**settings).choices, settings)
        for key in ("wrong", "none"):
            with checks.raises(f"keys: `{key}` is AuthenticationError", openai.AuthenticationError):
                early.with_options(api_key=key).chat.completions.create(**settings)
        server.terminate()
        checks.equal("retries: SIGTERM drains", server.wait(30), 0)


for part in (models, chats, logprobs, streams, completions, structured, tools, errors, extensions, cancels,
             lambda: asyncio.run(concurrent()), retries):
    with checks.group(part.__name__):
        part()
checks.close("models, chat, completions, streams, logprobs, parse(), tools, errors, cancellation, async, retries")
