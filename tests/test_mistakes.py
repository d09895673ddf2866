"""The likeliest mistakes, as people type them: the exact sentence, status 2, nothing written, never a traceback."""

import os
import re
import shlex
from pathlib import Path

import pytest
from config_errors import first_place

from megajax import train

CONFIG = """\
run: {dir: run, steps: 2}
model:
  num_layers: 4
  hidden_size: 64
  num_heads: 8
  vocab_size: 257
batch:
  global_size: 16
  sequence_length: 64
mesh: {data: -1}
data: {kind: synthetic}
"""
USAGE = (
    "python -m megajax.train CONFIG.yaml [section.key=value ...] [--print-config] [--diff [OTHER.yaml]]"
    " [--help [SECTION]]"
)
HELP = "python -m megajax.train --help lists the arguments."

# The arguments after `train run.yaml`, on 8 devices. "@" stands for the location of the first override.
TYPED = {
    # keys under other names
    "model.num_head=4": "model.num_head is not a config key (@): did you mean model.num_heads?",
    "num_layers=8": "num_layers is not a config key (@): did you mean model.num_layers?",
    "lr=1e-4": "lr is not a config key (@): did you mean schedule.learning_rate?",
    "mesh.tp=2": "mesh.tp is not a config key (@): did you mean mesh.tensor?",
    "micro_batch_size=4": (
        "micro_batch_size is not a config key (@): use batch.num_microbatches, which is batch.global_size /"
        " (micro-batch size * data * fsdp * expert)."
    ),
    "model.num_hidden_layers=8": "model.num_hidden_layers is not a config key (@): did you mean model.num_layers?",
    "training.seq_len=128": "training.seq_len is not a config key (@): did you mean batch.sequence_length?",
    "checkpoint.save_dir=out": "checkpoint.save_dir is not a config key (@): did you mean run.dir?",
    "mesh.warp=2": (
        "mesh.warp is not a config key (@): mesh has pipeline, data, fsdp, expert, context, tensor and experts_over."
    ),
    "tokens=4": (
        "tokens is not a config key (@): the sections are run, model, mesh, pipeline, precision, batch,"
        " objective, optimizer, schedule, lora, teacher, data, checkpoint, remat, communication, kernels and logging."
    ),
    "--tensor-model-parallel-size 2": (f"--tensor-model-parallel-size is not an option: write mesh.tensor=2; {HELP}"),
    "--micro-batch-size 4": (
        "--micro-batch-size is not an option: use batch.num_microbatches, which is"
        f" batch.global_size / (micro-batch size * data * fsdp * expert); {HELP}"
    ),
    "--use-distributed-optimizer": (
        "--use-distributed-optimizer is not an option: mesh.data always stores weights"
        f" and optimizer state sharded (ZeRO-1); {HELP}"
    ),
    "--steps=100": f"--steps is not an option: write run.steps=100; {HELP}",
    "--print-confg": f"--print-confg is not an option: did you mean --print-config? {HELP}",
    # overrides and values
    "run.steps 5": "run.steps is not an override (the command line): write section.key=value.",
    "include=llama3_8b.yaml": (
        "include=llama3_8b.yaml is not an override (the command line): write the include in a file."
    ),
    "run.steps=1e6": "run.steps=1000000.0 is not a whole number (@): write 1000000.",
    "model.num_layers=\"'3'\"": "model.num_layers='3' is not a whole number (@): write one such as 4, without quotes.",
    "schedule.learning_rate=fast": (
        "schedule.learning_rate=fast is not a number (@): write one such as 0.1, without quotes."
    ),
    "logging.wandb=yes": "logging.wandb=yes is not true or false (@): write true or false.",
    "model.norm=rms": (
        "model.norm=rms is not a choice (@): did you mean rmsnorm? The choices are rmsnorm and layernorm."
    ),
    "run.name=3": "run.name=3 is not text (@): put it in quotes.",
    "data.chat_template_args=loud": (
        "data.chat_template_args=loud is not a mapping from names to values (@): write it like"
        " {enable_thinking: false}."
    ),
    "'data.chat_template_args={messages: 1}'": (
        "data.chat_template_args={messages: 1} sets messages, which each chat gives (@): remove it."
    ),
    "run.steps=0": "run.steps=0 is too small (@): use 1 or more.",
    "model.dropout=1": "model.dropout=1 is too large (@): use less than 1.",
    "precision.fp8=current": "precision.fp8=current is not a mapping (@): set its keys, such as precision.fp8.recipe.",
    "model.num_layers=99999999999": "model.num_layers=99999999999 is too large (@): use 1000 or less.",
    "batch.global_size=1000000000000": "batch.global_size=1000000000000 is too large (@): use 16777216 or less.",
    "batch.global_size=16777216 batch.sequence_length=8192": (
        "batch.global_size=16777216 x batch.sequence_length=8192 makes 137438953472 tokens per step (@): use"
        " 1073741824 or less."
    ),
    "model.layer_pattern=[local": "not valid YAML (@): expected ',' or ']', but got '<stream end>'; close the bracket.",
    # the mesh and the devices
    "mesh.data=2": (
        "mesh.data=2 uses 2 of 8 devices (@): make the product 8, or set one axis to -1, such as mesh.data=-1."
    ),
    "mesh.data=16": (
        "mesh.data=16 needs 16 devices, but there are 8 (@): make the product 8, or set one axis to -1, such"
        " as mesh.data=-1; to try the mesh on CPUs, set XLA_FLAGS=--xla_force_host_platform_device_count=16."
    ),
    "mesh.fsdp=-1": ("mesh.data=-1 and mesh.fsdp=-1 cannot share the remaining devices (@): keep -1 on one axis only."),
    "mesh.tensor=3": (
        "mesh.tensor=3 does not divide model.num_heads=8 (@): set mesh.tensor to 1, 2, 4 or 8, or change"
        " model.num_heads."
    ),
    "mesh.data=1 mesh.context=8 batch.sequence_length=40": (
        "mesh.context=8 cuts a sequence into 16 chunks, which do not divide batch.sequence_length=40 (the"
        " command line: mesh.context=8): make batch.sequence_length a multiple of 16."
    ),
    "mesh.expert=2": (
        "mesh.expert=2 needs a model with experts (@): set model.num_experts, or use mesh.data or mesh.fsdp"
        " for the batch."
    ),
    "mesh.pipeline=8": "mesh.pipeline=8 is more than model.num_layers=4 (@): use 4 or less.",
    "mesh.pipeline=2": (
        "batch.num_microbatches=1 is less than mesh.pipeline=2, so stages would be idle for up to 50% of a"
        " step (@): use 2, 4, 8 or 16."
    ),
    "pipeline.layout=[1,2] mesh.pipeline=2 batch.num_microbatches=2": (
        "pipeline.layout=[1, 2] adds up to 3, not to model.num_layers=4 (@): make it 4, or set it to null for [2, 2]."
    ),
    # the batch
    "batch.global_size=12": (
        "mesh.data=8 (from -1) does not divide batch.global_size=12 (@): make batch.global_size a multiple of 8."
    ),
    "batch.num_microbatches=3": (
        "batch.num_microbatches=3 does not divide batch.global_size=16 (@): use 1, 2, 4, 8 or 16."
    ),
    # the model and how it is computed
    "model.num_heads=6": (
        "model.num_heads=6 does not divide model.hidden_size=64 (@): change one of them, or set model.head_dim."
    ),
    "model.num_kv_heads=3": (
        "model.num_kv_heads=3 does not divide model.num_heads=8 (@): use 1, 2, 4 or 8, or change model.num_heads."
    ),
    "model.layer_pattern=[local,global]": (
        "model.layer_pattern=[local, global] needs a window for its local layers, but"
        " model.sliding_window=null (@): set model.sliding_window."
    ),
    "model.num_experts=8 model.experts_per_token=16": (
        "model.experts_per_token=16 is more than model.num_experts=8 (the command line:"
        " model.experts_per_token=16): use 8 or less, or raise model.num_experts."
    ),
    "precision.fp8.recipe=current model.hidden_size=72 model.head_dim=16": (
        "precision.fp8.recipe=current needs multiples of 16, but model.hidden_size=72 is not one (@): change"
        " it, or set precision.fp8.recipe=none."
    ),
    "remat.group=2 remat.policy=selective": (
        "remat.group=2 needs remat.policy=full, but remat.policy=selective (@): set remat.group=1, or"
        " remat.policy=full."
    ),
    "kernels.attention=cudnn precision.compute=float32": (
        "kernels.attention=cudnn cannot be combined with precision.compute=float32 (@): use kernels.attention=auto."
    ),
    "schedule.warmup_steps=10 schedule.decay_steps=5": (
        "schedule.warmup_steps=10 is more than schedule.decay_steps=5 (@): use 5 or less,"
        " or raise schedule.decay_steps."
    ),
    # data
    "data.kind=indexed": (
        "data.kind=indexed needs data.train (@): set data.train to the prefix of a .bin/.idx pair, or"
        " data.kind=synthetic to try without data."
    ),
    "data.train=[0.3,a,0.7,b]": (
        "data.train=[0.3, a, 0.7, b] is not a path or a list of sources (@): write [{prefix: a, weight: 0.3}, {prefix:"
        " b, weight: 0.7}]."
    ),
    "data.split=0.9,0.1": (
        "data.split=0.9,0.1 is not a split (@): write the weights of train, valid and test, such as '969,30,1'."
    ),
    "data.split=0,9,1": (
        "data.split=0,9,1 is not a split (@): write the weights of train, valid and test, such as '969,30,1'."
    ),
    "data.split=9,1,0 data.kind=indexed data.train=a data.valid=b": (
        "data.split=9,1,0 cannot be combined with data.valid=b (@): remove one of them."
    ),
}

# A text in run.yaml, its replacement, and the sentence.
EDITED = {
    "a colon without a space": (
        "num_layers: 4",
        "num_layers:4",
        (
            "not valid YAML (run.yaml, line 4): mapping values are not allowed here; check the indentation and"
            " the space after each colon, and quote text with a colon."
        ),
    ),
    "a tab": (
        "  num_heads",
        "\tnum_heads",
        (
            "not valid YAML (run.yaml, line 5): found character '\\t' that cannot start any token; indent with"
            " spaces instead of tabs."
        ),
    ),
    "a wrong indentation": (
        "  num_heads: 8",
        "   num_heads: 8",
        (
            "not valid YAML (run.yaml, line 5): mapping values are not allowed here; check the indentation and"
            " the space after each colon, and quote text with a colon."
        ),
    ),
    "a key twice": (
        "  num_heads: 8\n",
        "  num_heads: 8\n  num_heads: 4\n",
        "model.num_heads is set twice (run.yaml, line 6; first on line 5): keep one.",
    ),
    "a key left out": (
        "  vocab_size: 257\n",
        "",
        "model.vocab_size is not set (run.yaml, line 2): add it (number of tokens in the vocabulary).",
    ),
    "a misspelt section": (
        "batch:",
        "batches:",
        "batches.global_size is not a config key (run.yaml, line 8): did you mean batch.global_size?\n"
        "  batches.sequence_length (run.yaml, line 9): did you mean batch.sequence_length?",
    ),
    "an open bracket": (
        "{kind: synthetic}",
        "{kind: synthetic",
        "not valid YAML (run.yaml, line 12): expected ',' or '}', but got '<stream end>'; close the bracket.",
    ),
    "an include with a wrong name": (
        "run: {",
        "include: configs/llama3-8b.yaml\nrun: {",
        "config file configs/llama3-8b.yaml does not exist (run.yaml, line 1): did you mean configs/llama3_8b.yaml?",
    ),
    "an include of itself": (
        "run: {",
        "include: run.yaml\nrun: {",
        "the includes form a circle, run.yaml -> run.yaml (run.yaml, line 1): remove one of them.",
    ),
    "a key of Hugging Face": (
        "vocab_size: 257",
        "vocab_size: 257\n  max_position_embeddings: 64",
        (
            "model.max_position_embeddings is not a config key (run.yaml, line 7): use model.max_positions, only"
            " for learned positions; with rope leave it out."
        ),
    ),
    "a section of torchtitan": (
        "mesh: {data: -1}",
        "training: {local_batch_size: 4}",
        (
            "training.local_batch_size is not a config key (run.yaml, line 10): use batch.num_microbatches,"
            " which is batch.global_size / (local batch size * data * fsdp * expert)."
        ),
    ),
    "text for a mapping": (
        "mesh: {data: -1}",
        "mesh: 8",
        "mesh=8 is not a mapping (run.yaml, line 10): set its keys, such as mesh.pipeline.",
    ),
}

FILES = {
    "": f"no config is given (the command line): write {USAGE}.",
    "run.yml": "config file run.yml does not exist: did you mean run.yaml?",
    "llama3-8b": "config file llama3-8b does not exist: did you mean configs/llama3_8b.yaml?",
    "runs/x.yaml": (
        "config file runs/x.yaml does not exist: give the path of a YAML file, or the name of one in configs/, such as "
        "llama3_8b."
    ),
    "--config run.yaml": (
        "--config is not an option: write the name of the config alone, without an option; "
        "python -m megajax.train --help lists the arguments."
    ),
    "--job.config_file=x.toml": (
        "--job.config_file is not an option: write the name of the config alone, without an option; "
        "python -m megajax.train --help lists the arguments."
    ),
    ".": "config file . cannot be read, Is a directory: give a YAML file.",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    Path("run.yaml").write_text(CONFIG)
    Path("configs").mkdir()
    Path("configs/llama3_8b.yaml").write_text("model: {num_layers: 32}\n")
    return tmp_path


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence of `train`'s error for `argv`, with the list that may follow."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out) == (2, "")
    assert sorted(Path().rglob("*")) == before
    assert printed.err.startswith("megajax: error: ") and re.fullmatch(r".*\n(  .*\n)*", printed.err)
    return printed.err.removeprefix("megajax: error: ").rstrip("\n")


@pytest.mark.parametrize("typed", TYPED)
def test_a_mistake_on_the_command_line(typed: str, capsys):
    words = shlex.split(typed)
    sentence = TYPED[typed].replace("@", f"the command line: {words[0]}")
    assert first_place(error_of(["run.yaml", *words], capsys)) == sentence


@pytest.mark.parametrize("mistake", EDITED)
def test_a_mistake_in_the_file(mistake: str, capsys):
    right, wrong, sentence = EDITED[mistake]
    Path("run.yaml").write_text(CONFIG.replace(right, wrong))
    assert error_of(["run.yaml"], capsys) == sentence


@pytest.mark.parametrize("typed", FILES)
def test_a_mistake_in_the_name_of_the_file(typed: str, capsys):
    assert error_of(typed.split(), capsys) == FILES[typed]


def test_data_that_is_not_there(capsys):
    sentence = error_of(["run.yaml", "data.kind=indexed", "data.train=docs"], capsys)
    assert "data.train" in sentence and "docs.idx does not exist" in sentence
