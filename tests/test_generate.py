"""`python -m megajax.generate`: from any directory, a run or one checkpoint; every mistake is one sentence."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
import tokenizers

import megajax
from megajax import generate
from megajax.checkpoint.weights import run_config
from megajax.model import bind
from megajax.sources import find_tokenizer
from megajax.training.run_record import keep_tokenizer

CONFIG = """
run: {steps: 4, eval_steps: 0}
model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 257, init_std: 0.5, mtp_layers: 1}
batch: {global_size: 2, sequence_length: 8}
precision: {compute: float32}
data: {kind: synthetic, tokenizer: byte}
logging: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A Trainer whose run directory has its config and a checkpoint of its first weights."""
    directory = tmp_path_factory.mktemp("generate")
    (directory / "tiny.yaml").write_text(CONFIG)
    config = megajax.load_config(directory / "tiny.yaml", [f"run.dir={directory / 'run'}"])
    trainer = megajax.Trainer(config, jax.devices()[:1])
    trainer.save()
    trainer.checkpoints.wait()
    (directory / "run/config.yaml").write_text(config.to_yaml())
    return trainer


@pytest.fixture
def error_of(capsys):
    """(arguments...) → the error's sentence."""

    def error_of(*arguments: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            generate.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert (stopped.value.code, printed.out, len(printed.err.splitlines())) == (2, "", 1), printed.err
        assert printed.err.startswith("megajax: error: ") and printed.err.endswith(".\n")
        return printed.err

    return error_of


def test_a_run_goes_on_with_the_likeliest_token(trainer, capsys):
    tokens = np.frombuffer(b"ab", np.uint8).astype(np.int32)[None]
    logits = jax.jit(lambda weights: bind(trainer.program.model, weights)(tokens))(trainer.state.params)
    expected = bytes([97, 98, int(logits[0, -1, :256].argmax())]).decode(errors="replace")
    assert generate.main([str(trainer.run_dir), "--prompt", "ab", "--tokens", "1", "--temperature", "0"]) == 0
    assert capsys.readouterr() == (f"{expected}\n", "")


def test_a_text_that_ends_at_the_context_is_counted_and_drafts_of_a_checkpoint_give_the_same(trainer, capsys):
    """With as many tokens as the context has room for, the end is not an early one."""
    length = trainer.config.batch.sequence_length
    arguments = ["--prompt", "ab", "--temperature", "0", "--tokens"]
    assert generate.main([str(trainer.run_dir), *arguments, str(length)]) == 0
    plain = capsys.readouterr()
    assert re.match(f"1 text .* context of {length} tokens, before --tokens={length}", plain.err)
    place = str(trainer.run_dir / "checkpoints/0")
    assert generate.main([place, *arguments, str(length - 2), "--speculate", "2"]) == 0
    found = capsys.readouterr()
    assert found.out == plain.out
    assert re.fullmatch(r"speculation: [1-3]\.\d\d tokens per step; drafts 1 to 2 were accepted .*\.\n", found.err)


def test_numbers_below_0_and_no_numbers_are_refused(trainer, error_of):
    for option in (
        "--temperature=-1.0",
        "--temperature=nan",
        "--temperature=inf",
        "--seed=-3",
        "--top-k=-1",
        "--speculate=-1",
    ):
        assert f"{option} is not a number of 0 or more" in error_of(trainer.run_dir, "--prompt", "a", option)
    assert "invalid int value: 'many'" in error_of(trainer.run_dir, "--prompt", "a", "--tokens", "many")


def test_what_is_not_a_run_and_what_is_not_text_are_refused(trainer, error_of, tmp_path):
    run = trainer.run_dir
    assert "RUN=nowhere does not exist" in error_of("nowhere", "--prompt", "a")
    assert "has checkpoints of steps 0." in error_of(run / "checkpoints/7", "--prompt", "a")
    assert "the prompt '' has no tokens" in error_of(run, "--prompt", "")
    assert "is not UTF-8" in error_of(run, "--prompt", "\udcff")
    assert "has no chat template" in error_of(run, "--prompt", "a", "--system", "b")  # which makes it a chat
    (tmp_path / "plain/checkpoints/1").mkdir(parents=True)
    (tmp_path / "plain/config.yaml").write_text(CONFIG.replace(", mtp_layers: 1", ""))
    error = error_of(tmp_path / "plain", "--prompt", "a", "--speculate", "2")
    assert "--speculate=2 drafts with multi-token prediction modules, but RUN=" in error and "has none" in error
    assert "--tokens=0 is not a positive number" in error_of(run, "--prompt", "a", "--tokens", "0")
    (tmp_path / "run/checkpoints/1").mkdir(parents=True)
    assert "has no config.yaml" in error_of(tmp_path / "run", "--prompt", "a")


def words(*names: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, names[0]))


def test_the_tokenizer_is_found_from_anywhere(tmp_path, monkeypatch, error_of):
    run = tmp_path / "work/runs/mine"
    for directory in ("work/runs/mine/checkpoints/1", "work/data", "else/data"):
        (tmp_path / directory).mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG.replace("byte", "data/t.json"))
    monkeypatch.chdir(tmp_path / "else")

    def found() -> list[int]:
        return find_tokenizer(run_config(run, "RUN"), run).encode("yes")

    assert f"data.tokenizer=data/t.json ({run}/config.yaml) is neither in" in error_of(run, "--prompt", "a")
    words("no", "yes").save("data/t.json")
    assert found() == [1], "in the current directory"
    words("no", "no2", "yes").save(str(tmp_path / "work/data/t.json"))
    assert found() == [2], "above the run: the current directory may be another project's"
    words("yes").save(str(run / "tokenizer.json"))
    assert found() == [0], "the run's own"
    words(*map(str, range(300))).save(str(run / "tokenizer.json"))
    assert "has 300 tokens, but the model has 257" in error_of(run, "--prompt", "a")
    (run / "tokenizer.json").unlink()
    (run / "config.yaml").write_text(CONFIG.replace("byte", str(tmp_path / "gpt2")))
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/vocab.json").write_text(json.dumps({"e": 0, "s": 1, "y": 2, "es": 3}))
    (tmp_path / "gpt2/merges.txt").write_text("e s")
    keep_tokenizer(run, run_config(run, "RUN"))
    shutil.rmtree(tmp_path / "gpt2")
    assert found() == [2, 3], "a copy of GPT-2's files"
    (run / "config.yaml").write_text(CONFIG.replace("byte", "'null:256'"))
    assert find_tokenizer(run_config(run, "RUN"), run).encode("7 8") == [7, 8]
    (run / "config.yaml").write_text(CONFIG.replace(", tokenizer: byte", ""))
    with pytest.raises(megajax.InputError, match="has no data.tokenizer"):
        found()
    shutil.rmtree(run / "checkpoints/1")
    assert "has no complete checkpoint" in error_of(run, "--prompt", "a")
