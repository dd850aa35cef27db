"""`lm-eval`: likelihoods of given texts, choices and free generation, on tasks made here; nothing is fetched.

The text is the repository's own. What lm-eval makes of the server's log-probabilities must be what
`reef eval ppl` computes from the same ids without any server.
"""

import json
import math
import os
import pathlib
import subprocess
import sys

from checks import MODEL, URL, Checks

checks = Checks()
FOLDER = pathlib.Path(os.environ["REEF_SCRATCH"])
TEXT = (pathlib.Path(__file__).parent / "../../ARCHITECTURE.md").read_text()
ROLLING = TEXT[:4000]

TASK = """
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
{more}
metadata:
  version: 1.0
"""
CHOICE = """doc_to_text: "{{context}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""
PERPLEXITY = """doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: byte_perplexity
"""
GENERATE = """doc_to_text: "{{context}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 24
  temperature: 0
metric_list:
  - metric: exact_match
    ignore_case: true
    ignore_punctuation: true
"""


def documents():
    """Cut sentences with their own ends among the same words in other orders; a text; lists to go on with."""
    words, choices = TEXT.split(), []
    for index, at in enumerate(range(0, 480, 40)):
        true = words[at + 30:at + 38]
        ends = [true, true[::-1], sorted(true), true[3:] + true[:3]]
        ends = [" " + " ".join(ends[(other - index) % 4]) for other in range(4)]
        choices.append({"context": " ".join(words[at:at + 30]), "answer": index % 4, "choices": ends})
    counting = [{"context": f"{at}, {at + 1}, {at + 2}, {at + 3},", "answer": f"{at + 4}"} for at in range(1, 5)]
    return {"reef_choice": choices, "reef_text": [{"text": ROLLING}], "reef_generate": counting}


def write_tasks():
    kinds = {"reef_choice": ("multiple_choice", CHOICE), "reef_text": ("loglikelihood_rolling", PERPLEXITY),
             "reef_generate": ("generate_until", GENERATE)}
    for task, lines in documents().items():
        data = FOLDER / f"{task}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        kind, more = kinds[task]
        (FOLDER / f"{task}.yaml").write_text(TASK.format(task=task, data=data, kind=kind, more=more))


def evaluate(name, model, tasks, path, **settings):
    """The results of one run of lm-eval."""
    settings = {"model": MODEL, "base_url": f"{URL}{path}", "num_concurrent": 4, "max_retries": 1} | settings
    out = FOLDER / name
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args",
               ",".join(f"{key}={value}" for key, value in settings.items()), "--tasks", ",".join(tasks),
               "--include_path", str(FOLDER), "--output_path", str(out), "--log_samples", "--batch_size", "1",
               *(["--apply_chat_template"] if "chat" in model else [])]
    checks.equal(f"{name}: exit status", subprocess.run(command, timeout=600).returncode, 0)
    return json.loads(next(out.rglob("results_*.json")).read_text())["results"]


def reference_nats(prefix):
    """The negative log-likelihood of ROLLING by `reef eval ppl`, nats."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["REEF_TOKENIZER"])
    ids = [prefix, *tokenizer.encode(ROLLING, add_special_tokens=False)]
    path = FOLDER / "ids.json"
    path.write_text(json.dumps(ids))
    command = [os.environ["REEF_BINARY"], "eval", "ppl", os.environ["REEF_MODEL_PATH"], "--ids", str(path), "--json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return told["nll"] * told["tokens"]


def likelihoods():
    tasks = ["reef_choice", "reef_text"]
    local = {"tokenizer": os.environ["REEF_TOKENIZER"], "tokenizer_backend": "huggingface"}
    by_ids = evaluate("ids", "local-completions", tasks, "/v1/completions", max_length=4096, **local)
    remote = evaluate("remote", "local-completions", tasks, "/v1/completions", max_length=4096,
                      tokenizer_backend="remote")
    checks.equal("the server's tokenizer gives what a local one gives", remote, by_ids)
    accuracy = by_ids["reef_choice"]["acc,none"]
    checks.that("choices: true ends are likelier than the same words in other orders", accuracy >= 0.75, accuracy)
    nats = math.log(by_ids["reef_text"]["byte_perplexity,none"]) * len(ROLLING.encode())
    wanted = reference_nats(1)
    checks.that("text: as `reef eval ppl` has it", abs(nats - wanted) < 1e-3 * wanted, (nats, wanted))
    return accuracy, nats


def generation():
    text = evaluate("generate", "local-completions", ["reef_generate"], "/v1/completions", max_length=4096,
                    tokenizer=os.environ["REEF_TOKENIZER"])
    chat = evaluate("chat", "local-chat-completions", ["reef_generate"], "/v1/chat/completions")
    for name, result in (("completions", text), ("chat", chat)):
        checks.that(f"generate_until by {name}", "exact_match,none" in result["reef_generate"], result)


write_tasks()
seen = (0.0, 0.0)
with checks.group("likelihoods"):
    seen = likelihoods()
with checks.group("generation"):
    generation()
checks.close(f"accuracy {seen[0]:.2f} on 12 choices, {seen[1]:.0f} nats for a text, generation")
