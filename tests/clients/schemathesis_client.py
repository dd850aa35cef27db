"""`schemathesis` with the server's own OpenAPI document: requests that keep to it and requests that do not.

No answer may be a 5xx or of a shape that the document does not tell, none may take long, and the server must
be well afterwards. The document comes from the server; this file is also schemathesis's file of hooks.
"""

import os
import pathlib
import re
import subprocess
import sys

import schemathesis

EXAMPLES, MOST_TOKENS = 20, 16
CHECKS = ("not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
          "unsupported_method")


@schemathesis.hook
def map_body(context, body):
    """What would be right, and only take long, is made short; what would be refused stays as it is."""
    if isinstance(body, dict):
        for fields in (body, body.get("sampling_params")):
            if isinstance(fields, dict):
                for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
                    if isinstance(fields.get(name), int) and MOST_TOKENS < fields[name] < 8192:
                        fields[name] = MOST_TOKENS
        if "messages" in body and not (body.keys() & {"max_tokens", "max_completion_tokens"}):
            body["max_tokens"] = MOST_TOKENS
    return body


def drive():
    from checks import URL, Checks, settles

    checks = Checks()
    folder = pathlib.Path(os.environ["REEF_SCRATCH"])
    command = [str(pathlib.Path(sys.executable).with_name("schemathesis")), "run", f"{URL}/openapi.json",
               "--checks", CHECKS, "--max-examples", str(EXAMPLES), "--request-timeout", "60",
               "--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--no-shrink", "--no-color",
               "--seed", "7", "--max-time", "480", "--generation-database", "none", "--warnings", "off",
               "--report", "ndjson", "--report-dir", str(folder)]
    hooks = {"SCHEMATHESIS_HOOKS": pathlib.Path(__file__).stem, "PYTHONPATH": str(pathlib.Path(__file__).parent)}
    ended = subprocess.run(command, env=os.environ | hooks, text=True, stdout=subprocess.PIPE)
    print(ended.stdout)
    checks.equal("exit status", ended.returncode, 0)
    tested = re.search(r"(\d+) generated", ended.stdout)
    cases = int(tested[1]) if tested else 0
    checks.that("it tested something", cases > 500, cases)
    checks.that("nothing is left running", settles("vllm:num_requests_running", 0, within_s=60))
    checks.close(f"{cases} requests by the OpenAPI document and against it")


if __name__ == "__main__":
    drive()
