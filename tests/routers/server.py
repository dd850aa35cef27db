"""`reef serve` on loopback ports, for a test."""

import json
import pathlib
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

# A server is ready within seconds; a busy machine takes longer.
READY_WITHIN_S = 120


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url, timeout_s=10):
    """Status and text of an answer; status 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class Process:
    """A child whose output goes to a file; ended at the end of a `with` block."""

    def __init__(self, command, log, environment=None):
        self.log = pathlib.Path(log)
        with self.log.open("wb") as out:
            self.child = subprocess.Popen([str(word) for word in command], stdout=out, stderr=subprocess.STDOUT,
                                          stdin=subprocess.DEVNULL, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        """SIGTERM, and SIGKILL to whoever does not listen."""
        if self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()

    def kill(self):
        """SIGKILL."""
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()

    def told(self, lines=15):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class ReefServer(Process):
    def __init__(self, reef, model, name, logs, kv_memory):
        self.port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = f"tcp://127.0.0.1:{self.events_port}"
        self.replay = f"tcp://127.0.0.1:{self.replay_port}"
        self.name = name
        command = [reef, "serve", model, "--port", self.port, "--threads", 1, "--kv-memory", kv_memory,
                   "--kv-events", self.events, "--kv-events-replay", self.replay]
        super().__init__(command, logs / f"{name}.log")

    def wait(self):
        """Until it is ready."""
        deadline = time.monotonic() + READY_WITHIN_S
        while get(self.url + "/health")[0] != 200:
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not start:\n{self.told()}")
            time.sleep(0.1)
        self.model = json.loads(get(self.url + "/v1/models")[1])["data"][0]["id"]
        self.block_size = int(self.metric_labels("vllm:cache_config_info")["block_size"])
        return self

    def metric_labels(self, name):
        status, text = get(self.url + "/metrics")
        line = next((line for line in text.splitlines() if line.startswith(name + "{")), None)
        if line is None:
            raise RuntimeError(f"{self.url}/metrics ({status}) has no {name}")
        return dict(re.findall(r'(\w+)="([^"]*)"', line))

    def prompts(self):
        """Prompts that it has finished."""
        _, text = get(self.url + "/metrics")
        lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
