"""Small tokenizers with the special tokens, files and templates of six families, without their vocabularies.

Used by make_token_references.py, which writes what transformers makes of them, and by the tests.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

PIECES = 360  # of the SentencePiece model
TEXT, COMPLETION = "The  quick fox: café, 42.\n", " jumps over <b>it</b>  "
CHAT = [
    {"role": "user", "content": "Who  are you?"},
    {"role": "assistant", "content": "A fox, <s> is no end.  "},
    {"role": "user", "content": " And now?"},
    {"role": "assistant", "content": "Still one"},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | "
    "trim) + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>"
    "\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\n' + (m.content | trim) + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}"
    "{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)

ADDED = {"content": "", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


def _byte_level(special: list[str]) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)} | {"Ġf": 256}, [("Ġ", "f")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _begun(tokenizer: Tokenizer, begin: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))])


def _gpt2(folder: Path) -> dict[str, Any]:
    _byte_level([]).model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": 257}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 257, "bos_token_id": 257}))
    return {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def _gpt2_chatml(folder: Path) -> dict[str, Any]:
    config = _gpt2(folder)
    tokens = {257: "<|endoftext|>", 258: "<|im_start|>", 259: "<|im_end|>"}
    decoder = {str(i): ADDED | {"content": name} for i, name in tokens.items()}
    return config | {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>", "chat_template": CHATML}


def _llama3(folder: Path) -> dict[str, Any]:
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id"]
    tokenizer = _byte_level([f"<|{name}|>" for name in names])
    parts = [processors.ByteLevel(trim_offsets=True), _begun(tokenizer, "<|begin_of_text|>")]
    tokenizer.post_processor = processors.Sequence(parts)
    tokenizer.save(str(folder / "tokenizer.json"))
    _generation(folder, tokenizer, ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"])
    return {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3}


def _gemma(folder: Path) -> dict[str, Any]:
    letters = sorted({chr(i) for i in range(32, 127)} | set("é▁\n"))
    names = ["<pad>", "<eos>", "<bos>", "<unk>"]
    vocabulary = {name: i for i, name in enumerate([*names, "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_special_tokens([*names, "<start_of_turn>", "<end_of_turn>"])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("</s>", "<b>", "</b>")])  # of HTML
    tokenizer.post_processor = _begun(tokenizer, "<bos>")
    tokenizer.save(str(folder / "tokenizer.json"))
    _generation(folder, tokenizer, ["<eos>", "<end_of_turn>"])
    return {"add_bos_token": True, "bos_token": "<bos>", "eos_token": "<eos>", "chat_template": GEMMA}


def _qwen3(folder: Path) -> dict[str, Any]:
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    _generation(folder, tokenizer, ["<|im_end|>", "<|endoftext|>"], bos_token_id=tokenizer.token_to_id("<|endoftext|>"))
    return {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHATML}


def _deepseek(folder: Path) -> dict[str, Any]:
    names = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
    tokenizer = _byte_level(names)
    parts = [processors.ByteLevel(trim_offsets=True), _begun(tokenizer, names[0])]
    tokenizer.post_processor = processors.Sequence(parts)
    tokenizer.save(str(folder / "tokenizer.json"))
    _generation(folder, tokenizer, names[1:2])
    begin, end = (ADDED | {"__type": "AddedToken", "content": name} for name in names[:2])
    return {"bos_token": begin, "eos_token": end} | {
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": DEEPSEEK,
    }


def _generation(folder: Path, tokenizer: Tokenizer, ends: list[str], **more: Any) -> None:
    ids = [tokenizer.token_to_id(end) for end in ends]
    content = {"eos_token_id": ids if len(ids) > 1 else ids[0], **more}
    (folder / "generation_config.json").write_text(json.dumps(content))


LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
# Of a SentencePiece model, tokenizer_config.json; with the tokens that the others have in tokenizer.json.
SENTENCEPIECE = {
    "llama2": LLAMA | {"legacy": False, "chat_template": LLAMA2},
    "llama2_legacy": LLAMA | {"tokenizer_class": "PreTrainedTokenizerFast", "legacy": True, "chat_template": LLAMA2},
    "llama2_chatml": LLAMA | {"legacy": False, "eos_token": "<|im_end|>", "chat_template": CHATML},
}
TOKENIZERS_LIBRARY = {
    "gpt2": _gpt2,
    "gpt2_chatml": _gpt2_chatml,
    "llama3": _llama3,
    "gemma": _gemma,
    "qwen3": _qwen3,
    "deepseek": _deepseek,
}
FAMILIES = (*TOKENIZERS_LIBRARY, *SENTENCEPIECE)


def write_family(name: str, folder: Path, sentencepiece_model: bytes) -> None:
    """Write the files of a family's tokenizer to a folder, with the model for those of SentencePiece."""
    folder.mkdir()
    if name in TOKENIZERS_LIBRARY:
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | TOKENIZERS_LIBRARY[name](folder)
    else:
        (folder / "tokenizer.model").write_bytes(sentencepiece_model)
        names = ["<unk>", "<s>", "</s>"] + ["<|im_start|>", "<|im_end|>"] * (name == "llama2_chatml")
        ids = [*range(3), PIECES, PIECES + 1]
        decoder = {str(i): ADDED | {"content": text} for i, text in zip(ids, names, strict=False)}
        config = SENTENCEPIECE[name] | {"added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
