"""A Dynamo worker in front of `reef serve`: token ids in, token ids out, KV events straight from the server.

    python reef_worker.py --url http://127.0.0.1:8080 --tokenizer FOLDER --kv-events tcp://127.0.0.1:5557

The frontend tokenizes, routes and detokenizes; the server is asked at /inference/v1/generate. FOLDER has the
model's tokenizer.json, tokenizer_config.json and config.json as on Hugging Face: the frontend needs them.
"""

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import time

import aiohttp
from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.logprobs import parse_logprob_options
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import CannotConnect, Disconnected, EngineShutdown, InvalidArgument, StreamIncomplete

logger = logging.getLogger(__name__)

# Fields of Dynamo's sampling options and stop conditions that have the same name and meaning in the request's
# `sampling_params`. Stop strings are not among them: the frontend, which detokenizes, looks for them.
SAMPLING = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "seed")
STOPPING = ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids")
# A server that is ready answers at once; one that loads its model does not for a while.
READY_WITHIN_S = 300
# A server that fails this many looks, one a second, is gone: this worker then leaves the router's list.
LOOKS = 3


def sampling_params(request, logprobs, context_tokens):
    """What to ask the server for; unset options are left to it."""
    asked = {**(request.get("sampling_options") or {}), **(request.get("stop_conditions") or {})}
    chosen = {name: asked[name] for name in SAMPLING + STOPPING if asked.get(name) is not None}
    # Dynamo's "to the end"; the server's default is 16.
    chosen.setdefault("max_tokens", max(1, context_tokens - len(request["token_ids"])))
    hidden = asked.get("stop_token_ids_hidden")
    if hidden:
        chosen["stop_token_ids"] = sorted({*chosen.get("stop_token_ids", []), *hidden})
    if logprobs is not None:
        chosen["logprobs"] = logprobs
    return chosen


def reported_logprobs(choice):
    """A choice's log-probabilities as Dynamo has them; the server names tokens `token_id:N`."""
    told = (choice.get("logprobs") or {}).get("content") or []
    named = lambda rank, one: {"rank": rank, "token_id": int(one["token"].rpartition(":")[2]),
                               "token": one["token"], "logprob": one["logprob"]}
    tops = [[named(rank, one) for rank, one in enumerate(token.get("top_logprobs") or [], 1)] for token in told]
    return [token["logprob"] for token in told], tops


class ReefEngine(LLMEngine):
    def __init__(self, args):
        self.args = args
        self.session = None
        self.watching = None
        self.context_tokens = 0

    @classmethod
    async def from_args(cls, argv=None):
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("--url", required=True, help="where `reef serve` listens")
        parser.add_argument("--tokenizer", required=True, help="folder with the model's tokenizer.json")
        parser.add_argument("--kv-events", help="the server's --kv-events; without it the router guesses")
        parser.add_argument("--kv-events-topic", default="", help="the server's --kv-events-topic")
        parser.add_argument("--api-key", default=os.environ.get("REEF_API_KEY"), help="the server's --api-key")
        parser.add_argument("--admin-key", default=os.environ.get("REEF_ADMIN_KEY"),
                            help="reads /metrics, where the server has keys")
        parser.add_argument("--namespace", default=os.environ.get("DYN_NAMESPACE", "dynamo"))
        parser.add_argument("--component", default="reef")
        parser.add_argument("--endpoint", default="generate")
        for name, default in (("discovery-backend", "file"), ("request-plane", "tcp"), ("event-plane", "zmq")):
            variable = "DYN_" + name.replace("-", "_").upper()
            parser.add_argument("--" + name, default=os.environ.get(variable, default), help=f"or ${variable}")
        args = parser.parse_args(argv)
        served = await cls(args).served_model()
        config = WorkerConfig(
            namespace=args.namespace, component=args.component, endpoint=args.endpoint,
            model_name=args.tokenizer, served_model_name=served["id"],
            discovery_backend=args.discovery_backend, request_plane=args.request_plane,
            event_plane=args.event_plane, use_kv_events=args.kv_events is not None)
        return cls(args), config

    def headers(self, admin=False):
        key = (self.args.admin_key if admin else None) or self.args.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def served_model(self):
        """The server's model, waiting until it is loaded."""
        deadline = time.monotonic() + READY_WITHIN_S
        async with aiohttp.ClientSession(headers=self.headers()) as session:
            while True:
                try:
                    async with session.get(self.args.url + "/health") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError as error:
                    logger.info("%s: %s", self.args.url, error)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.args.url} is not ready after {READY_WITHIN_S} s")
                await asyncio.sleep(0.2)
            async with session.get(self.args.url + "/v1/models", raise_for_status=True) as answer:
                return (await answer.json())["data"][0]

    async def cache_shape(self):
        """Tokens of a block and blocks of the pool, as /metrics tells them to routers."""
        async with self.session.get(self.args.url + "/metrics", headers=self.headers(admin=True),
                                    raise_for_status=True) as answer:
            text = await answer.text()
        line = next((line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")), "")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        return int(labels["block_size"]), int(labels["num_gpu_blocks"])

    async def start(self, worker_id):
        served = await self.served_model()
        # A stream ends when it ends: no limit but on connecting.
        self.session = aiohttp.ClientSession(headers=self.headers(), connector=aiohttp.TCPConnector(limit=0),
                                             timeout=aiohttp.ClientTimeout(total=None, sock_connect=10))
        block_size, blocks = await self.cache_shape()
        self.context_tokens = served["max_model_len"]
        self.watching = asyncio.create_task(self.watch())
        return EngineConfig(
            model=self.args.tokenizer, served_model_name=served["id"],
            llm=LlmRegistration(context_length=self.context_tokens, kv_cache_block_size=block_size,
                                total_kv_blocks=blocks))

    async def watch(self):
        """Ends this process in good order when the server is gone."""
        failed = 0
        while failed < LOOKS:
            await asyncio.sleep(1)
            try:
                async with self.session.get(self.args.url + "/health",
                                            timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    failed = 0 if answer.status == 200 else failed + 1
            except (aiohttp.ClientError, asyncio.TimeoutError):
                failed += 1
        logger.error("%s does not answer: leaving", self.args.url)
        os.kill(os.getpid(), signal.SIGTERM)

    async def kv_event_sources(self):
        if not self.args.kv_events:
            return []
        return [ZmqSource(endpoint=self.args.kv_events, topic=self.args.kv_events_topic, dp_rank=0)]

    async def generate(self, request, context):
        normalize_request_token_ids(request)
        try:
            async for chunk in self.relay(request, context):
                yield chunk
        # Of these the frontend knows that another worker can go on where this one stopped.
        except aiohttp.ClientConnectorError as error:
            raise CannotConnect(str(error)) from error
        except aiohttp.ClientError as error:
            raise Disconnected(str(error)) from error

    async def relay(self, request, context):
        logprobs, _ = parse_logprob_options(request.get("output_options") or {})
        body = {"request_id": context.id(), "token_ids": request["token_ids"], "stream": True,
                "stream_options": {"include_usage": True},
                "sampling_params": sampling_params(request, logprobs, self.context_tokens)}
        held, usage = [], None
        async with self.session.post(self.args.url + "/inference/v1/generate", json=body) as answer:
            if answer.status != 200:
                kind = {400: InvalidArgument, 503: EngineShutdown}.get(answer.status, RuntimeError)
                raise kind(f"reef answered {answer.status}: {(await answer.text())[:500]}")
            async for line in answer.content:
                if context.is_stopped():
                    # Closing the connection ends the request at the server.
                    yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                    return
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"reef: {event['error'].get('message', event['error'])}")
                usage = event.get("usage") or usage
                for choice in event.get("choices", []):
                    chunk = {"token_ids": choice["token_ids"], "index": choice["index"]}
                    if logprobs is not None and choice["token_ids"]:
                        chunk["log_probs"], chunk["top_logprobs"] = reported_logprobs(choice)
                    if choice.get("finish_reason"):
                        # The usage comes behind the last choice, and Dynamo wants it within the last chunk.
                        held.append({**chunk, "finish_reason": choice["finish_reason"]})
                    else:
                        yield chunk
        if not held:
            raise StreamIncomplete("reef ended the stream early")
        if usage:
            details = {"cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)}
            counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
            held[-1]["completion_usage"] = {**counts, "prompt_tokens_details": details}
        for chunk in held:
            yield chunk

    async def cleanup(self):
        if self.watching is not None:
            self.watching.cancel()
            self.watching = None
        if self.session is not None:
            await self.session.close()
            self.session = None


if __name__ == "__main__":
    run(ReefEngine)
