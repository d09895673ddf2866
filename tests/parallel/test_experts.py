"""Mixtures of experts train on any mesh as on one device: also their losses and, exactly, the counts of assignments."""

import numpy as np
import pytest

STEPS = 3
# Two layers of eight narrow experts, each kind of loss.
MOE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 250,
    "init_std": 0.1,
    "ffn_hidden_size": 48,
    "num_experts": 8,
    "experts_per_token": 2,
    "router": {"global_loss": 0.1, "sequence_loss": 0.05, "z_loss": 0.01},
}
# DeepSeek-V3's router: groups, sigmoid scores, a bias for balance, a shared expert; noise on the router's input.
DEEPSEEK = MOE | {
    "experts_per_token": 3,
    "shared_expert_ffn_hidden_size": 16,
    "shared_expert_gate": True,
    "dropout": 0.1,
    "router": {
        "score_function": "sigmoid",
        "scaling_factor": 2.5,
        "num_groups": 4,
        "groups_per_token": 2,
        "jitter": 0.1,
        "expert_bias": True,
        "bias_update_rate": 0.05,
        "sequence_loss": 0.1,
    },
}
SINKHORN = MOE | {"activation": "relu2", "router": {"sinkhorn": True, "pre_softmax": True, "normalise": False}}
MODELS = {"mixtral": MOE, "deepseek": DEEPSEEK, "sinkhorn": SINKHORN, "uneven": MOE}

# model, mesh, microbatches, other sections
CASES = [
    ("deepseek", {}, 2, {"remat": {"policy": "full"}}),
    pytest.param("mixtral", {"data": 2, "fsdp": 2, "tensor": 2}, 2, {}, marks=pytest.mark.smoke),
    ("mixtral", {"fsdp": 2}, 1, {"remat": {"policy": "full", "group": 2}}),
    ("deepseek", {"context": 2, "tensor": 2}, 2, {"remat": {"policy": "save_matmuls"}}),
    ("sinkhorn", {"data": 2, "tensor": 4}, 1, {"remat": {"policy": "selective"}}),
    ("uneven", {"fsdp": 2, "tensor": 2}, 2, {"remat": {"policy": "save_matmuls"}, "kernels": {"scan_unroll": 2}}),
    ("mixtral", {"pipeline": 2, "tensor": 2}, 4, {}),
    ("deepseek", {"pipeline": 2, "fsdp": 2}, 4, {"pipeline": {"schedule": "zero_bubble"}}),
    # Two of four virtual stages are empty.
    ("mixtral", {"pipeline": 2}, 2, {"pipeline": {"rounds": 2}, "remat": {"policy": "save_matmuls"}}),
]


def name_of(value) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{key}{size}" for key, size in value.items()) or "plain"
    return None


@pytest.fixture(scope="module")
def uneven_weights(table):
    """Initial weights with which the first expert gets a share of every token, and some none."""
    weights = {}

    def of(trace):
        if not weights:
            weights.update(trace.initial)
            router = weights["blocks.moe.moe.router"].copy()
            router[:, :, 0] += 0
            router[:, :, 4:] = -np.abs(router[:, :, 4:])
            weights["blocks.moe.moe.router"] = router
        return weights

    return of


def make(table, model, mesh, microbatches, sections):
    return table.make_config(MODELS[model], mesh, microbatches=microbatches, steps=STEPS, optimizer="sgd", **sections)


@pytest.mark.parametrize(("model", "mesh", "microbatches", "sections"), CASES, ids=name_of)
def test_experts_train_on_a_mesh_as_on_one_device(table, reference, model, mesh, microbatches, sections):
    config = make(table, model, mesh, microbatches, sections)
    expected = reference(config)
    found = table.train(config, expected.initial)
    assert not table.compare(found, expected).problems(), table.compare(found, expected)
    tokens = config.batch.global_size * config.batch.sequence_length * config.model.experts_per_token
    assert (found.router["expert_counts"].sum(axis=-1) == tokens).all()
