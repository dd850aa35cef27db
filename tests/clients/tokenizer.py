"""Writes the tokenizer of a byte-level BPE model, as Hugging Face's libraries read it, from its GGUF file.

The load generators count and cut text with a local tokenizer and would fetch it from a hub. The GGUF file
has all that is needed: vocabulary, merges, token types, special ids and chat template.

    tokenizer.py MODEL.gguf FOLDER              writes tokenizer.json, tokenizer_config.json, config.json
    tokenizer.py --check FOLDER CASES.json...   compares with the ids that llama.cpp gave for awkward texts
"""

import json
import pathlib
import sys

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
# tokenizer.ggml.pre: cut off every digit, then GPT-2's expression.
SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r"}
GPT2 = {"gpt-2", "phi-2", "olmo"}


def pre_tokenizer(pre):
    bytes_step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if pre in SINGLE_DIGITS:
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_step]}
    if pre in GPT2:
        return bytes_step
    sys.exit(f"tokenizer.ggml.pre is `{pre}`: this script writes {sorted(SINGLE_DIGITS | GPT2)}; use smollm2")


def field(reader, name, otherwise=None):
    found = reader.fields.get(name)
    return otherwise if found is None else found.contents()


def write(path, folder):
    from gguf import GGUFReader

    reader = GGUFReader(path)
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    if field(reader, "tokenizer.ggml.model") != "gpt2":
        sys.exit(f"{path}: tokenizer.ggml.model is not gpt2 (byte-level BPE)")
    added = [
        {"id": at, "content": tokens[at], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": kind == CONTROL}
        for at, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)
    ]
    merges = [merge.split(" ", 1) for merge in field(reader, "tokenizer.ggml.merges")]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": pre_tokenizer(field(reader, "tokenizer.ggml.pre")),
        "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: at for at, token in enumerate(tokens)}, "merges": merges,
        },
    }
    architecture = field(reader, "general.architecture")
    context = field(reader, f"{architecture}.context_length")
    special = lambda name: tokens[field(reader, f"tokenizer.ggml.{name}_token_id", 0)]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context,
        "bos_token": special("bos"), "eos_token": special("eos"), "unk_token": special("unknown"),
        "pad_token": special("padding"), "add_bos_token": False, "clean_up_tokenization_spaces": False,
        "chat_template": field(reader, "tokenizer.chat_template"),
    }
    config = {"model_type": architecture, "vocab_size": len(tokens), "max_position_embeddings": context}
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in [("tokenizer.json", tokenizer), ("tokenizer_config.json", settings),
                           ("config.json", config)]:
        (folder / name).write_text(json.dumps(document, ensure_ascii=False))


def check(folder, files):
    from tokenizers import Tokenizer

    tokenizer, checked = Tokenizer.from_file(str(folder / "tokenizer.json")), 0
    for file in files:
        for case in json.loads(pathlib.Path(file).read_text())["cases"]:
            ids = tokenizer.encode(case["text"], add_special_tokens=False).ids
            if ids != case["ids"]:
                sys.exit(f"{file}: {case['text']!r} gives {ids}, llama.cpp {case['ids']}")
            checked += 1
    print(f"tokenizer agrees with llama.cpp on {checked} texts")


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check(pathlib.Path(sys.argv[2]), sys.argv[3:])
    else:
        write(sys.argv[1], pathlib.Path(sys.argv[2]))
