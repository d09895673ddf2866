"""A run with experts: what it logs, and what it costs."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.model import Transformer, parameters
from megajax.plan import active_parameter_count, estimate_memory, flops_per_token, parameter_count
from megajax.sharding import place_all
from megajax.training.logs import expert_load
from megajax.training.loop import Trainer

ROOT = Path(__file__).parents[2]


def test_load_is_the_largest_count_over_the_mean_and_the_fraction_without_a_token():
    values = expert_load(np.array([[2, 2, 2, 2], [8, 0, 0, 0]]))
    assert values["expert_load"] == [1.0, 4.0] and values["idle_experts"] == [0.0, 0.75]
    assert values["expert_load_max"] == 4.0 and values["idle_experts_max"] == 0.75


@pytest.mark.smoke
def test_a_token_meets_the_experts_that_it_is_sent_to():
    config = load_config(ROOT / "configs/mixtral_l2.yaml")
    attention, expert, head = 2 * 4096 * 128 * (32 + 8), 3 * 4096 * 14336, 4096 * 32000
    layer = attention + 2 * expert + 4096 * 8
    assert flops_per_token(config) == 6 * (2 * layer + head) + 6 * 2 * 4096 * 32 * 128
    model = Transformer(config.model)
    assert parameter_count(model) - active_parameter_count(model) == 2 * 6 * expert


def test_experts_are_stored_over_their_axis_and_not_gathered_over_it():
    config = load_config(ROOT / "configs/mixtral_l2.yaml", ["mesh={expert: 4, data: 2}", "batch.global_size=8"])
    sizes = check_mesh(config, 8)
    placements = place_all(parameters(Transformer(config.model)), sizes)
    up, query = (placements[f"blocks.moe.{name}"] for name in ("moe.up", "attention.query"))
    assert up.spec == P("pipeline", "expert", ("fsdp", "context", "data"), "tensor")
    assert query.spec[1] == ("fsdp", "expert", "context", "data")
    experts, others = 2 * 3 * 8 * 4096 * 14336, 2 * (2 * 4096 * 128 * 40) + 2 * 32000 * 4096
    memory = estimate_memory(config, placements, sizes)
    assert memory.weights == pytest.approx(2 * (experts / 4 + others), rel=1e-3)


def test_a_run_logs_the_routers_losses_and_loads(tmp_path, capsys):
    config = load_config(
        ROOT / "configs/quickstart.yaml",
        [
            f"run={{dir: {tmp_path}/run, steps: 2, log_interval: 1, eval_steps: 1, eval_interval: 0}}",
            "model={num_layers: 2, hidden_size: 16, num_heads: 2, num_kv_heads: 2, ffn_hidden_size: 16}",
            "model.num_experts=4",
            "model.router={global_loss: 0.01, z_loss: 0.001, expert_bias: true}",
            "data={kind: synthetic, train: null, valid: null, split: null, tokenizer: null}",
            "batch={global_size: 4, sequence_length: 16}",
            "mesh={expert: 2}",
        ],
    )
    assert Trainer(config, jax.devices()[:2]).run() == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert len(logged) == 2 and any("eval_loss" in line for line in lines)
    for line in logged:
        assert 0.01 <= line["aux_loss"] < 0.05 and line["router_z_loss"] > 0
        assert 0 < line["router_entropy"] <= np.log(4) + 1e-6
        assert len(line["expert_load"]) == len(line["idle_experts"]) == 2
        assert 1 <= line["expert_load_max"] <= 2
    assert "2 of 4 experts a token" in capsys.readouterr().out
