"""`langchain-openai`: ChatOpenAI and OpenAI, streamed and not, structured output, tools, log-probabilities."""

import asyncio
from typing import Literal

from checks import MODEL, URL, Checks
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

checks = Checks()
AT = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(**AT, temperature=0, max_tokens=16, stream_usage=True)
ASK = "Name three rivers of Europe."


def texts():
    answer = chat.invoke(ASK)
    checks.that("invoke: text", answer.content, answer)
    checks.that("invoke: usage", answer.usage_metadata["output_tokens"] > 0, answer.usage_metadata)
    checks.that("invoke: metadata", answer.response_metadata["finish_reason"] in ("stop", "length"), answer)
    chunks = list(chat.stream(ASK))
    checks.equal("stream: text", "".join(chunk.content for chunk in chunks), answer.content)
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    checks.equal("stream: usage", whole.usage_metadata["output_tokens"], answer.usage_metadata["output_tokens"])
    checks.equal("batch", [one.content for one in chat.batch([ASK, ASK, ASK])], [answer.content] * 3)
    told = asyncio.run(chat.ainvoke([SystemMessage("Be brief."), HumanMessage("Hello!"), AIMessage("Hello."),
                                     HumanMessage(ASK)]))
    checks.that("ainvoke: roles", told.content, told)
    probable = chat.bind(logprobs=True, top_logprobs=2).invoke(ASK)
    content = probable.response_metadata["logprobs"]["content"]
    checks.that("logprobs", all(len(token["top_logprobs"]) == 2 for token in content), content)


class Answer(BaseModel):
    """An answer and how sure it is."""

    verdict: Literal["yes", "no"]
    percent: int = Field(ge=0, le=100)
    why: str = Field(max_length=20)


def structured():
    long = chat.model_copy(update={"max_tokens": 200})
    for method in ("json_schema", "function_calling"):
        answer = long.with_structured_output(Answer, method=method).invoke("Is Paris in France?")
        checks.that(f"with_structured_output: {method}", isinstance(answer, Answer), answer)
    # Without a schema a small model is to be shown where its object ends.
    shown = 'Is Paris in France? Answer as this does: {"verdict": "yes", "percent": 100, "why": "capital"}'
    both = long.with_structured_output(Answer, method="json_mode", include_raw=True).invoke(shown)
    checks.that("with_structured_output: json_mode", both["raw"].content.lstrip()[0] == "{", both)
    checks.that("with_structured_output: json_mode, parsed", isinstance(both["parsed"], Answer), both)


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


def tools():
    bound = chat.model_copy(update={"max_tokens": 100}).bind_tools([get_weather], tool_choice="get_weather")
    answer = bound.invoke("What is the weather in Paris?")
    call = answer.tool_calls[0]
    checks.equal("bind_tools: the call", (call["name"], list(call["args"])), ("get_weather", ["city"]))
    told = bound.invoke("What is the weather in Paris?")
    back = chat.invoke([HumanMessage("What is the weather in Paris?"), told,
                        ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])])
    checks.that("bind_tools: the result goes back", back.content is not None, back)
    whole = None
    for chunk in bound.stream("What is the weather in Paris?"):
        whole = chunk if whole is None else whole + chunk
    checks.equal("bind_tools: streamed", whole.tool_calls[0]["args"], call["args"])


def completions():
    model = OpenAI(**AT, temperature=0, max_tokens=8)
    text = model.invoke("The capital of France is")
    checks.that("completions: text", text, text)
    checks.equal("completions: streamed", "".join(model.stream("The capital of France is")), text)
    many = model.generate(["The capital of France is", "The capital of Italy is"])
    checks.equal("completions: generate", many.generations[0][0].text, text)
    checks.equal("completions: two prompts", len(many.generations), 2)


for part in (texts, structured, tools, completions):
    with checks.group(part.__name__):
        part()
checks.close("ChatOpenAI and OpenAI: invoke, stream, batch, logprobs, structured output, tools")
