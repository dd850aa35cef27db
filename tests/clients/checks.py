"""How the client scripts count what they saw: every check is printed, all run, one failure fails the script.

A script learns about the server from its environment: REEF_URL (http://host:port), REEF_MODEL (the id),
REEF_TOKENIZER (a folder that tokenizer.py wrote), REEF_SCRATCH (an empty folder of its own), REEF_BINARY and
REEF_MODEL_PATH (to start another server). The last line of its stdout says what it did; its exit status
whether all of that was right.
"""

import contextlib
import json
import os
import sys
import time
import traceback
import urllib.request

URL = os.environ["REEF_URL"]
MODEL = os.environ["REEF_MODEL"]


class Checks:
    def __init__(self):
        self.passed, self.failed = 0, []

    def that(self, name, holds, seen=None):
        if holds:
            self.passed += 1
            print(f"ok    {name}", flush=True)
        else:
            self.failed.append(name)
            print(f"FAIL  {name}: {seen!r}", flush=True)

    def equal(self, name, seen, wanted):
        self.that(name, seen == wanted, f"{seen!r} is not {wanted!r}")

    @contextlib.contextmanager
    def group(self, name):
        """What goes wrong inside counts against `name`, and the script goes on."""
        try:
            yield
        except Exception:  # a client may raise anything, and all of it is a failure
            traceback.print_exc(file=sys.stdout)
            self.that(name, False, "raised (above)")

    @contextlib.contextmanager
    def raises(self, name, kind, *holds):
        """That the block raises `kind`, and that each of `holds` is true of the exception."""
        try:
            yield
        except kind as error:
            wrong = [index for index, hold in enumerate(holds) if not hold(error)]
            self.that(name, not wrong, (wrong, error, getattr(error, "body", None)))
        except Exception as error:
            self.that(name, False, error)
        else:
            self.that(name, False, f"no {kind.__name__}")

    def close(self, did):
        print(f"{self.passed} checks passed, {len(self.failed)} failed: {did}")
        sys.exit(1 if self.failed or not self.passed else 0)


def post(path, body, timeout_s=60):
    """The JSON that the server answers, by no client at all."""
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.load(answer)


def metric(name):
    """The sum over labels of one series of /metrics; None where it is not there."""
    with urllib.request.urlopen(URL + "/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.split("{")[0].split(" ")[0] == name]
    return sum(map(float, values)) if values else None


def settles(name, wanted, within_s=20.0):
    """Whether a gauge comes to `wanted`."""
    end = time.monotonic() + within_s
    while metric(name) != wanted:
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
