"""Tokenizers: decoding inverts encoding, and the ids agree with the files."""

import io

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers

from megajax.data.tokenizers import end_of_document, load_tokenizer
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
    assert str(caught.value) == (
        "--append-eod: t.json has no end-of-document token of a known name (<|endoftext|>, <|end_of_text|>, </s>, "
        "<eos>); name its token with --eod-token NAME (its special tokens: <stop>, <pad>), or leave the option out."
    )
    with pytest.raises(InputError) as caught:
        end_of_document(load_tokenizer("byte"), "byte", "<stop>")
    assert str(caught.value) == (
        "--eod-token: byte has no token <stop>: name one that it has (special: none), or use its own, token 256."
    )


def test_sentencepiece_model_is_read(tmp_path):
    lines = [f"the quick brown fox {i} jumps over the lazy dog" for i in range(50)]
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines), model_writer=trained, vocab_size=40, minloglevel=2
    )
    (tmp_path / "s.model").write_bytes(trained.getvalue())
    tokenizer = load_tokenizer(str(tmp_path / "s.model"))
    text = "the lazy brown dog jumps"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and 0 < max(ids) < tokenizer.vocab_size == 40
    reference = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    assert tokenizer.end_of_document == tokenizer.token_id("</s>") == reference.piece_to_id("</s>") == 2
    assert tokenizer.special_tokens == ["<s>", "</s>"] and tokenizer.token_id("</t>") is None
    assert tokenizer.encode(text, special_tokens=True) == [1, *ids]
    ((found, offsets),) = tokenizer.encode_with_offsets(["the é dog"])
    assert found == tokenizer.encode("the é dog")
    assert [offsets[0][0], offsets[-1][1]] == [0, 9] and (4, 5) in offsets  # é is two bytes


def test_bad_tokenizers_are_refused_with_one_sentence(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.model").write_text("x")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    sentences = {
        "gpt2": 'gpt2 is not a tokenizer: use "byte", or the path of a tokenizer.json or of a SentencePiece .model '
        "file.",
        f"{tmp_path}/model": f"{tmp_path}/model is a directory: name the file in it, {tmp_path}/model/tokenizer.json.",
        f"{tmp_path}/no.json": f'{tmp_path}/no.json does not exist: correct the path of the tokenizer, or use "byte".',
        f"{tmp_path}/bad.model": f"{tmp_path}/bad.model is not a SentencePiece model: give the .model file "
        "of its trainer.",
        f"{tmp_path}/bad.json": f"{tmp_path}/bad.json is not a Hugging Face tokenizer "
        "(EOF while parsing an object at line 1 column 1): give a tokenizer.json.",
    }
    for spec, sentence in sentences.items():
        with pytest.raises(InputError) as caught:
            load_tokenizer(spec)
        assert str(caught.value) == sentence
