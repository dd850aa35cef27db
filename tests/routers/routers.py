"""The routers, and how each is started before two servers."""

import dataclasses
import os
import pathlib

from server import Process, free_port, get

HERE = pathlib.Path(__file__).resolve().parent
WORKER = HERE.parent.parent / "integrations/dynamo/reef_worker.py"


@dataclasses.dataclass
class Router:
    """A router that runs: its URL, and what it consists of."""

    url: str
    metrics_url: str
    processes: list

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.end()


@dataclasses.dataclass
class Case:
    """A router and a policy."""

    router: str  # name of its venv and of its file of requirements
    package: str
    policy: str
    start: object
    # Requests go where the servers have told of a prefix, not only where the router has sent it before.
    by_events: bool = False
    # Name of a counter that must have counted hits in the router's index.
    hits: str = ""

    def version(self):
        lines = (HERE / "requirements" / f"{self.router}.txt").read_text().splitlines()
        return next(line.split("==")[1] for line in lines if line.startswith(self.package + "=="))


# The same in all three: look often, give up on a server quickly.
CHECKS = ["--health-check-interval-secs", 2, "--health-failure-threshold", 2, "--health-success-threshold", 1,
          "--health-check-timeout-secs", 2, "--worker-startup-check-interval", 1]


def single(words, servers, logs, extra=()):
    port, metrics_port = free_port(), free_port()
    command = [*words, "--host", "127.0.0.1", "--port", port, "--prometheus-host", "127.0.0.1",
               "--prometheus-port", metrics_port, "--worker-urls", *[server.url for server in servers], *extra]
    process = Process(command, logs / "router.log")
    return Router(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics", [process])


def smg(venvs, servers, logs, _):
    # By default 64 requests may wait at one server before a new prefix goes to the other.
    extra = ["--policy", "cache_aware", "--balance-abs-threshold", 1, "--balance-rel-threshold", 1.1, *CHECKS]
    return single([venvs / "smg/bin/smg", "launch"], servers, logs, extra)


def sglang(venvs, servers, logs, _):
    words = [venvs / "sglang/bin/python", "-m", "sglang_router.launch_router"]
    return single(words, servers, logs, ["--policy", "cache_aware", *CHECKS])


def vllm(venvs, servers, logs, _):
    return single([venvs / "vllm/bin/vllm-router"], servers, logs, ["--policy", "cache_aware", *CHECKS])


def vllm_kv_aware(venvs, servers, logs, _):
    extra = ["--policy", "kv_aware", "--kv-event-model", servers[0].model,
             "--kv-event-block-size", servers[0].block_size, *CHECKS]
    for server in servers:
        extra += ["--kv-event-source", f"{server.url}={server.events}"]
        extra += ["--kv-event-replay-source", f"{server.url}={server.replay}"]
    return single([venvs / "vllm/bin/vllm-router"], servers, logs, extra)


def dynamo(venvs, servers, logs, tokenizer):
    """A frontend that routes by KV events, and a worker process for each server."""
    python, port = venvs / "dynamo/bin/python", free_port()
    environment = {**os.environ, "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(logs / "discovery"),
                   "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_LOG": "info",
                   "HF_HUB_OFFLINE": "1", "HOME": str(logs)}
    # They would take the machine's other addresses.
    for name in ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"):
        environment[name] = "127.0.0.1"
    frontend = [python, "-m", "dynamo.frontend", "--router-mode", "kv", "--http-host", "127.0.0.1",
                "--http-port", port, "--kv-cache-block-size", servers[0].block_size, "--migration-limit", 2]
    processes = [Process(frontend, logs / "router.log", environment)]
    for server in servers:
        worker = [python, WORKER, "--url", server.url, "--tokenizer", tokenizer, "--kv-events", server.events]
        processes.append(Process(worker, logs / f"worker-{server.name}.log", environment))
    url = f"http://127.0.0.1:{port}"
    return Router(url, url + "/metrics", processes)


CASES = [
    Case("smg", "smg", "cache_aware", smg),
    Case("vllm", "vllm-router", "cache_aware", vllm),
    Case("vllm", "vllm-router", "kv_aware", vllm_kv_aware, by_events=True,
         hits='vllm_router_kv_placement_lookups_total{result="hit"}'),
    Case("sglang", "sglang-router", "cache_aware", sglang),
    Case("dynamo", "ai-dynamo", "kv", dynamo, by_events=True),
]


def metric(router, name):
    """The value of one of the router's counters; 0 where it has not counted."""
    _, text = get(router.metrics_url)
    found = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0
