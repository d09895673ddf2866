"""Formats of training data: text, chats, chat templates, tokenizers, token files, caches, prompts."""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

from dev.fuzz.subject import Packing, Subject, packing_of, write

TEXTS = [{"text": "ab ba é\n" * n, "meta": {"id": n, "tags": ["x", None]}} for n in (1, 3, 7)]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
ASK, TELL = {"role": "user", "content": " a? "}, {"role": "assistant", "content": "b", "weight": 1}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "s"}, ASK, TELL, ASK, TELL | {"weight": 0}, ASK, TELL]},
    {"messages": [ASK, TELL | {"content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "1"}, TELL]}
    | {"tools": [TOOL], "documents": [{"title": "t", "text": "d"}], "chat_template_kwargs": {"thinking": True}},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"instruction": "a", "input": "i", "output": "b"},
    {"prompt": "a", "completion": "b"},
    {"prompt": [ASK], "completion": [TELL], "tools": json.dumps([TOOL])},
]
TEMPLATE = (
    "{%- macro turn(m) %}<{{ m.role }}>"
    "{{ m['content'] | trim if m.content is string else (m.content or none) | tojson }}"
    "{% endmacro %}{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role not in ['user', 'assistant', 'system', 'tool'] %}{{ raise_exception('role') }}{% endif %}"
    "{{ turn(m) }}{% for c in m.tool_calls or [] %}{{ c.function.name ~ ':' ~ c.function.arguments }}{% endfor %}"
    "{% if loop.first and 1 + 2 * 3 > 2 %}!{% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATE_WORDS = (
    *(b"lipsum(1000000)", b"range(10 ** 9)", b"10 ** 10 ** 10", b"('x' * 10 ** 9)", b"'x'.ljust(3000000000)"),
    *(b"'%999999999d' % 1", b"'{:>999999999}'.format(1)", b"(messages | batch(10 ** 9) | list)", b"().__class__"),
    *(b"strftime_now('%999999d')", b"{% for i in range(10000) %}{% for j in range(10000) %}x{% endfor %}{% endfor %}"),
    *(b"{% set x = messages %}", b"{% include 'x' %}", b"self.__init__", b"cycler", b"loop", b"m", b"{%", b"%}", b"{#"),
    *(b"('x' | indent(10 ** 9))", b"('x' | center(10 ** 9))", b"{% break %}", b"{% generation %}", b"joiner(9)"),
    *(b"caller()", b"('x' | urlize(9))", b"{{ turn(m) }}", b"(messages | map('upper') | join)", b"(1 | string)"),
)


def tokenizer_folder(folder: Path) -> Path:
    """A model's folder with tokenizer.json, the files beside it, and a chat template."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*alphabet, "ab", "abab", "<s>", "<eos>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "ab")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    last = len(vocab) - 1
    beside = {
        "tokenizer_config.json": {
            "eos_token": {"content": "<eos>", "lstrip": False},
            "bos_token": "<s>",
            "add_bos_token": True,
            "added_tokens_decoder": {str(last): {"content": "<eos>", "special": True}},
            "extra_special_tokens": {"image_token": "<i>"},
            "model_max_length": 16,
        },
        "special_tokens_map.json": {"eos_token": {"content": "<eos>"}, "pad_token": "<eos>"},
        "added_tokens.json": {"<eos>": last},
        "generation_config.json": {"bos_token_id": last - 1, "eos_token_id": [last, last - 1], "temperature": 0.6},
    }
    for name, values in beside.items():
        write(folder / name, json.dumps(values))
    write(folder / "chat_template.jinja", TEMPLATE)
    return folder


def config_with(folder: Path, *settings: str) -> Any:
    """A config that reads data; the index cache is in `folder`."""
    from megajax.config import load_config

    path = write(folder / "run.yaml", "model: {hidden_size: 32, num_heads: 4, num_layers: 1, vocab_size: 512}\n")
    given = [f"run.dir={folder / 'run'}", f"data.index_cache={folder / 'cache'}", "batch.sequence_length=64"]
    return load_config(path, ["batch.global_size=1", "run.steps=1", "mesh.data=1", *given, *settings])


def as_lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def text_lines(folder: Path) -> Subject:
    """JSON lines and a JSON array, and compressed ones."""
    from megajax.data.text import open_text

    packed: dict[Path, Packing] = {}
    files = [write(folder / "a.jsonl", as_lines(TEXTS)), write(folder / "array.json", json.dumps(TEXTS, indent=1))]
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        path = folder / f"a.jsonl{suffix}"
        found = packing_of(path)
        assert found is not None
        packed[write(path, found[1](as_lines(TEXTS)))] = found
    config = config_with(folder, "data.kind=text", f"data.train={folder}/*", "data.tokenizer=byte")

    def read(path: Path) -> None:
        dataset = open_text(config, str(path))
        dataset.document_starts()

    return Subject([*files, *files, *packed], read, packed)


def parquet(folder: Path) -> Subject:
    """Rows of text and of chats in Parquet files with several encodings."""
    import pyarrow
    from pyarrow import parquet

    from megajax.data.json_lines import check_inputs, read_blocks, texts

    files = []
    formats: tuple[tuple[str, dict[str, Any]], ...] = (
        ("plain", {"compression": "none", "use_dictionary": False}),
        ("snappy", {"compression": "snappy"}),
        ("zstd", {"compression": "zstd", "data_page_version": "2.0"}),
    )
    for name, options in formats:
        table = pyarrow.table({"text": [record["text"] for record in TEXTS], "id": [1, None, 3]})
        parquet.write_table(table, folder / f"{name}.parquet", **options)
        files.append(folder / f"{name}.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(CHATS[:1]), folder / "chats.parquet")

    def read(path: Path) -> None:
        check_inputs([str(path)])
        for block in read_blocks([str(path)], None if path.stem == "chats" else "text"):
            list(texts(block, "text", []))

    return Subject([*files, folder / "chats.parquet"], read)


def chats(folder: Path) -> Subject:
    """Chats of each form of docs/data.md."""
    from megajax.data.chat_samples import open_chat

    model = tokenizer_folder(folder / "model")
    files = [write(folder / f"chat{i}.jsonl", as_lines([CHATS[i], CHATS[0]])) for i in range(len(CHATS))]
    files.append(write(folder / "all.jsonl", as_lines(CHATS)))
    config = config_with(folder, "data.kind=chat", f"data.train={files[0]}", f"data.tokenizer={model}")
    words = (b'"messages"', b'"role"', b'"weight"', b'"tool_calls"', b'"function"', "\ufdd0".encode(), b'"content"')
    return Subject(files, lambda path: open_chat(config, str(path))[0], words=words)


def chat_templates(folder: Path) -> Subject:
    """Templates of a model's folder, beside its tokenizer and in tokenizer_config.json."""
    from megajax.data.chat_samples import open_chat

    data = write(folder / "chats.jsonl", as_lines(CHATS[:2]))
    models = [tokenizer_folder(folder / name) for name in ("file", "config", "named")]
    for model, source in zip(models[1:], (TEMPLATE, [{"name": "default", "template": TEMPLATE}]), strict=True):
        (model / "chat_template.jinja").unlink()
        config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        write(model / "tokenizer_config.json", json.dumps(config | {"chat_template": source}))
    files = [models[0] / "chat_template.jinja", *(model / "tokenizer_config.json" for model in models[1:])]
    settings = "data.kind=chat", f"data.train={data}"
    configs = {m: config_with(folder, *settings, f"data.tokenizer={m}") for m in models}

    def read(path: Path) -> None:
        open_chat(configs[path.parent], str(data))[0].sum()

    return Subject([files[0], *files], read, words=TEMPLATE_WORDS)


def tokenizers_json(folder: Path) -> Subject:
    """tokenizer.json of each kind of model, with normalisers, pre-tokenizers, post-processors and decoders."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    vocab = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "##b": 4, "é": 5, "<s>": 6}
    kinds = {
        "bpe": models.BPE(vocab=vocab, merges=[("a", "b")], unk_token="<unk>"),
        "wordpiece": models.WordPiece(vocab=vocab, unk_token="<unk>"),
        "unigram": models.Unigram([(text, -float(i)) for text, i in vocab.items()], 0),
        "wordlevel": models.WordLevel(vocab=vocab, unk_token="<unk>"),
    }
    files = []
    for name, model in kinds.items():
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")])
        split = pre_tokenizers.Split(tokenizers.Regex(r"\s+|\w+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Digits()])
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 6)])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("a", "a"), decoders.Fuse()])
        tokenizer.add_special_tokens(["<eos>"])
        (folder / name).mkdir()
        tokenizer.save(str(folder / name / "tokenizer.json"))
        files.append(folder / name / "tokenizer.json")
    return Subject(files, read_tokenizer, words=(b'"(a+)+$"', b'"Regex"', b'"BertNormalizer"', b'"Metaspace"'))


def read_tokenizer(path: Path) -> None:
    """Load and use a tokenizer, as preprocessing and generation do."""
    from megajax.data.encoding import TextEncoder
    from megajax.data.json_lines import LineBlock, TextPosition
    from megajax.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(str(path))
    ids = tokenizer.encode("ab ba <eos> é 12")
    tokenizer.decode(ids)
    tokenizer.encode_with_offsets(["ab ba"])
    text = as_lines(TEXTS)
    TextEncoder(str(path), None, tokenizer.end_of_document, "text")(LineBlock("a", 1, text, len(text), TextPosition()))


def other_tokenizers(folder: Path) -> Subject:
    """GPT-2's files, tiktoken, SentencePiece, and the files beside each."""
    import sentencepiece

    model = tokenizer_folder(folder / "json")
    beside = [model / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map", "added_tokens")]
    beside += [model / "generation_config.json"]
    gpt2 = folder / "gpt2"
    stored = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    files = [write(gpt2 / "vocab.json", json.dumps(stored["vocab"])), write(gpt2 / "merges.txt", "a b\nab ab\n")]
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"abab"]
    ranks = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    files.append(write(folder / "tiktoken" / "llama3.tiktoken", ranks))
    trained, texts = io.BytesIO(), iter([record["text"] for record in TEXTS])
    settings: Any = {"vocab_size": 20, "model_type": "unigram", "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=texts, model_writer=trained, **settings)
    pieces = write(folder / "pieces" / "tokenizer.model", trained.getvalue())
    more = {"added_tokens_decoder": {"40": {"content": "<x>"}}, "eos_token": "</s>", "legacy": False}
    files += [pieces, write(pieces.with_name("tokenizer_config.json"), json.dumps(more))]
    of = {folder / "gpt2": gpt2 / "vocab.json", model: model / "tokenizer.json", pieces.parent: pieces}
    return Subject([*files, *beside], lambda path: read_tokenizer(of[path.parent] if path.parent in of else path))


def token_files(folder: Path) -> Subject:
    """`.idx` and `.bin`."""
    from megajax.data.indexed import IndexedDataset, IndexedWriter, open_checked

    prefix, generator = folder / "tokens", random.Random(1)
    with IndexedWriter(prefix, "<u2", multimodal=True) as writer:
        for _ in range(20):
            lengths = [generator.randrange(9) for _ in range(2)]
            writer.add_document([7] * sum(lengths), lengths, modes=[0, 1])

    def read(_: Path) -> None:
        dataset = IndexedDataset(prefix)
        for i in range(len(dataset)):
            dataset[i].sum()
        for i in range(dataset.num_documents):
            dataset.document(i).sum()
        open_checked([prefix])

    index, tokens = folder / "tokens.idx", folder / "tokens.bin"
    return Subject([index, index, index, tokens], read)


def index_caches(folder: Path) -> Subject:
    """Stored orders, tokens and packings of a run."""
    from megajax.data.chat_samples import open_chat
    from megajax.data.text import open_text

    model, text = tokenizer_folder(folder / "model"), write(folder / "a.jsonl", as_lines(TEXTS))
    chat = write(folder / "c.jsonl", as_lines(CHATS))
    common = f"data.tokenizer={model}"
    texts = config_with(folder, "data.kind=text", f"data.train={text}", common)
    chatting = config_with(folder, "data.kind=chat", f"data.train={chat}", common)

    def read(_: Path) -> None:
        open_text(texts, str(text)).document_starts()
        samples = open_chat(chatting, str(chat))
        for i in range(len(samples)):
            samples[i].sum()

    read(text)
    return Subject(sorted(path for path in (folder / "cache").rglob("*") if path.is_file()), read)


def journals(folder: Path) -> Subject:
    """The record of an interrupted preprocessing."""
    from megajax.data.journal import Journal

    values = {"settings": {"a": 1}, "position": [0, 3, 20], "bad": [1, ["a.jsonl, line 2 is bad."]], "finishing": False}
    sums = {"stored_bytes": 20, "documents": 2, "tokens": 5}
    record = write(folder / "o.resume.partial", json.dumps(values | {"sums": sums}))
    lengths = write(folder / "o.lengths.partial", b"\2\0\0\0\3\0\0\0")
    write(folder / "o.bin.partial", bytes(10))
    return Subject([record, record, lengths], lambda _: Journal(str(folder / "o"), {"a": 1}, 2, resume=True))


def prompts(folder: Path) -> Subject:
    """Files of prompts."""
    from megajax.inference.prompts import as_chat, read_prompts

    lines = as_lines([{"prompt": "a"}, *CHATS[:2]])
    files = [write(folder / "p.txt", "a\n\nb\u2028c\n"), write(folder / "p.jsonl", lines)]
    return Subject([files[0], *files[1:] * 3], lambda path: [as_chat(p.prompt, "s") for p in read_prompts(str(path))])
