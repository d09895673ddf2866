"""Tokenizers: decoding inverts encoding, and the ids agree with the files."""

import base64
import io
import json
import re
import shutil

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    ByteLevelBPETokenizer,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from megajax.data.special_tokens import end_of_document, framed, usual_first_token
from megajax.data.tokenizers import decode_after, files_in, keep_tokenizer, load_tokenizer
from megajax.errors import InputError


@pytest.mark.smoke
def test_bytes_are_utf8_and_256_ends_a_document():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 0xC3, 0xA9, 256, 98]) == "aéb"
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


def test_offsets_are_of_characters(tmp_path):
    assert load_tokenizer("byte").encode_with_offsets(["aé"]) == [([97, 0xC3, 0xA9], [(0, 1), (1, 2), (1, 2)])]
    tokenizer = word_level(tmp_path / "t.json", {"?": 0, "é": 1, "b": 2})
    assert tokenizer.encode_with_offsets(["é b", "b"]) == [([1, 2], [(0, 1), (2, 3)]), ([2], [(0, 1)])]


def word_level(path, vocabulary, special=()):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path))
    return load_tokenizer(str(path))


def steps_of(path, part, *steps):
    """A tokenizer.json whose normalizer, pre-tokenizer or decoder is a sequence of steps."""
    kinds = {"normalizer": normalizers, "pre_tokenizer": pre_tokenizers, "decoder": decoders}
    kinds["post_processor"] = processors
    made = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    setattr(made, part, kinds[part].Sequence(list(steps)))
    made.save(str(path))
    return str(path)


TENFOLD = normalizers.Replace("a", 10 * "a")
BETWEEN = [TENFOLD, normalizers.Replace(Regex("x*"), 9 * "a")] * 3
GROWING = {  # the library would run out of memory at some texts
    "replacements": ("normalizer", [TENFOLD] * 10),
    "nested": ("normalizer", [normalizers.Sequence([TENFOLD] * 5)]),
    "between": ("normalizer", BETWEEN),
    "looks ahead": ("normalizer", [normalizers.Replace(Regex("(?=a)"), "a")] * 20),
    "optional": ("normalizer", [normalizers.Replace(Regex("x{1}?"), "a")] * 20),
    "ligatures": ("normalizer", [normalizers.Replace("ل", "ﷺ"), normalizers.NFKC()] * 10),
    "bytes": ("normalizer", [normalizers.ByteLevel()] * 30),
    "bytes of words": ("pre_tokenizer", [pre_tokenizers.ByteLevel(add_prefix_space=False)] * 30),
    "template": ("post_processor", [processors.TemplateProcessing(["$A"] * 50)] * 4),
    "no suffix": ("decoder", [decoders.BPEDecoder(suffix="")] * 30),
    "no delimiter": ("decoder", [decoders.CTC(word_delimiter_token="")] * 30),
}


@pytest.mark.parametrize("name", GROWING)
def test_steps_that_make_a_far_longer_text_are_refused(tmp_path, name):
    """The library would end the process when it runs out of memory."""
    part, steps = GROWING[name]
    with pytest.raises(InputError, match=rf"{part} of .*t.json may make a text \S+e\+\d+ times as long"):
        load_tokenizer(steps_of(tmp_path / "t.json", part, *steps))


def test_the_steps_of_published_tokenizers_are_read(tmp_path):
    n = normalizers
    spaces = n.Replace(Regex(" {2,}"), " ")
    albert = [n.Replace("``", '"'), n.Replace("''", '"'), n.NFKD(), n.StripAccents(), n.Lowercase(), spaces]
    many = [n.NFKC(), n.Prepend("▁"), n.Replace(" ", "▁"), *[n.Replace(Regex("a+"), "a")] * 20]
    for steps, ids in ((albert, [1]), (many, [0])):
        path = steps_of(tmp_path / "t.json", "normalizer", *steps)
        assert load_tokenizer(path).encode("a") == Tokenizer.from_file(path).encode("a").ids == ids


LLAMA_2 = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
WORDS = {"<s>": 0, "▁a": 1, "▁": 2, "b": 3, "▁▁": 4, "<0xC3>": 5, "<0xA9>": 6}


@pytest.mark.parametrize(
    "decoder",
    [decoders.Metaspace(), decoders.Sequence(LLAMA_2), decoders.WordPiece(cleanup=False), None, "null", "byte"],
)
def test_parts_are_decoded_as_the_whole(tmp_path, decoder):
    if isinstance(decoder, str):
        tokenizer, ids = {
            "null": (load_tokenizer("null:9"), [1, 2, 3]),
            "byte": (load_tokenizer("byte"), [*"a € é".encode()]),
        }[decoder]
    else:
        made = Tokenizer(models.WordLevel(WORDS, "b"))
        made.add_special_tokens(["<s>"])
        if decoder is not None:
            made.decoder = decoder
        made.save(str(tmp_path / "t.json"))
        tokenizer, ids = load_tokenizer(str(tmp_path / "t.json")), [0, 1, 3, 4, 2, 1, 0, 1, 5, 6, 1, 5, 6, 5, 6]
    whole = tokenizer.decode(ids)
    for i in range(len(ids) + 1):
        before = tokenizer.decode(ids[:i]).rstrip("\ufffd")  # a part of a character belongs to the tokens after it
        assert before + decode_after(tokenizer, ids[:i], ids[i:]) == whole, i


def test_hugging_face_ids_come_from_the_vocabulary(tmp_path):
    tokenizer = word_level(tmp_path / "t.json", {"?": 0, "hello": 1, "world": 7}, ["<|endoftext|>"])
    assert tokenizer.encode("hello world what") == [1, 7, 0]
    assert tokenizer.decode([1, 7]) == "hello world"
    assert tokenizer.vocab_size == 8  # one more than the largest id, not the number of entries
    assert tokenizer.end_of_document == 3


def test_without_a_known_name_the_end_of_document_is_named(tmp_path):
    tokenizer = word_level(tmp_path / "t.json", {"?": 0, "a": 1}, ["<stop>", "<pad>"])
    assert tokenizer.end_of_document is None
    assert end_of_document(tokenizer, "t.json", "<stop>") == 2
    assert end_of_document(tokenizer, "t.json", "a") == 1
    with pytest.raises(InputError) as caught:
        end_of_document(tokenizer, "t.json")
    assert "t.json has no eos_token in a tokenizer_config.json beside it" in str(caught.value)
    assert "name its token with --eod-token (its special tokens: <stop>, <pad>)" in str(caught.value)
    with pytest.raises(InputError) as caught:
        end_of_document(load_tokenizer("byte"), "byte", "<stop>")
    assert str(caught.value) == (
        "--eod-token: byte has no token <stop>: name one that it has (special: none), or use its own, token 256."
    )


def sentencepiece_model():
    lines = [f"the quick brown fox {i} jumps over the lazy dog" for i in range(50)]
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines), model_writer=trained, vocab_size=40, minloglevel=2
    )
    return trained.getvalue()


@pytest.mark.parametrize("part", ["normalizer", "denormalizer"])
def test_a_sentencepiece_table_that_writes_a_far_longer_text_is_refused(tmp_path, part):
    model = sentencepiece_model_pb2.ModelProto.FromString(sentencepiece_model())
    table = model.normalizer_spec.precompiled_charsmap
    for longest, refused in ((9_999, False), (20_000, True)):
        getattr(model, f"{part}_spec").precompiled_charsmap = table + b"x" * longest + b"\0"
        (tmp_path / "s.model").write_bytes(model.SerializeToString())
        if refused:
            with pytest.raises(InputError, match=rf"the {part} of .*s.model may make a text 2e\+04 times as long"):
                load_tokenizer(str(tmp_path / "s.model"))
        else:
            assert load_tokenizer(str(tmp_path / "s.model")).vocab_size == 40


def test_a_sentencepiece_model_with_a_piece_that_is_not_utf8_is_a_sentence(tmp_path):
    content, piece = sentencepiece_model(), b"\x0a\x03" + "▁".encode()  # with its field and length
    assert content.count(piece) == 1
    (tmp_path / "s.model").write_bytes(content.replace(piece, piece[:2] + b"\xff" * 3))
    with pytest.raises(InputError, match="s.model is not a SentencePiece model .*: give the .model file"):
        load_tokenizer(str(tmp_path / "s.model"))


def test_sentencepiece_model_is_read(tmp_path):
    content = sentencepiece_model()
    (tmp_path / "s.model").write_bytes(content)
    tokenizer = load_tokenizer(str(tmp_path / "s.model"))
    text = "the lazy brown dog jumps"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and 0 < max(ids) < tokenizer.vocab_size == 40
    assert tokenizer.decode([40, *ids, 2**31 - 1]) == text  # of a model whose vocabulary is padded
    reference = sentencepiece.SentencePieceProcessor(model_proto=content)
    assert tokenizer.end_of_document == tokenizer.token_id("</s>") == reference.piece_to_id("</s>") == 2
    assert tokenizer.special_tokens == ["<s>", "</s>"] and tokenizer.token_id("</t>") is None
    assert framed(ids, usual_first_token(tokenizer)) == [1, *ids]
    parts = [tokenizer.decode(ids[:i]) + decode_after(tokenizer, ids[:i], ids[i:]) for i in range(len(ids) + 1)]
    assert parts == [text] * len(parts)
    ((found, offsets),) = tokenizer.encode_with_offsets(["the é dog"])
    assert found == tokenizer.encode("the é dog")
    assert [offsets[0][0], offsets[-1][1]] == [0, 9] and (4, 5) in offsets  # é is two bytes


@pytest.mark.parametrize("names", [("<|im|>", "<|im|>x"), ("<|im|>x", "<|im|>")])
def test_of_added_tokens_that_begin_alike_the_longest_is_found_in_a_text(tmp_path, names):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    (tmp_path / "added_tokens.json").write_text(json.dumps({name: 40 + i for i, name in enumerate(names)}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("<|im|>x<|im|>") == [tokenizer.token_id("<|im|>x"), tokenizer.token_id("<|im|>")]
    assert {*tokenizer.encode("<|im|>x<|im|>")} == {40, 41}


def test_bad_tokenizers_are_refused_with_one_sentence(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.model").write_text("x")
    (tmp_path / "model").mkdir()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "vocab.json").write_text("{}")
    (tmp_path / "gpt2" / "merges.txt").write_text("a b c")
    (tmp_path / "bad.tiktoken").write_text("YQ== 0\nYg 1\n")
    (tmp_path / "short.tiktoken").write_text("AA== 0\n")
    write_ranks(tmp_path / "qwen.tiktoken", [bytes([i]) for i in range(256)])
    sentences = {
        "gpt2": 'gpt2 is not a tokenizer: use "byte", "null:VOCABULARY_SIZE", a folder, or the path of a '
        "tokenizer.json, a SentencePiece .model or a .tiktoken file.",
        "org/name": 'org/name is not a tokenizer: use "byte", "null:VOCABULARY_SIZE", a folder, or the path of a '
        "tokenizer.json, a SentencePiece .model or a .tiktoken file; nothing is downloaded.",
        f"{tmp_path}/model": f"{tmp_path}/model is a directory without a tokenizer: add tokenizer.json, "
        "tokenizer.model, a .tiktoken file, or vocab.json and merges.txt.",
        f"{tmp_path}/bad.tiktoken": f"{tmp_path}/bad.tiktoken, line 2 is not a token in base64 and its rank: copy the "
        "file again.",
        f"{tmp_path}/short.tiktoken": f"{tmp_path}/short.tiktoken has no token for the byte 1, so it is not a tiktoken "
        "file: copy it again.",
        f"{tmp_path}/qwen.tiktoken": f"{tmp_path}/qwen.tiktoken names no known encoding, and a tiktoken file does not "
        "say how text is cut into words: call it r50k_base.tiktoken, p50k_base.tiktoken, cl100k_base.tiktoken, "
        "o200k_base.tiktoken, llama3.tiktoken, or give the model's tokenizer.json.",
        f"{tmp_path}/gpt2": f"{tmp_path}/gpt2 has a vocab.json and a merges.txt that are not GPT-2's (Error while "
        "reading BPE files: Merges text file invalid at line 1): copy both again.",
        "null": "null has no vocabulary size: write null:50257 for the token ids 0 to 50256.",
        "null:2147483648": "null:2147483648 has the token id 2147483648, but ids are from 0 to 2147483647: write "
        "null:2147483647 or less.",
        "null:0": "null:0 has no vocabulary size: write null:50257 for the token ids 0 to 50256.",
        f"{tmp_path}/no.json": f'{tmp_path}/no.json does not exist: correct the path of the tokenizer, or use "byte".',
        f"{tmp_path}/bad.model": f"{tmp_path}/bad.model is not a SentencePiece model (RuntimeError: INTERNAL: "
        f"could not parse ModelProto from {tmp_path}/bad.model): give the .model file of its trainer.",
        f"{tmp_path}/bad.json": f"{tmp_path}/bad.json is not a Hugging Face tokenizer "
        "(EOF while parsing an object at line 1 column 1): give a tokenizer.json.",
    }
    for spec, sentence in sentences.items():
        with pytest.raises(InputError) as caught:
            load_tokenizer(spec)
        assert str(caught.value) == sentence
    assert load_tokenizer("null:2147483647").vocab_size == 2**31


def test_null_reads_token_ids():
    tokenizer = load_tokenizer("null:300")
    assert tokenizer.encode(" 7 299\n0 ") == [7, 299, 0] and tokenizer.decode([7, 299, 0]) == "7 299 0"
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (301, 300)  # as Megatron's NullTokenizer
    assert tokenizer.encode_with_offsets(["7  299"]) == [([7, 299], [(0, 1), (3, 6)])]
    for word in ("301", "-1", "x", "²"):
        with pytest.raises(InputError) as caught:
            tokenizer.encode(f"1 {word}")
        assert str(caught.value) == (
            f"{word!r} is not a token id of null:300: write integers from 0 to 300 with spaces between, or use another "
            "tokenizer."
        )


def write_ranks(path, tokens):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return str(path)


def reference_bpe(word, ranks):
    """tiktoken's definition: a whole word first, else the adjacent pair of the lowest rank, the leftmost of equals."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while pairs := [
        (ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ranks
    ]:
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


def test_tiktoken_files_give_the_tokens_of_their_ranks(tmp_path):
    generator = np.random.default_rng(0)
    letters = [bytes([c]) for c in b" xyz"]
    tokens = [bytes([byte]) for byte in generator.permutation(256)]
    while len(tokens) < 330:  # random ones, also such that no order of merges reaches
        pool = letters + [token for token in tokens[256:] if len(token) < 6]
        new = pool[generator.integers(len(pool))] + pool[generator.integers(len(pool))]
        if new not in tokens and b" " not in new[1:]:
            tokens.append(new)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    tokenizer = load_tokenizer(write_ranks(tmp_path / "llama3.tiktoken", tokens))
    for _ in range(200):
        text = re.sub(" +", " ", "".join(generator.choice(list(" xyzxyz"), 40)))
        expected = [token for word in re.findall(" ?[xyz]+| $", text) for token in reference_bpe(word.encode(), ranks)]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text
    ((ids, offsets),) = tokenizer.encode_with_offsets(["xé"])
    assert ids == [ranks[b"x"], ranks[b"\xc3"], ranks[b"\xa9"]] and offsets == [(0, 1), (1, 2), (1, 2)]
    assert tokenizer.vocab_size == 330 + 256 and tokenizer.end_of_document == 331  # Llama 3's special tokens
    # Meta's tokenizer.py: 256 special tokens behind the ranks, those without a name in the order of their numbers
    named = {"begin_of_text": 0, "end_of_text": 1, "start_header_id": 6, "end_header_id": 7, "eot_id": 9}
    named |= {f"reserved_special_token_{i}": number for i, number in enumerate((2, 3, 4, 5, 8, *range(10, 256)))}
    first = 339 - 9
    assert {name: tokenizer.token_id(f"<|{name}|>") - first for name in named} == named

    keep_tokenizer(str(tmp_path / "llama3.tiktoken"), tmp_path)
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).encode("xyzzy xyz") == tokenizer.encode("xyzzy xyz")


def test_the_name_of_a_tiktoken_file_gives_its_words(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + [b"12", b"34", b"123", b"1234", b"45", b"12345"]
    own = load_tokenizer(write_ranks(tmp_path / "tokenizer.model", tokens))  # Llama 3's name for its file
    assert own.encode("12345") == load_tokenizer(str(tmp_path)).encode("12345") == [258, 260]
    gpt2 = load_tokenizer(write_ranks(tmp_path / "r50k_base.tiktoken", tokens))
    assert gpt2.encode("12345") == [261] and gpt2.end_of_document == 50256
    joined = [*tokens[:256], b"(x"]  # one word in Llama 3's pattern, two in GPT-2's
    own, gpt2 = (load_tokenizer(write_ranks(tmp_path / f"{name}.tiktoken", joined)) for name in ("llama3", "r50k_base"))
    assert own.encode("(x") == [256] and gpt2.encode("(x") == [*b"(x"]


FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
ENCODINGS = {  # as tiktoken_ext/openai_public.py has them
    "r50k_base": {"<|endoftext|>": 50256},
    "p50k_base": {"<|endoftext|>": 50256},
    "cl100k_base": {"<|endoftext|>": 100257, **FIM, "<|endofprompt|>": 100276},
    "o200k_base": {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_name_of_a_tiktoken_file_gives_its_special_tokens(tmp_path, name):
    tokenizer = load_tokenizer(write_ranks(tmp_path / f"{name}.tiktoken", [bytes([byte]) for byte in range(256)]))
    assert {token: tokenizer.token_id(token) for token in tokenizer.special_tokens} == ENCODINGS[name]
    assert tokenizer.encode("".join(ENCODINGS[name])) == [*ENCODINGS[name].values()]


def test_gpt2s_two_files_are_a_tokenizer(tmp_path):
    trained = ByteLevelBPETokenizer()
    lines = [f"don't jump over {i} lazy dogs, café" for i in range(30)]
    trained.train_from_iterator(lines, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(tmp_path))
    tokenizer, text = load_tokenizer(str(tmp_path)), "  don't jump the café\n\n 31<|endoftext|>"
    ids = tokenizer.encode(text)
    assert ids == trained.encode(text).ids and tokenizer.decode(ids[:-1]) == text.removesuffix("<|endoftext|>")
    assert ids[-1] == tokenizer.end_of_document == 0
    assert tokenizer.special_tokens == ["<|endoftext|>"]

    run = tmp_path / "run"
    run.mkdir()
    keep_tokenizer(str(tmp_path), run)
    assert files_in(run) == [run / "tokenizer.json"] and load_tokenizer(str(run)).encode(text) == ids
    shutil.copy(run / "tokenizer.json", tmp_path)
    assert files_in(tmp_path) == [tmp_path / "tokenizer.json"]


@pytest.mark.parametrize("name", ["x.json", "x.model", "r50k_base.tiktoken"])
def test_what_the_system_refuses_is_no_damaged_tokenizer(tmp_path, name):
    """Another copy would not help: as a disk that fails, or permissions."""
    path = tmp_path / name
    path.symlink_to("/proc/self/mem")  # a read at its beginning fails, also root's
    with pytest.raises(InputError, match=rf"{name} cannot be read \(Input.*\): correct the path, or its permissions"):
        load_tokenizer(str(path))
