"""Requests as OpenAI's clients send them, and what must be true of every stream."""

import dataclasses
import http.client
import json
import urllib.parse

TIMEOUT_S = 120


class Broken(Exception):
    """A request that did not get what it asked for."""


@dataclasses.dataclass
class Answer:
    text: str
    cached_tokens: int
    prompt_tokens: int
    completion_tokens: int


def post(url, path, body):
    """A connection and the answer to a POST."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise Broken(f"{path}: {error!r}") from error
    if answer.status != 200:
        text = answer.read().decode(errors="replace")
        connection.close()
        raise Broken(f"{path}: {answer.status} {text[:300]}")
    return connection, answer


def events(answer):
    """The events of a stream, which must end with [DONE]."""
    done = False
    try:
        for line in answer:
            line = line.strip()
            if not line.startswith(b"data: "):
                continue
            if done:
                raise Broken(f"after [DONE]: {line!r}")
            if line == b"data: [DONE]":
                done = True
                continue
            yield json.loads(line[6:])
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Broken(f"stream: {error!r}") from error
    if not done:
        raise Broken("the stream ends without [DONE]")


def streamed(url, path, body, piece):
    """Sends a streamed request; every stream has text, one reason to finish, usage and [DONE]."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    connection, answer = post(url, path, body)
    text, reasons, usage = "", [], None
    try:
        for event in events(answer):
            if "error" in event:
                raise Broken(f"in the stream: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += piece(choice) or ""
                reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    finally:
        connection.close()
    if not text or len(reasons) != 1 or usage is None:
        raise Broken(f"text {text!r}, finish_reason {reasons}, usage {usage}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(text, cached, usage["prompt_tokens"], usage["completion_tokens"])


def chat(url, model, prompt, max_tokens=16):
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    return streamed(url, "/v1/chat/completions", body, lambda choice: choice["delta"].get("content"))


def completion(url, model, prompt, max_tokens=16):
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
    return streamed(url, "/v1/completions", body, lambda choice: choice["text"])


def whole_chat(url, model, prompt, max_tokens=8):
    """The same without a stream."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    connection, answer = post(url, "/v1/chat/completions", body)
    try:
        document = json.loads(answer.read())
        return document["choices"][0]["message"]["content"]
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise Broken(f"no answer of a chat: {error!r}") from error
    finally:
        connection.close()
