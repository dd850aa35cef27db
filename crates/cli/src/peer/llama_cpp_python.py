"""Measures llama.cpp the way llama-bench does, through the low-level API of llama-cpp-python 0.3.36.

Reads one JSON request a line on stdin, answers one JSON line on stdout; the model is loaded once.
  {"test": "prefill", "tokens": 512, "depth": 0, "batch": 1, "kv_format": "f16", "flash": true}
  {"test": "decode",  "tokens": 64, "depth": 4096, "batch": 8, "kv_format": "q8_0", "flash": true}
     -> {"seconds": 0.5, "tok_s": 1024.0}   or   {"error": "why"}
`tok_s` counts the tokens of all `batch` sequences; filling the cache up to `depth` is not timed, nor
is loading. Requests of one shape share a context, which stays with its filled cache, so that rounds of
several tests can alternate without computing the fill again.
Every decode asks for the logits of each sequence's last token, as llama-bench does, and copies none.
"""

import json
import os
import random
import sys
import time

import llama_cpp as ll

SESSIONS_MAX = 8  # contexts kept; each holds a KV cache
CHUNK = 512  # tokens per llama_decode while prefilling: llama-bench's n_ubatch
FORMATS = {"f16": ll.GGML_TYPE_F16, "q8_0": ll.GGML_TYPE_Q8_0, "q4_0": ll.GGML_TYPE_Q4_0}


class Session:
    """One context (a KV format, a flash-attention setting, a number of sequences) and its batch."""

    def __init__(self, model, shape, threads):
        kv_format, flash, batch, tokens_per_sequence = shape
        params = ll.llama_context_default_params()
        # Padding to 256 is what llama.cpp itself does; asking for it makes n_ctx what we think it is.
        params.n_ctx = -(-tokens_per_sequence // 256) * 256 * batch
        params.n_batch = params.n_ubatch = CHUNK
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = FORMATS[kv_format]
        params.flash_attn_type = (
            ll.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else ll.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.no_perf = True
        self.context = ll.llama_init_from_model(model, params)
        if not self.context:
            raise ValueError(f"llama.cpp refuses KV {kv_format} with flash attention {flash}")
        self.memory = ll.llama_get_memory(self.context)
        self.batch = ll.llama_batch_init(CHUNK, 0, 1)
        self.sequences = batch
        self.vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
        self.random = random.Random(1)
        self.filled = None  # depth of every sequence, when a fill is there to go back to

    def close(self):
        ll.llama_batch_free(self.batch)
        ll.llama_free(self.context)

    def step(self, items):
        """Decodes (sequence, position, wants logits) items, one random token each."""
        batch = self.batch
        batch.n_tokens = len(items)
        for i, (sequence, position, logits) in enumerate(items):
            batch.token[i] = self.random.randrange(self.vocabulary)
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
        status = ll.llama_decode(self.context, batch)
        if status != 0:
            raise ValueError(f"llama_decode ended with status {status}")

    def prefill(self, sequence, start, tokens):
        for first in range(start, start + tokens, CHUNK):
            end = min(first + CHUNK, start + tokens)
            self.step([(sequence, p, p == start + tokens - 1) for p in range(first, end)])

    def fill(self, depth):
        """Brings every sequence to `depth` tokens; tokens beyond it are dropped, not recomputed."""
        if self.filled == depth and depth > 0:
            for sequence in range(self.sequences):
                if not ll.llama_memory_seq_rm(self.memory, sequence, depth, -1):
                    self.filled = None
        if self.filled != depth or depth == 0:
            ll.llama_memory_clear(self.memory, False)
            for sequence in range(self.sequences):
                self.prefill(sequence, 0, depth)
        self.filled = depth
        ll.llama_synchronize(self.context)

    def measure(self, test, tokens, depth):
        self.fill(depth)
        start = time.perf_counter()
        if test == "prefill":
            for sequence in range(self.sequences):
                self.prefill(sequence, depth, tokens)
        else:
            for i in range(tokens):
                self.step([(sequence, depth + i, True) for sequence in range(self.sequences)])
                ll.llama_synchronize(self.context)
        ll.llama_synchronize(self.context)
        return time.perf_counter() - start


class Bench:
    def __init__(self, path, threads):
        ll.llama_backend_init()
        params = ll.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = ll.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.threads = threads
        self.sessions = {}  # by shape, the one used last at the end

    def session_for(self, shape):
        session = self.sessions.pop(shape, None)
        if session is None:
            while len(self.sessions) >= SESSIONS_MAX:
                self.sessions.pop(next(iter(self.sessions))).close()
            session = Session(self.model, shape, self.threads)
        self.sessions[shape] = session
        return session

    def answer(self, request):
        test, tokens, depth = request["test"], request["tokens"], request["depth"]
        if test not in ("prefill", "decode"):
            raise ValueError(f"unknown test {test!r}")
        shape = (request["kv_format"], request["flash"], request["batch"], depth + tokens)
        session = self.session_for(shape)
        if session.filled is None:
            session.measure(test, tokens, depth)  # warm-up, as llama-bench does; faults the cache in
        seconds = session.measure(test, tokens, depth)
        return {"seconds": seconds, "tok_s": tokens * session.sequences / seconds}


def main():
    # llama.cpp writes to file descriptor 1 at times; answers keep a private copy of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    log = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(log, None)
    path, threads = sys.argv[1], int(sys.argv[2])
    bench = Bench(path, threads)
    version = {"engine": "llama-cpp-python", "version": ll.__version__}
    version["system"] = ll.llama_print_system_info().decode().strip()
    print(json.dumps(version), file=answers, flush=True)
    for line in sys.stdin:
        try:
            reply = bench.answer(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
