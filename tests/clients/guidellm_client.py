"""`guidellm`: chat and completions under concurrency, with usage in every chunk.

It loads data with PyTorch's DataLoader, one at a time, and uses nothing else of PyTorch,
which PyPI has only with 5 GB of CUDA libraries: what it uses is written out here. `guidellm_client.py --cli
ARGUMENTS` is then `guidellm ARGUMENTS`; its worker processes begin by importing this file too.
"""

import json
import os
import pathlib
import subprocess
import sys
import types


class Generator:
    def manual_seed(self, seed):
        return self


class IterableDataset:
    def __class_getitem__(cls, _):
        return cls


class DataLoader(IterableDataset):
    """Batches of one, in order: the only way in which guidellm calls it. (There a worker prefetches.)"""

    def __init__(self, dataset, batch_size, collate_fn, shuffle=False, num_workers=0, **_):
        assert batch_size == 1 and not shuffle and num_workers <= 1
        self.dataset, self.collate_fn = dataset, collate_fn

    def __iter__(self):
        return (self.collate_fn([item]) for item in self.dataset)


def stand_in(name, **contents):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)
    return sys.modules[name]


def without_torch():
    import datasets  # noqa: F401  # both first: they must not think that there is a PyTorch
    import transformers

    assert not transformers.is_torch_available()
    data = stand_in("torch.utils.data", get_worker_info=lambda: None, IterableDataset=IterableDataset)
    stand_in("torch.utils.data.dataloader", DataLoader=DataLoader)
    stand_in("torch.utils.data.dataset", IterableDataset=IterableDataset)
    stand_in("torch", utils=stand_in("torch.utils", data=data), Generator=Generator)


def drive():
    from checks import MODEL, URL, Checks

    checks = Checks()
    folder = pathlib.Path(os.environ["REEF_SCRATCH"])
    told = []
    for path in ("/v1/completions", "/v1/chat/completions"):
        out = folder / f"{path.rsplit('/v1/', 1)[1].replace('/', '-')}.json"
        backend = {"kind": "openai_http", "target": URL, "model": MODEL, "request_format": path}
        command = [
            sys.executable, __file__, "--cli", "run", "--disable-progress",
            "--backend", json.dumps(backend),
            "--tokenizer", json.dumps({"kind": "hf_auto", "model": os.environ["REEF_TOKENIZER"]}),
            "--data", json.dumps({"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": 16}),
            "--profile", json.dumps({"kind": "concurrent", "streams": [4]}),
            "--constraint", json.dumps({"kind": "max_requests", "count": 12}),
            "--output", json.dumps({"kind": "json", "path": str(out)}),
        ]
        checks.equal(f"{path}: exit status", subprocess.run(command, timeout=400).returncode, 0)
        with checks.group(f"{path}: its report"):
            benchmark = json.loads(out.read_text())["benchmarks"][0]
            requests = benchmark["requests"]
            checks.equal(f"{path}: successful", len(requests["successful"]), 12)
            checks.equal(f"{path}: errored", requests["errored"], [])
            counts = [one["output_metrics"]["text_tokens"] for one in requests["successful"]]
            checks.equal(f"{path}: output tokens by the server's usage", set(counts), {16})
            told.append(f"{path} {len(counts)} requests")
    checks.close(f"4 at once: {', '.join(told)}")


if sys.argv[1:2] == ["--cli"] or __name__ == "__mp_main__":
    without_torch()
if __name__ == "__main__":
    if sys.argv[1:2] == ["--cli"]:
        from guidellm.__main__ import cli

        cli(sys.argv[2:])
    else:
        drive()
