"""Dense layers among MoE layers: the kind of each layer, its slot in a pipeline, and errors."""

from pathlib import Path

import pytest
from config_errors import first_place

from megajax.config import Config, ModelConfig, load_config
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.estimate.costs import flops_per_token, parameter_count
from megajax.layout.kinds import attention_kinds, block_layers, layer_kinds
from megajax.layout.stages import default_layout, layer_slots, slot_kinds, virtual_stages
from megajax.model import Transformer

ROOT = Path(__file__).parents[2]


def model(layers: int, dense: int = 0, interval: int = 1, **keys) -> ModelConfig:
    sizes = {"num_layers": layers, "hidden_size": 8, "num_heads": 2, "vocab_size": 8, "num_experts": 4}
    return ModelConfig(**sizes, first_dense_layers=dense, moe_layer_interval=interval, **keys)


def initials(model: ModelConfig) -> str:
    return "".join(kind.block[0] for kind in layer_kinds(model))


@pytest.mark.smoke
def test_after_the_first_dense_layers_every_nth_has_experts():
    assert initials(model(4)) == "mmmm"
    assert initials(model(5, dense=2)) == "ddmmm"
    assert initials(model(6, interval=3)) == "ddmddm"
    assert initials(model(6, dense=2, interval=2)) == "dddmdm"
    assert block_layers(model(6, dense=2, interval=2)) == {"dense": (0, 1, 2, 4), "moe": (3, 5)}
    windows = {"sliding_window": 4, "layer_pattern": ("local", "global")}
    assert layer_kinds(model(3, dense=1, **windows)) == (("dense", 4, True), ("moe", None, True), ("moe", 4, True))


def test_patterns_of_windows_and_positions_repeat_together():
    patterns = {"sliding_window": 4, "layer_pattern": ("local", "global"), "rope_pattern": ("rope", "rope", "none")}
    dense = ModelConfig(num_layers=13, hidden_size=8, num_heads=2, vocab_size=8, **patterns)
    kinds = [(4, True), (None, True), (4, False), (None, True), (4, True), (None, False)]
    assert attention_kinds(dense) == tuple(kinds)
    assert layer_kinds(dense) == tuple(("dense", *kinds[i % 6]) for i in range(13))


# layers, first dense, interval, virtual stages; layers of each; kinds of the slots, all worked out by hand
LAYOUTS = [
    (27, 1, 1, 4, [7, 7, 7, 6], "dmmmmmmm"),
    # one of the 26 MoE layers on each of 26 virtual stages, and the dense layer on the first too
    (27, 1, 1, 26, [2, *[1] * 25], "dm"),
    # 58 with experts: 15 on each of four stages, beside three dense ones on the first
    (61, 3, 1, 4, [17, 15, 15, 14], "ddd" + 15 * "m"),
    # two dense ones alone, then the third: so two slots of seven instead of three
    (61, 3, 1, 16, [2, *[4] * 14, 3], "ddmmmm"),
    (24, 0, 2, 4, [6, 6, 6, 6], "dmdmdm"),
    (12, 0, 2, 4, [3, 3, 3, 3], "dmdm"),
    (5, 1, 1, 4, [2, 1, 1, 1], "dm"),
    # two dense ones alone would leave one for three stages
    (3, 2, 1, 4, [1, 1, 1, 0], "dm"),
    # as many as there may be: found in moments
    (1000, 900, 1, 2, [450, 550], 450 * "d" + 100 * "m"),
]


@pytest.mark.parametrize(("layers", "dense", "interval", "count", "layout", "kinds"), LAYOUTS)
def test_virtual_stages_share_few_slots_in_which_their_layers_are_found_in_order(
    layers, dense, interval, count, layout, kinds
):
    config = staged(model(layers, dense, interval), count)
    assert default_layout(config.model, count) == tuple(layout)
    assert "".join(kind.block[0] for kind in slot_kinds(config, count)) == kinds
    of_layers = layer_kinds(config.model)
    for held, slots in zip(virtual_stages(config, count), layer_slots(config, count), strict=True):
        assert list(slots) == sorted(set(slots))
        assert [kinds[slot] for slot in slots] == [of_layers[layer].block[0] for layer in held]


def test_slots_are_of_a_window_too():
    """Windows have period 2, experts period 3: each stage starts with another kind, and all layouts are valid."""
    settings = {"sliding_window": 4, "layer_pattern": ("local", "global")}
    config = staged(model(12, interval=3, **settings), 4)
    of_layers, of_slots = layer_kinds(config.model), slot_kinds(config, 4)
    for held, slots in zip(virtual_stages(config, 4), layer_slots(config, 4), strict=True):
        assert [of_slots[slot] for slot in slots] == [of_layers[layer] for layer in held]
    assert check_mesh(config, 4)["pipeline"] == 4


def staged(model: ModelConfig, count: int) -> Config:
    batch = {"global_size": count, "num_microbatches": count, "sequence_length": 16}
    mesh, data = {"pipeline": count}, {"kind": "synthetic"}
    return Config.model_validate({"model": model.model_dump(), "batch": batch, "mesh": mesh, "data": data})


# @ stands for the first override.
REFUSED = {
    "model.first_dense_layers=4": (
        "model.first_dense_layers=4 and model.moe_layer_interval=1 leave no layer of model.num_layers=4 with"
        " experts (@): lower them, or set model.num_experts=null."
    ),
    "model.moe_layer_interval=5": (
        "model.first_dense_layers=0 and model.moe_layer_interval=5 leave no layer of model.num_layers=4 with"
        " experts (@): lower them, or set model.num_experts=null."
    ),
    "model.first_dense_layers=1 model.num_experts=null": (
        "model.first_dense_layers=1 needs experts, but model.num_experts=null (@): set model.num_experts, or remove"
        " model.first_dense_layers."
    ),
    "model.moe_layer_interval=2 model.num_experts=null": (
        "model.moe_layer_interval=2 needs experts, but model.num_experts=null (@): set model.num_experts, or remove"
        " model.moe_layer_interval."
    ),
    "model.block_pattern=[dense,moe] model.num_experts=null model.expert_ffn_hidden_size=null": (
        "model.block_pattern=[dense, moe] has layers with experts (@): set model.num_experts."
    ),
    "model.block_pattern=[dense]": (
        "model.block_pattern=[dense] has no layer with the experts of model.num_experts=4 (@): add moe to it, or set"
        " model.num_experts=null."
    ),
    "model.block_pattern=[dense,moe] model.first_dense_layers=1": (
        "model.block_pattern=[dense, moe] cannot be combined with model.first_dense_layers=1 (@): remove one of them."
    ),
    # The dense layers' width counts where there are some.
    "mesh.tensor=2 model.first_dense_layers=1": (
        "mesh.tensor=2 does not divide model.ffn_hidden_size=25 (@): set mesh.tensor to 1, or change"
        " model.ffn_hidden_size."
    ),
    "remat.group=2 remat.policy=full mesh.pipeline=2 batch.num_microbatches=2 model.first_dense_layers=1": (
        "remat.group=2 does not divide the 3 recomputed dense or MoE layer slots in each virtual stage of"
        " mesh.pipeline=2 (@): use 1 or 3."
    ),
    "remat.group=2 remat.policy=full remat.layers=3 model.first_dense_layers=1": (
        "remat.group=2 does not divide the 3 recomputed layers (@): use 1 or 3."
    ),
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(
        "model:\n  num_layers: 4\n  hidden_size: 16\n  num_heads: 2\n  ffn_hidden_size: 25\n  num_experts: 4\n"
        "  expert_ffn_hidden_size: 8\n  vocab_size: 128\n"
        "batch: {global_size: 4, sequence_length: 16}\ndata: {kind: synthetic}\n"
    )
    sentence = REFUSED[overrides].replace("@", f"the command line: {overrides.split()[0]}")
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml", overrides.split())
    assert first_place(str(caught.value)) == sentence


def test_a_token_meets_the_mlp_of_dense_layers_and_a_few_experts_of_the_others():
    run = ["batch.global_size=1", "batch.sequence_length=4096", "data.kind=synthetic"]
    config = load_config(ROOT / "configs/models/deepseek_v2_lite.yaml", run)
    attention = 2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * 256 + 16 * 128 * 2048
    expert, shared = 3 * 2048 * 1408, 3 * 2048 * 2816
    moe, dense, head = 6 * expert + shared + 2048 * 64, 3 * 2048 * 10944, 2048 * 102400
    matmuls = 27 * attention + 26 * moe + dense + head
    assert flops_per_token(config) == 6 * matmuls + 27 * 3 * 4096 * 16 * (192 + 128)
    assert (
        parameter_count(Transformer(config.model)) == matmuls + 26 * 58 * expert + head + (2 * 27 + 1) * 2048 + 27 * 512
    )
