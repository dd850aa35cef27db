"""Writes crates/model/tests/data/chat_template.json: what Jinja2 renders, set up as transformers does.

Run from the repository's root: python3 xtask/golden/chat_template.py
Needs: pip install jinja2
"""

import json
from datetime import datetime, timezone
from pathlib import Path

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

DATA = Path("crates/model/tests/data")
NOW_S = 1_732_889_133
TOKENS = {
    "smollm2": ("<|im_start|>", "<|im_end|>"),
    "qwen2": ("", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<eos>"),
    "idioms": ("<s>", "</s>"),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <b>weather</b> & näher: 天気 \"now\"\n",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
                "empty": {},
                "none": [],
                "ratio": 0.5,
                "ok": True,
                "nil": None,
            },
        },
    }
]


def say(role, content, **more):
    return {"role": role, "content": content, **more}


CONVERSATIONS = {
    "question": [say("user", "Hello, world!")],
    "system": [say("system", "  Be brief.\n"), say("user", " Why is the sky blue?  ")],
    "turns": [
        say("user", "1 < 2 & 'a' \"b\""),
        say("assistant", "Grüße, 世界 🦀\n"),
        say("user", "{{ not a template }} {% nor this %}\n\n"),
    ],
    "empty": [say("user", "")],
    "wrong order": [say("assistant", "I begin."), say("assistant", "And go on.")],
}


class GenerationTag(Extension):
    """transformers' `{% generation %}`: marks what was generated, renders it as it is."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.fromtimestamp(NOW_S, timezone.utc).strftime(form)
    return env


def main():
    env, cases = environment(), []
    for name, (bos, eos) in TOKENS.items():
        template = env.from_string((DATA / "chat_templates" / f"{name}.jinja").read_text())
        for messages in CONVERSATIONS.values():
            for tools in (None, TOOLS):
                for prompt in (False, True):
                    case = {
                        "template": name,
                        "messages": messages,
                        "tools": tools,
                        "add_generation_prompt": prompt,
                    }
                    try:
                        case["text"] = template.render(
                            messages=messages,
                            tools=tools,
                            documents=None,
                            add_generation_prompt=prompt,
                            bos_token=bos,
                            eos_token=eos,
                        )
                    except TemplateError as error:
                        case["refused"] = str(error)
                    cases.append(case)
    document = {"now_s": NOW_S, "tokens": TOKENS, "cases": cases}
    (DATA / "chat_template.json").write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


main()
