"""What a server publishes, decoded as vLLM's own subscribers do: pyzmq and msgspec, structs of vLLM's fields.

    events_client.py SERVER_URL MODEL EVENTS REPLAY

The structs are written from the wire format that vLLM 0.26 began: a batch is an array, its events are maps.
"""

import json
import sys
import urllib.request
from typing import Any, Optional, Union

import msgspec
import zmq

WAIT_MS = 30_000
END = (-1).to_bytes(8, "big", signed=True)


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: Optional[int] = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: Optional[int]
    token_ids: list[int]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str]
    lora_name: Optional[str]
    extra_keys: Optional[list[Optional[tuple[Any, ...]]]] = None
    group_idx: Optional[int] = None
    kv_cache_spec_kind: Optional[str] = None
    kv_cache_spec_sliding_window: Optional[int] = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: Optional[str]
    group_idx: Optional[int] = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[Union[BlockStored, BlockRemoved, AllBlocksCleared]]


DECODER = msgspec.msgpack.Decoder(type=KVEventBatch)


class Index:
    """What a router makes of the events: by a block's name its parent and its tokens."""

    def __init__(self):
        self.blocks = {}
        self.next = 0
        self.stored = self.removed = 0

    def hear(self, number, payload):
        assert number == self.next, f"batch {number}, wanted {self.next}"
        self.next = number + 1
        batch = DECODER.decode(payload)
        assert batch.data_parallel_rank == 0 and batch.ts > 1.6e9
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            assert event.medium == "GPU"
            if isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.blocks[name]
                self.removed += len(event.block_hashes)
                continue
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            parent = event.parent_block_hash
            for at, name in enumerate(event.block_hashes):
                assert parent is None or parent in self.blocks, "a block before its parent"
                tokens = event.token_ids[at * event.block_size:(at + 1) * event.block_size]
                self.blocks[name] = (parent, tuple(tokens))
                parent = name
            self.stored += len(event.block_hashes)

    def cached_tokens(self, token_ids, block_size):
        """Tokens of the longest beginning that the blocks make up; the last token is always computed."""
        parent, found = None, 0
        children = {entry: name for name, entry in self.blocks.items()}
        for start in range(0, len(token_ids) - 1 - block_size + 1, block_size):
            parent = children.get((parent, tuple(token_ids[start:start + block_size])))
            if parent is None:
                break
            found += block_size
        return found


def ask(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def replay(context, endpoint, start, kind):
    """The batches from `start` on, by a REQ socket (the first one only) or a DEALER (all)."""
    socket = context.socket(kind)
    socket.rcvtimeo = WAIT_MS
    socket.connect(endpoint)
    request = start.to_bytes(8, "big")
    socket.send_multipart([request] if kind == zmq.REQ else [b"", request])
    batches = []
    while True:
        frames = socket.recv_multipart()
        topic, number, payload = frames if kind == zmq.REQ else frames[1:]
        if number == END:
            assert (topic, payload) == (b"", b"")
            break
        assert topic == b""
        batches.append((int.from_bytes(number, "big"), payload))
        if kind == zmq.REQ:
            break
    socket.close(0)
    return batches


def main(url, model, events, replays):
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.rcvtimeo = WAIT_MS
    subscriber.connect(events)
    subscriber.subscribe(b"")
    shared = "The keeper of the lighthouse wrote a line into the book every evening, whatever the weather. " * 8
    prompts = [shared + f"On day {day} it said:" for day in range(4)]
    prompts += [f"Number {number} of many. " * 40 for number in range(10)]  # more than the pool holds
    index, heard = Index(), []
    for prompt in prompts:
        body = {"model": model, "prompt": prompt}
        ask(url, "/v1/completions", {**body, "max_tokens": 4})
        ask(url, "/v1/completions", {**body, "max_tokens": 1})  # its blocks have been told when it is done
    # Live: everything up to what the replay knows.
    past = replay(context, replays, 0, zmq.DEALER)
    assert replay(context, replays, 0, zmq.REQ) == past[:1]
    for number, payload in past:
        index.hear(number, payload)
    while not heard or heard[-1][0] < past[-1][0]:
        topic, number, payload = subscriber.recv_multipart()
        assert topic == b""
        heard.append((int.from_bytes(number, "big"), payload))
    assert heard == past[heard[0][0]:][:len(heard)], "the replay differs from what was published"
    assert index.removed > 0 and index.stored > index.removed
    block_size = len(next(iter(index.blocks.values()))[1])
    checked = 0
    for prompt in reversed(prompts):  # what came last is still there
        body = {"model": model, "prompt": prompt}
        ids = ask(url, "/tokenize", body)["tokens"]
        for number, payload in replay(context, replays, index.next, zmq.DEALER):
            index.hear(number, payload)
        expected = index.cached_tokens(ids, block_size)
        usage = ask(url, "/v1/completions", {**body, "max_tokens": 1})["usage"]
        found = usage["prompt_tokens_details"]["cached_tokens"]
        assert found // block_size * block_size == expected, f"events say {expected}, the server found {found}"
        checked += expected > 0
    assert checked > 4, checked
    print(f"{index.stored} blocks stored, {index.removed} removed, {len(past)} batches replayed")
    print(f"{len(prompts)} predictions of cached tokens right")


if __name__ == "__main__":
    main(*sys.argv[1:])
