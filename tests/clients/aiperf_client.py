"""`aiperf`: streamed chat and completions with usage, and the replay of a trace in Mooncake's format."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

from checks import MODEL, URL, Checks

checks = Checks()
FOLDER = pathlib.Path(os.environ["REEF_SCRATCH"])
AIPERF = str(pathlib.Path(sys.executable).with_name("aiperf"))
COUNT, TOKENS = 12, 16


def cached_tokenizer():
    """The tokenizer's name in a hub's cache of our own: offline, as aiperf's workers always are, it takes no folder."""
    repository = pathlib.Path(os.environ["HF_HOME"]) / "hub/models--reef--tokenizer"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(revision)
    shutil.copytree(os.environ["REEF_TOKENIZER"], repository / "snapshots" / revision)
    return "reef/tokenizer"


def trace(path):
    """Two families of prompts that share their first block of 512 tokens, one request every 100 ms."""
    lines = [{"timestamp": 100 * at, "input_length": 640, "output_length": TOKENS, "hash_ids": [at % 2, 10 + at]}
             for at in range(COUNT)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


SYNTHETIC = ["--concurrency", "4", "--request-count", str(COUNT), "--synthetic-input-tokens-mean", "64",
             "--output-tokens-mean", str(TOKENS), "--random-seed", "7"]
RUNS = {
    "chat": [*SYNTHETIC, "--endpoint-type", "chat", "--streaming"],
    "completions": [*SYNTHETIC, "--endpoint-type", "completions", "--streaming"],
    "unstreamed": [*SYNTHETIC, "--endpoint-type", "chat"],
    "mooncake": ["--endpoint-type", "chat", "--streaming", "--custom-dataset-type", "mooncake_trace",
                 "--input-file", trace(FOLDER / "trace.jsonl"), "--fixed-schedule"],
}


def run(name, tokenizer, more):
    out = FOLDER / name
    command = [AIPERF, "profile", "--model", MODEL, "--url", URL, "--tokenizer", tokenizer,
               "--ui", "none", "--use-server-token-count", "--extra-inputs", "ignore_eos:true",
               "--artifact-dir", str(out), "--export-level", "records", *more]
    checks.equal(f"{name}: exit status", subprocess.run(command, timeout=400).returncode, 0)
    summary = json.loads((out / "profile_export_aiperf.json").read_text())
    checks.equal(f"{name}: requests", summary["request_count"]["avg"], COUNT)
    checks.equal(f"{name}: errors", summary.get("error_request_count", {}).get("avg", 0), 0)
    checks.equal(f"{name}: output tokens", summary["output_sequence_length"]["avg"], TOKENS)
    records = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]
    checks.equal(f"{name}: no record has an error", [one["error"] for one in records if one.get("error")], [])


tokenizer = cached_tokenizer()
for name, more in RUNS.items():
    with checks.group(name):
        run(name, tokenizer, more)
checks.close(f"{COUNT} requests each: {', '.join(RUNS)}")
