"""SGLang's load generator, written in Rust and shipped in the package `sglang`; the engine is not loaded."""

import importlib.util
import json
import os
import pathlib
import sysconfig

from checks import MODEL, URL, Checks

checks = Checks()
FOLDER = pathlib.Path(os.environ["REEF_SCRATCH"])
COUNT, TOKENS = 16, 16


def extension():
    folder = pathlib.Path(sysconfig.get_path("purelib")) / "sglang/srt/rust_extensions"
    spec = importlib.util.spec_from_file_location("_bench", next(folder.glob("_bench.*")))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(bench, backend, **more):
    settings = {
        "backend": backend, "base_url": URL, "model": MODEL, "tokenizer": os.environ["REEF_TOKENIZER"],
        "dataset_name": "random-ids", "random_input_len": 64, "random_output_len": TOKENS,
        "random_range_ratio": 1.0, "num_prompts": COUNT, "max_concurrency": 8, "request_rate": "inf",
        "disable_tqdm": True, "warmup_requests": 1, "seed": 7, "output_file": str(FOLDER / f"{backend}.jsonl"),
        "output_details": True, "ready_check_timeout_sec": 60, "headers": [],
    }
    result = json.loads(bench.run_config(json.dumps(settings | more)))
    checks.equal(f"{backend}: completed", result["completed"], COUNT)
    checks.equal(f"{backend}: output tokens", result["total_output_tokens"], COUNT * TOKENS)
    checks.equal(f"{backend}: no error", [error for error in result.get("errors", []) if error], [])
    return f"{backend} {result['output_throughput']:.0f} tok/s"


rates, bench = [], extension()
for backend, more in [("vllm", {}), ("vllm-chat", {}), ("sglang-oai", {"tokenize_prompt": True}),
                      ("sglang-oai-chat", {"disable_stream": True})]:
    with checks.group(backend):
        rates.append(run(bench, backend, **more))
checks.close(f"{COUNT} prompts each, 8 at once: {', '.join(rates)}")
