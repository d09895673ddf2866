"""`check_mesh`: sizes filled in, and everything that the mesh must divide; all numbers worked out by hand."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from config_errors import first_place

from megajax.config import Config, load_config
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.options.context import STRATEGIES

BASE = """\
model:
  num_layers: 2
  hidden_size: 64
  num_heads: 8
  num_kv_heads: 4
  ffn_hidden_size: 96
  vocab_size: 1000
batch: {global_size: 24, num_microbatches: 2, sequence_length: 30}
data: {kind: synthetic}
"""


def config(tmp_path: Path, overrides: str) -> Config:
    path = tmp_path / "x.yaml"
    path.write_text(BASE)
    return load_config(path, [text.replace(":", ": ") for text in overrides.split()])


SIZES = [
    # overrides, devices, (pipeline, data, fsdp, expert, context, tensor)
    ("", 1, (1, 1, 1, 1, 1, 1)),
    ("mesh.data=-1", 1, (1, 1, 1, 1, 1, 1)),
    ("mesh.data=-1", 4, (1, 4, 1, 1, 1, 1)),
    ("mesh.fsdp=-1 mesh.tensor=2", 8, (1, 1, 4, 1, 1, 2)),
    ("mesh.data=3 mesh.fsdp=2 mesh.tensor=-1", 12, (1, 3, 2, 1, 1, 2)),
    ("mesh.data=2 mesh.fsdp=3 mesh.tensor=2", 12, (1, 2, 3, 1, 1, 2)),
    ("mesh.pipeline=-1", 1, (1, 1, 1, 1, 1, 1)),
    # 2 layers on 2 stages, and 2 microbatches
    ("mesh.pipeline=2", 2, (2, 1, 1, 1, 1, 1)),
    ("mesh.pipeline=-1 mesh.data=3", 6, (2, 3, 1, 1, 1, 1)),
    ("mesh.pipeline=2 mesh.fsdp=-1 mesh.tensor=2", 12, (2, 1, 3, 1, 1, 2)),
    # 12 sequences of a microbatch over 12 devices: 1 each, of 30 tokens
    ("mesh.data=12", 12, (1, 12, 1, 1, 1, 1)),
    # 4 key/value heads on 8 tensor devices: each head on two; 12 * 32 tokens / 8
    ("mesh.tensor=8 batch.sequence_length=32", 8, (1, 1, 1, 1, 1, 8)),
    # 1 key/value head on 2 devices
    ("mesh.tensor=2 model.num_kv_heads=1", 2, (1, 1, 1, 1, 1, 2)),
    # 30 tokens a sequence do not divide by 4, but the 360 of the microbatch do
    ("mesh.tensor=4", 4, (1, 1, 1, 1, 1, 4)),
    # whole experts, each of any width
    (
        "mesh.tensor=4 mesh.experts_over=[tensor] model.num_experts=4 model.expert_ffn_hidden_size=99",
        4,
        (1, 1, 1, 1, 1, 4),
    ),
]

DIVIDED = "batch.global_size=2 batch.num_microbatches=1 batch.sequence_length=16 mesh.context=4"
DELTA = f"{DIVIDED} model.block_pattern=[gated_deltanet]"
OVERLAP = "communication.overlap_experts=true model.num_experts=4 mesh.data=2"
EXPERTS = "model.num_experts=4 mesh.tensor=4"
# overrides at the last legal value, the first one beyond it, devices
LIMITS = [
    # 4 of 16 tokens on a device: a convolution sees 4 before a token, but not 5.
    (f"{DELTA} model.linear_attention.conv_kernel=5", "model.linear_attention.conv_kernel=6", 4),
    (DIVIDED, "batch.sequence_length=12", 4),  # two chunks on each device
    (f"{DIVIDED} communication.context=all_to_all", "model.num_heads=6 model.num_kv_heads=6 model.head_dim=8", 4),
    ("mesh.tensor=8 batch.sequence_length=30", "batch.sequence_length=31", 8),  # 12 sequences: 360 and 372 tokens
    ("mesh.tensor=8 batch.sequence_length=32 model.ffn_hidden_size=96", "model.ffn_hidden_size=100", 8),
    ("mesh.tensor=8 batch.sequence_length=32", "model.vocab_size=1001 model.vocab_multiple=1", 8),
    ("model.num_experts=4 mesh.expert=4", "model.num_experts=6", 4),
    # a device has 16 and 15 tokens of a sequence, which two stages share
    ("model.mtp_layers=1 mesh={pipeline:2,data:12,tensor:2} batch.sequence_length=32", "batch.sequence_length=30", 48),
    (f"{EXPERTS} model.expert_ffn_hidden_size=96", "model.expert_ffn_hidden_size=98", 4),
    (f"{EXPERTS} model.shared_expert_ffn_hidden_size=96", "model.shared_expert_ffn_hidden_size=98", 4),
    ("remat.policy=full remat.layers=2", "remat.layers=3", 1),
    ("mesh.pipeline=2 remat.policy=full remat.layers=1", "remat.layers=2", 2),  # of a stage's layers
    # a device has half of the experts, or all
    (f"{OVERLAP} mesh.experts_over=[data]", "mesh.experts_over=[expert]", 2),
]


@pytest.mark.parametrize(("legal", "beyond", "devices"), LIMITS)
def test_the_last_value_that_a_mesh_divides_passes_and_the_next_is_refused(tmp_path, legal, beyond, devices):
    check_mesh(config(tmp_path, legal), devices)
    with pytest.raises(ConfigError):
        check_mesh(config(tmp_path, f"{legal} {beyond}"), devices)


@pytest.mark.smoke
@pytest.mark.parametrize(("overrides", "devices", "sizes"), SIZES)
def test_sizes_multiply_to_the_devices_in_axis_order(tmp_path, overrides, devices, sizes):
    filled = check_mesh(config(tmp_path, overrides), devices)
    assert tuple(filled.values()) == sizes
    assert list(filled) == ["pipeline", "data", "fsdp", "expert", "context", "tensor"]


REFUSED = [
    (
        "",
        8,
        (
            "the default mesh uses 1 of 8 devices (default): make the product 8, or set one axis to -1, such"
            " as mesh.data=-1."
        ),
    ),
    (
        "mesh.data=2 mesh.tensor=2",
        8,
        (
            "mesh.data=2 x mesh.tensor=2 uses 4 of 8 devices (the command line: mesh.data=2): make the"
            " product 8, or set one axis to -1, such as mesh.data=-1."
        ),
    ),
    (
        "mesh.data=-1 mesh.tensor=4",
        6,
        "mesh.tensor=4 does not divide 6 devices (the command line: mesh.tensor=4): use 1 or 2.",
    ),
    (
        "mesh.pipeline=3 mesh.data=-1 model.num_layers=4 batch.num_microbatches=6",
        4,
        "mesh.pipeline=3 does not divide 4 devices (the command line: mesh.pipeline=3): use 1, 2 or 4.",
    ),
    (
        "mesh.expert=-1",
        2,
        (
            "mesh.expert=2 (from -1) needs a model with experts (the command line: mesh.expert=-1): set"
            " model.num_experts, or use mesh.data or mesh.fsdp for the batch."
        ),
    ),
    (
        "mesh.tensor=-1",
        3,
        (
            "mesh.tensor=3 (from -1) does not divide model.num_heads=8 (the command line: mesh.tensor=-1):"
            " set mesh.tensor to 1, 2, 4 or 8, or change model.num_heads."
        ),
    ),
    (
        # 12 sequences a microbatch over 8
        "mesh.data=4 mesh.fsdp=2",
        8,
        (
            "mesh.data=4 x mesh.fsdp=2 does not divide batch.global_size=24 / batch.num_microbatches=2 = 12"
            " (the command line: mesh.data=4): make batch.global_size a multiple of 16, or set"
            " batch.num_microbatches to 1 or 3."
        ),
    ),
    (
        # 24 over 5 never
        "mesh.data=-1",
        5,
        (
            "mesh.data=5 (from -1) does not divide batch.global_size=24 / batch.num_microbatches=2 = 12"
            " (the command line: mesh.data=-1): make batch.global_size a multiple of 10."
        ),
    ),
    (
        # one sequence of 30 tokens over 4
        "mesh.data=12 mesh.tensor=4",
        48,
        "mesh.tensor=4 does not divide the tokens of a microbatch, 1 x batch.sequence_length=30 = 30"
        " (the command line: mesh.tensor=4): make batch.sequence_length a multiple of 4.",
    ),
    (
        # one sequence of 36 tokens, 6 on each device of context
        "mesh.data=12 mesh.tensor=4 mesh.context=6 batch.sequence_length=36",
        288,
        "mesh.tensor=4 does not divide the tokens of a microbatch, 1 x batch.sequence_length=36 / mesh.context=6 = 6"
        " (the command line: mesh.tensor=4): make batch.sequence_length a multiple of 24.",
    ),
    (
        # 16 tokens on each device of context; the 4 chunks of a sequence must divide its length too
        "mesh.data=12 mesh.tensor=3 mesh.context=2 batch.sequence_length=32 model.num_heads=12 model.num_kv_heads=6"
        " model.head_dim=8 model.vocab_multiple=3",
        72,
        "mesh.tensor=3 does not divide the tokens of a microbatch, 1 x batch.sequence_length=32 / mesh.context=2 = 16"
        " (the command line: mesh.tensor=3): make batch.sequence_length a multiple of 12.",
    ),
    (
        "mesh.context=4",
        4,
        "mesh.context=4 cuts a sequence into 8 chunks, which do not divide batch.sequence_length=30"
        " (the command line: mesh.context=4): make batch.sequence_length a multiple of 8.",
    ),
    (
        "mesh.context=-1 mesh.tensor=2 batch.sequence_length=36 communication.context=all_to_all",
        6,
        (
            "communication.context=all_to_all divides the heads over mesh.context=3 (from -1), which does not"
            " divide model.num_heads=8 / mesh.tensor=2 = 4 (the command line: communication.context=all_to_all):"
            " use communication.context=ring or all_gather, or mesh.context=1 or 2."
        ),
    ),
    (
        "mesh.context=3 batch.sequence_length=36 communication.context=dynamic",
        3,
        "communication.context=dynamic halves groups of devices, and mesh.context=3 is no power of 2 (the command line:"
        " mesh.context=3): set mesh.context to 2, or use communication.context=auto.",
    ),
    (
        "mesh.context=2 batch.sequence_length=36 communication.context=dynamic",
        2,
        "communication.context=dynamic divides documents among groups of devices, and data.reset_attention=false joins"
        " them (the command line: communication.context=dynamic): set data.reset_attention=true, or use"
        " communication.context=auto.",
    ),
    (
        "mesh.context=2 batch.sequence_length=36 communication.context=dynamic data.reset_attention=true"
        " model.encoder.kind=layers model.encoder.num_layers=1 model.encoder.sequence_length=8"
        " model.block_pattern=[decoder]",
        2,
        "communication.context=dynamic puts a row's documents into another order, which the rows of an encoder do not"
        " follow (the command line: communication.context=dynamic): use communication.context=auto.",
    ),
    (
        "mesh.context=2 batch.sequence_length=36 communication.context=dynamic data.reset_attention=true"
        " model.vision={image_token:5,num_layers:1,hidden_size:16,num_heads:2}",
        2,
        "communication.context=dynamic puts a row's documents into another order, which the rows of a vision tower do"
        " not follow (the command line: communication.context=dynamic): use communication.context=auto.",
    ),
    (
        "communication.overlap_experts=true mesh.data=2",
        2,
        "communication.overlap_experts=true overlaps exchanges with experts, and the model has none (the command line:"
        " communication.overlap_experts=true): set communication.overlap_experts=false, or set model.num_experts.",
    ),
    (
        "communication.overlap_experts=true model.num_experts=4 mesh.data=2",
        2,
        "communication.overlap_experts=true overlaps exchanges with experts on other devices, and a device has all"
        " experts itself (the command line: communication.overlap_experts=true): set mesh.expert to 2 or more, or set"
        " communication.overlap_experts=false.",
    ),
    (
        "communication.overlap_experts=true model.num_experts=4 mesh.expert=2 batch.num_microbatches=3",
        2,
        "communication.overlap_experts=true pairs microbatches, and steps of 24 sequences have an odd number, 3, of"
        " them (the command line: communication.overlap_experts=true): use 2, 4, 6 or 12, or set"
        " communication.overlap_experts=false.",
    ),
    (
        "communication.overlap_experts=true model.num_experts=4 mesh.expert=2 mesh.pipeline=-1",
        4,
        "communication.overlap_experts=true pairs microbatches, which mesh.pipeline=2 (from -1) runs one by one (the"
        " command line: communication.overlap_experts=true): set mesh.pipeline=1, or set"
        " communication.overlap_experts=false.",
    ),
]


@pytest.mark.parametrize(("overrides", "devices", "sentence"), REFUSED)
def test_a_mesh_that_does_not_fit_is_refused(tmp_path, overrides, devices, sentence):
    loaded = config(tmp_path, overrides)
    with pytest.raises(ConfigError) as caught:
        check_mesh(loaded, devices)
    assert first_place(str(caught.value)) == sentence.replace("@", str(tmp_path / "x.yaml"))


DENSE, LATENT = "llama3_8b_l8_context", "dsv3_l4_e16"  # 32 query and 8 KV heads; latents of 128 heads
CONTEXT = [  # GPUs, the strategy, and words of the reason
    (DENSE, "mesh.context=4", 4, "all_to_all", "divides the query heads and the KV heads"),
    (DENSE, "mesh.context=4 mesh.tensor=2", 8, "all_to_all", "mesh.context=4"),  # 16 and 4 of a device
    (DENSE, "mesh.context=4 mesh.tensor=4", 16, "ring", "the KV heads of a device, 2"),
    (DENSE, "mesh.context=2 mesh.tensor=16", 32, "ring", "the KV heads of a device, 1"),  # two devices have the same
    (
        DENSE,
        "mesh.context=8 model.num_heads=12 model.num_kv_heads=4 model.head_dim=128",
        8,
        "ring",
        "the query heads of a device, 12",
    ),
    (DENSE, "mesh.context=4 communication.context=ring", 4, "ring", "communication.context=ring"),
    (LATENT, "mesh.context=2", 2, "ring", "latents"),
    (LATENT, "mesh.context=2 precision.fp8.recipe=current", 2, "all_to_all", "heads"),  # no up-projection of others'
    # A ring takes no bias of the scores
    (DENSE, "mesh.context=4 mesh.tensor=4 model.position=relative", 16, "all_gather", "the KV heads of a device, 2"),
    (DENSE, "mesh.context=4 model.position=relative", 4, "all_to_all", "divides the query heads and the KV heads"),
]


@pytest.mark.parametrize(("name", "overrides", "devices", "strategy", "reason"), CONTEXT)
def test_the_devices_of_context_share_the_heads_where_they_can(name, overrides, devices, strategy, reason):
    loaded = load_config(name, overrides.split())
    chosen, why = loaded.choose_context(check_mesh(loaded, devices))
    assert chosen.name == strategy and reason in why


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_strategies_have_a_bias_of_the_scores(strategy):
    overrides = ["model.position=relative", "data.reset_attention=true", f"communication.context={strategy}"]
    refused = pytest.raises(ConfigError, match="model.position=relative cannot be combined with communication")
    with nullcontext() if strategy in ("all_gather", "all_to_all") else refused:
        load_config(DENSE, ["mesh.context=4", *overrides])


REFUSED_BEFORE_DEVICES_ARE_KNOWN = {
    "mesh.tensor=8 model.ffn_hidden_size=100": (
        "mesh.tensor=8 does not divide model.ffn_hidden_size=100 (@): set mesh.tensor to 1, 2 or 4, or change"
        " model.ffn_hidden_size."
    ),
    "mesh.tensor=4 model.num_heads=12 model.num_kv_heads=6 model.head_dim=8": (
        "mesh.tensor=4 neither divides model.num_kv_heads=6 nor is a multiple of it (@): set mesh.tensor to 1 or 2,"
        " or change model.num_kv_heads."
    ),
    # 1000 padded to a multiple of 9 is 1008 = 16 * 63, to one of 1 stays 1000 = 8 * 125
    "mesh.tensor=32 model.num_heads=32 model.vocab_multiple=9": (
        "mesh.tensor=32 does not divide the padded vocabulary of 1008 (model.vocab_size=1000 and"
        " model.vocab_multiple=9) (@): make model.vocab_multiple a multiple of 32."
    ),
    "mesh.expert=4": (
        "mesh.expert=4 needs a model with experts (@):"
        " set model.num_experts, or use mesh.data or mesh.fsdp for the batch."
    ),
}


@pytest.mark.parametrize("overrides", REFUSED_BEFORE_DEVICES_ARE_KNOWN)
def test_what_the_given_sizes_cannot_divide_is_refused_on_loading(tmp_path, overrides):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, overrides)
    expected = REFUSED_BEFORE_DEVICES_ARE_KNOWN[overrides]
    assert first_place(str(caught.value)) == expected.replace("@", f"the command line: {overrides.split()[0]}")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("mesh.fsdp=2", "mesh.fsdp=2 uses 2 of 4 devices (2 processes with 2 each)"),
        ("mesh.fsdp=8", "mesh.fsdp=8 needs 8 devices, but there are 4 (2 processes with 2 each)"),
        ("mesh.fsdp=-1 mesh.tensor=8", "mesh.tensor=8 does not divide 4 devices (2 processes with 2 each)"),
    ],
)
def test_the_devices_of_several_processes_are_explained(tmp_path, overrides, problem):
    with pytest.raises(ConfigError) as caught:
        check_mesh(config(tmp_path, overrides + " batch.sequence_length=32"), 4, num_processes=2)
    assert str(caught.value).startswith(f"{problem} (the command line: ")


def test_the_words_agree_with_the_numbers(tmp_path):
    with pytest.raises(ConfigError, match="needs 2 devices, but there is 1 "):
        check_mesh(config(tmp_path, "mesh.fsdp=2"), 1)
    with pytest.raises(ConfigError, match="or set batch.num_microbatches to 1[.]"):
        check_mesh(config(tmp_path, "mesh.data=24 model.num_layers=1"), 24)
    with pytest.raises(ConfigError, match="remat.layers=2 is more than model.num_layers=1 .*: use 1, or null for all"):
        config(tmp_path, "model.num_layers=1 remat.policy=full remat.layers=2")
    with pytest.raises(ConfigError, match="does not divide the 1 recomputed layer "):
        config(tmp_path, "model.num_layers=1 remat.policy=full remat.group=2")
