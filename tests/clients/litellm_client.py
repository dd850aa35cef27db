"""`litellm` by its two providers for such servers: `openai/` and `hosted_vllm/`."""

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches a price list at import

import litellm
from checks import MODEL, URL, Checks

checks = Checks()
ASK = [{"role": "user", "content": "Name three rivers of Europe."}]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
                   "additionalProperties": False}}}
MOOD = {"type": "json_schema", "json_schema": {"name": "mood", "strict": True, "schema": {
    "type": "object", "properties": {"mood": {"enum": ["calm", "merry"]}}, "required": ["mood"],
    "additionalProperties": False}}}


def talks(provider):
    at = {"model": f"{provider}/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0,
          "temperature": 0, "max_tokens": 16}
    whole = litellm.completion(messages=ASK, **at)
    text = whole.choices[0].message.content
    checks.that(f"{provider}: text", text and whole.usage.completion_tokens > 0, whole)
    stream = litellm.completion(messages=ASK, stream=True, stream_options={"include_usage": True}, **at)
    chunks = list(stream)
    checks.equal(f"{provider}: streamed", "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), text)
    rebuilt = litellm.stream_chunk_builder(chunks, messages=ASK)
    checks.equal(f"{provider}: streamed usage", rebuilt.usage.prompt_tokens, whole.usage.prompt_tokens)
    told = asyncio.run(litellm.acompletion(messages=ASK, **at))
    checks.equal(f"{provider}: acompletion", told.choices[0].message.content, text)
    more = at | {"max_tokens": 100}
    called = litellm.completion(messages=ASK, tools=[WEATHER], tool_choice="required", **more)
    call = called.choices[0].message.tool_calls[0].function
    checks.equal(f"{provider}: tool call", (call.name, list(json.loads(call.arguments))), ("get_weather", ["city"]))
    mood = litellm.completion(messages=ASK, response_format=MOOD, **more).choices[0].message.content
    checks.that(f"{provider}: json_schema", json.loads(mood)["mood"] in ("calm", "merry"), mood)
    sure = litellm.completion(messages=ASK, logprobs=True, top_logprobs=2, **at).choices[0].logprobs
    checks.that(f"{provider}: logprobs", len(sure["content"][0]["top_logprobs"]) == 2, sure)
    text_at = at | {"model": f"text-completion-openai/{MODEL}"} if provider == "openai" else at
    plain = litellm.text_completion(prompt="The capital of France is", **text_at)
    checks.that(f"{provider}: text_completion", plain.choices[0].text, plain)
    with checks.raises(f"{provider}: an unknown model", litellm.NotFoundError):
        litellm.completion(messages=ASK, **(at | {"model": f"{provider}/no-such-model"}))
    with checks.raises(f"{provider}: a bad temperature", litellm.BadRequestError):
        litellm.completion(messages=ASK, **(at | {"temperature": -1}))
    with checks.raises(f"{provider}: too long", litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "a b c " * 20_000}], **at)


for name in ("openai", "hosted_vllm"):
    with checks.group(name):
        talks(name)
checks.close("openai/ and hosted_vllm/: chat, streams, text completions, tools, json_schema, logprobs, errors")
