"""The trace of `crates/kv/examples/prefix_bench.rs` on vLLM's block pool, and the ratio of the two.

    python bench/prefix_vllm.py SOURCE [PREFIX_BENCH] [--their-block-size]

SOURCE: the unpacked source of vLLM (tried with 0.33.0). Its modules block_pool, kv_cache_utils and hashing
run as they are; what they import besides (torch, configuration, metrics) is replaced by empty stubs, so
nothing need be installed. PREFIX_BENCH: the built example, run in turn with vLLM's side, with pages of one
layer (vLLM's pool names a block by one number for all layers) and of SmolLM2's thirty. Blocks are of 32
tokens on both sides, or on vLLM's side of its default, 16.

The operations per request are those of vLLM's KVCacheManager for one full-attention group: hash the prompt's
blocks (`get_request_block_hasher`, SHA-256 as by default), look each up until one is missing, touch those
found, take new blocks (which evicts), name the full ones, and at the end free in reverse.
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import statistics
import subprocess
import sys
import time
import types
from collections import deque

TOKENS, DOCUMENT, DOCUMENTS, REQUESTS, UNTIMED, RUNNING = 8192, 6144, 3, 600, 60, 4
LAYERS = [1, 30]
BLOCK, BLOCKS = (16, 4096) if "--their-block-size" in sys.argv else (32, 2048)
CASES = ["document", "new", "again"]
REAL = {
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.kv_cache_metrics",
    "vllm.utils.hashing",
    "vllm.utils.math_utils",
}


class Stub(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = logging.getLogger if name == "init_logger" else type(name, (), {})
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, source):
        self.source = source

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] not in ("vllm", "torch", "cbor2"):
            return None
        if name in REAL:
            file = f"{self.source}/{name.replace('.', '/')}.py"
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


class Request:
    """What the block hasher and the pool read of a vLLM request."""

    def __init__(self, number, tokens):
        self.request_id = str(number)
        self.all_token_ids = tokens
        self.num_tokens = len(tokens)
        self.block_hashes = []
        self.mm_features = []
        self.lora_request = self.cache_salt = self.prompt_embeds = None


def text(number, count):
    return [(number * 7919 + i * 31 + i // BLOCK) % 49_152 for i in range(count)]


def request_tokens(index):
    turn, case = divmod(index, 3)
    if case == 1:
        return text(1000 + index, TOKENS)
    return text(turn % DOCUMENTS, DOCUMENT) + text(1000 + turn * 3, TOKENS - DOCUMENT)


def play():
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)
    running = deque()
    times = {case: {"lookup": [], "allocate": [], "publish": [], "release": [], "hit": []} for case in CASES}
    gc.collect()
    gc.freeze()  # as vLLM's engine core does
    for index in range(REQUESTS):
        request = Request(index, request_tokens(index))
        start = time.perf_counter()
        request.block_hashes = hasher(request)
        found = []
        for block_hash in request.block_hashes[: (TOKENS - 1) // BLOCK]:
            cached = pool.get_cached_block(block_hash, [0])
            if not cached:
                break
            found.append(cached[0])
        pool.touch(found)
        looked_up = time.perf_counter()
        blocks = found + pool.get_new_blocks(TOKENS // BLOCK - len(found))
        allocated = time.perf_counter()
        pool.cache_full_blocks(request, blocks, len(found), TOKENS // BLOCK, BLOCK, 0)
        named = time.perf_counter()
        running.append(blocks)
        oldest = running.popleft() if len(running) > RUNNING else []
        before = time.perf_counter()
        pool.free_blocks(reversed(oldest))
        released = time.perf_counter()
        if index >= UNTIMED:
            case = times[CASES[index % 3]]
            case["lookup"].append(looked_up - start)
            case["allocate"].append(allocated - looked_up)
            case["publish"].append(named - allocated)
            case["release"].append(released - before)
            case["hit"].append(len(found) * BLOCK)
    rows = {}
    for case, values in times.items():
        row = {f"{name}_us": statistics.median(values[name]) * 1e6 for name in list(values)[:4]}
        rows[case] = {"hit_tokens": sum(values["hit"]) // len(values["hit"]), **row}
    return rows


def together(row):
    return row["lookup_us"] + row["allocate_us"]


def main():
    sys.meta_path.insert(0, Finder(sys.argv[1]))
    rounds = []
    for _ in range(3):
        peer = play()
        own = []
        if len(sys.argv) > 2:
            for layers in LAYERS:
                command = [sys.argv[2], str(layers), "--json"]
                output = subprocess.run(command, capture_output=True, check=True, text=True)
                own += [{**json.loads(line), "layers": layers} for line in output.stdout.splitlines()]
        rounds.append((peer, own))
    for case in CASES:
        peers = [peer[case] for peer, _ in rounds]
        peer_us = statistics.median(map(together, peers))
        print(f"{case:9} vLLM   hit {peers[0]['hit_tokens']:4}  {peer_us:8.1f} us  " + json.dumps(peers[-1]))
        for which in [(index, layers) for layers in LAYERS for index in ("chain", "radix")]:
            is_it = lambda row: (row["index"], row["layers"], row["case"]) == (*which, case)
            rows = [row for _, own in rounds for row in filter(is_it, own)]
            if rows:
                own_us = statistics.median(map(together, rows))
                print(
                    f"{case:9} {which[0]}  hit {rows[0]['hit_tokens']:4}  {own_us:8.1f} us  "
                    f"{peer_us / own_us:6.1f} times faster, pages of {which[1]} layers"
                )


main()
