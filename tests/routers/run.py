"""Two `reef serve` behind each router: streams, affinity, failover. `cargo xtask routers` starts this.

    run.py --reef BINARY --venvs FOLDER --logs FOLDER [--model smollm2] [--only smg,vllm,sglang,dynamo,events]

Prints a table; the exit code is 1 where anything failed.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

import checks
from routers import CASES
from server import ReefServer
from traffic import Broken

HERE = pathlib.Path(__file__).resolve().parent
# All prefixes of all rounds, should a router send them all to one server: 6 MB each in smollm2.
KV_MEMORY = "256MiB"
# So little that blocks give way, which is to be told.
EVENTS_KV_MEMORY = "32MiB"


def run_case(case, options, logs, tokenizer):
    """Runs all checks of a case; returns what they have to say."""
    with ReefServer(options.reef, options.model, "a", logs, KV_MEMORY) as a, \
            ReefServer(options.reef, options.model, "b", logs, KV_MEMORY) as b:
        servers = [a.wait(), b.wait()]
        model = a.model
        with case.start(options.venvs, servers, logs, tokenizer) as router:
            checks.wait(router, model)
            said = [checks.streams(router, model), checks.affinity(router, servers, model)]
            if case.by_events:
                said.append(checks.told_by_events(router, servers, model))
            if case.hits:
                said.append(checks.index_hits(router, case.hits))
            return said + [checks.failover(router, servers, model)]


def run_events(options, logs):
    """vLLM's own structs decode what a server publishes."""
    with ReefServer(options.reef, options.model, "a", logs, EVENTS_KV_MEMORY) as server:
        server.wait()
        client = [options.venvs / "events/bin/python", HERE / "events_client.py", server.url, server.model,
                  server.events, server.replay]
        done = subprocess.run([str(word) for word in client], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise Broken((done.stdout + done.stderr)[-2000:])
    return done.stdout.strip().splitlines()


def model_tokenizer(options):
    """The model's tokenizer as Hugging Face's libraries read it, for Dynamo's frontend."""
    folder = options.logs / f"tokenizer-{options.model}"
    if not (folder / "tokenizer.json").exists():
        path = subprocess.run([options.reef, "pull", options.model], check=True, capture_output=True, text=True)
        file = path.stdout.strip().splitlines()[-1]
        writer = HERE.parent / "clients/tokenizer.py"
        subprocess.run([options.venvs / "dynamo/bin/python", writer, file, folder], check=True)
        # The frontend reads the ids that end a text here, and wants to be told an architecture.
        path, settings = folder / "config.json", json.loads((folder / "tokenizer_config.json").read_text())
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        config = {**json.loads(path.read_text()), "architectures": ["LlamaForCausalLM"],
                  "bos_token_id": vocabulary[settings["bos_token"]],
                  "eos_token_id": vocabulary[settings["eos_token"]]}
        path.write_text(json.dumps(config))
    return folder


def guarded(work):
    """What `work` says, or what was wrong."""
    try:
        return True, "; ".join(work())
    except (Broken, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return False, str(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reef", required=True)
    parser.add_argument("--venvs", type=pathlib.Path, required=True)
    parser.add_argument("--logs", type=pathlib.Path, required=True)
    parser.add_argument("--model", default="smollm2")
    names = sorted({case.router for case in CASES}) + ["events"]
    parser.add_argument("--only", default=",".join(names), help="of " + ", ".join(names))
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := [name for name in only if name not in names]:
        parser.error(f"--only: no router is called {unknown[0]}: there are {', '.join(names)}")
    rows = []
    work = [(f"{case.package} {case.version()}", case.policy, case) for case in CASES if case.router in only]
    work += [("vLLM's KV events", "msgspec", None)] if "events" in only else []
    for name, policy, case in work:
        logs = options.logs / f"{case.router if case else 'events'}-{policy}"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        start = time.monotonic()
        if case is None:
            passed, said = guarded(lambda: run_events(options, logs))
        else:
            tokenizer = model_tokenizer(options) if case.router == "dynamo" else None
            passed, said = guarded(lambda: run_case(case, options, logs, tokenizer))
        rows.append((name, policy, "passed" if passed else "FAILED", said))
        print(f"{name} {policy}: {rows[-1][2]} in {time.monotonic() - start:.0f} s (logs: {logs})\n  {said}",
              flush=True)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    print("\n" + "\n".join(" | ".join([*(row[at].ljust(widths[at]) for at in range(3)),
                                       row[3].splitlines()[0] if row[3] else ""]) for row in rows))
    failed = sum(row[2] != "passed" for row in rows)
    print(f"\n{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
