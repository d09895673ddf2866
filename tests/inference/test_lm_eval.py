"""The adapter for lm-eval answers its three kinds of requests as transformers' model does.

lm-eval itself is not needed: the base class and the registry, of which the adapter uses nothing else, are stand-ins.
Where it is installed, its own take the adapter.
"""

import importlib
import sys
import types
from collections import namedtuple
from importlib.util import find_spec

import pytest

from megajax.errors import InputError
from megajax.inference.generation import continue_texts
from megajax.inference.sampling import Sampling

Request = namedtuple("Request", "args")


@pytest.fixture
def adapter(letters_folder, monkeypatch):
    registered = {}

    def register_model(name):
        return lambda model: registered.setdefault(name, model)

    stand_ins = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": object},
        "lm_eval.api.registry": {"register_model": register_model},
    }
    for name, content in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    importlib.import_module("megajax.inference.lm_eval")
    del sys.modules["megajax.inference.lm_eval"]  # the next test registers it again
    of_template = {"chat_template_args": "{thinking: true}", "enable_thinking": False}
    return registered["megajax"](str(letters_folder), mesh="fsdp:2", dtype="float32", batch_size="2", **of_template)


def test_the_end_of_a_text_is_the_first_token_that_stops_or_begins_one(adapter):
    """A mistake in the template's arguments is a sentence too."""
    folder = adapter.model.folder
    for given in ("thinking=1", "{day: 2026-01-31}"):  # a date is no value of JSON
        with pytest.raises(InputError, match=f"chat_template_args={given} is not a mapping .*: write it like"):
            type(adapter)(str(folder), dtype="float32", chat_template_args=given)
    for stops, prefix, expected in (([5, 6], 3, 5), ([], 3, 3)):
        adapter.model = types.SimpleNamespace(stop_tokens=stops, prefix_token=prefix, folder=folder)
        assert adapter.eot_token_id == expected
    adapter.model.prefix_token = None
    with pytest.raises(InputError, match=f"{folder} has no end-of-text token: set eos_token_id in generation_config"):
        _ = adapter.eot_token_id


def test_requests_are_answered_as_by_the_reference(references, folder_of, adapter):
    adapter.model.max_length = 64
    of_reference = type(adapter)(str(folder_of("tiny_llama")), batch_size="auto:4")
    assert (adapter.batch, of_reference.batch) == (2, 8)
    scores = references["tiny_llama"]["scores"]
    requests = [(("", ""), tokens[:start], tokens[start:]) for tokens, start, *_ in scores]
    for found, (*_, likelihood, greedy) in zip(of_reference._loglikelihood_tokens(requests), scores, strict=True):
        assert found == (pytest.approx(likelihood, abs=1e-4), greedy)
    with pytest.raises(InputError, match="an answer to score has 65 tokens, but the model's context has 64"):
        adapter._loglikelihood_tokens([(("", ""), [1], [2] * 65)])
    # Tokens 1 to 26 are letters: the likeliest ones after "c" (a prompt of the beginning of a text and one letter).
    whole, cut = (
        adapter.generate_until([Request(("c", {"until": until, "max_gen_toks": 12}))])[0]
        for until in ([], ["?", "", "a"])
    )
    assert cut == whole.partition("a")[0]
    greedy, warm = Sampling(temperature=0.0), Sampling(temperature=0.7, top_k=3)
    for arguments, sampling in (
        ({}, greedy),
        ({"do_sample": False, "temperature": 0.7}, greedy),
        ({"temperature": 0.7, "top_k": 3}, warm),
        ({"do_sample": True, "temperature": 0.7, "top_k": 3}, warm),
    ):
        [expected] = continue_texts(adapter.model, [adapter.tok_encode("c")], 12, sampling)
        assert adapter.generate_until([Request(("c", {"max_gen_toks": 12} | arguments))]) == [expected], arguments
    for count in (0, 64, 300):  # lm-eval's hf asserts that a token of the context remains
        with pytest.raises(InputError, match=f"max_gen_toks={count} leaves no room .*: give 1 to 63"):
            adapter.generate_until([Request(("c", {"max_gen_toks": count}))])
    with pytest.raises(InputError, match="max_gen_toks=256 leaves no room"):  # lm-eval's default
        adapter.generate_until([Request(("c", {}))])
    absent = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)  # as transformers without them
    assert adapter._settings({"do_sample": True, "max_gen_toks": 9, "until": None}) == ((), absent, 9)
    given = {"do_sample": True, "temperature": 0.5, "top_k": None, "top_p": 0.7, "min_p": None, "until": "x"}
    assert adapter._settings(given | {"max_gen_toks": "9"}) == (("x",), absent._replace(temperature=0.5, top_p=0.7), 9)
    long = [Request(("abcdefgh" * 20, {"max_gen_toks": 60})), Request(("xefgh", {"max_gen_toks": 60}))]
    assert adapter.generate_until(long[:1]) == adapter.generate_until(long[1:]), "the last tokens that leave room"
    (adapter.model.folder / "chat_template.jinja").write_text("{{ [thinking, enable_thinking, messages[0].content] }}")
    assert adapter.apply_chat_template([{"role": "user", "content": "a"}]) == "[True, False, 'a']"
    text = "hello there"
    assert adapter.tok_encode(text) == [0, *adapter.tok_encode(text, add_special_tokens=False)]
    assert adapter.tok_encode(f"<s>{text}") == adapter.tok_encode(text)  # as in a rendered chat
    (rolling,) = adapter.loglikelihood_rolling([Request((text,))])
    tokens = [0, *adapter.tok_encode(text)]
    adapter.model.max_length = len(tokens) - 1  # an answer may be as long as the context
    (whole_text,) = adapter._loglikelihood_tokens([(("", ""), tokens[:1], tokens[1:])])
    assert rolling == pytest.approx(whole_text[0], rel=1e-6)


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra eval is not installed")
def test_lm_eval_takes_the_adapter(letters_folder, monkeypatch):
    from lm_eval.api.registry import get_model

    monkeypatch.delitem(sys.modules, "megajax.inference.lm_eval", raising=False)  # of the stand-ins
    importlib.import_module("megajax.inference.lm_eval")
    ((likelihood, _),) = get_model("megajax")(str(letters_folder)).loglikelihood([Request(("a", "b"))])
    assert likelihood < 0
