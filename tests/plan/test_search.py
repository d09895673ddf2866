"""The planner: what it tries, what it keeps, its table, and the sentences for what it cannot plan."""

import itertools
import math

import pytest

from megajax.plan.__main__ import main
from megajax.plan.rates import rates_of
from megajax.plan.search import Found, Search, explained

H200 = rates_of("h200")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Eight layers of Llama 3 8B; 80 do not fit on a GPU."""
    path = tmp_path_factory.mktemp("configs") / "model.yaml"
    path.write_text(
        """
run: {name: model, steps: 10}
model: {num_layers: 8, hidden_size: 4096, num_heads: 32, num_kv_heads: 8, ffn_hidden_size: 14336, vocab_size: 32000}
mesh: {data: -1}
batch: {global_size: 8, sequence_length: 4096}
data: {kind: synthetic}
"""
    )
    return path


@pytest.fixture(scope="module")
def best(config) -> list[Found]:
    return Search(config, [], 4, H200).best(6)


def test_the_fastest_that_fit_come_first_one_of_each_mesh(best):
    times, meshes = [found.time.total for found in best], [tuple(found.candidate.plan.sizes.values()) for found in best]
    assert times == sorted(times) and len(set(meshes)) == len(meshes) == 6
    assert all(math.prod(mesh) == 4 for mesh in meshes) and all(found.gib <= H200.memory_gib for found in best)


def test_no_other_mesh_is_faster(config):
    """Every axis over two GPUs, with every number of microbatches and remat policy, one by one."""
    search, times = Search(config, [], 2, H200), []
    [fastest] = search.best(1)
    axes = ("data", "fsdp", "tensor", "pipeline", "context")
    for axis, count, policy in itertools.product(axes, (1, 2, 4, 8), ("none", "selective", "full")):
        mesh = {f"mesh.{other}": 2 if other == axis else 1 for other in axes}
        found = search.evaluate({**mesh, "batch.num_microbatches": count, "remat.policy": policy})
        if found and found.gib <= H200.memory_gib:
            times.append(found.time.total)
    assert len(times) > 20 and fastest.time.total <= min(times)


def test_the_axes_of_experts_are_varied_too(config):
    experts = ["model.num_experts=8", "model.ffn_hidden_size=4096", "mesh.context=2", "batch.global_size=2"]
    [best] = Search(config, experts, 2, H200).best(1)
    [whole] = Search(config, [*experts, "mesh.experts_over=[expert]"], 2, H200).best(1)
    assert best.candidate.config.mesh.experts_over == ("expert", "context")
    assert whole.candidate.config.mesh.experts_over == ("expert",) and best.time.total < whole.time.total
    over_context = [
        sum(number for axes, number in found.candidate.parameters.items() if "context" in axes)
        for found in (whole, best)
    ]
    # 8 layers of 8 experts with three matrices of 4096 × 4096; a device has half of them.
    assert over_context[0] - over_context[1] == 8 * 8 * 3 * 4096 * 4096 / 2


def test_pinned_keys_are_kept_and_what_changes_numbers_is_not_varied(config):
    pinned = ["mesh={tensor: 4, fsdp: -1}", "remat.policy=full", "precision.gradients=bfloat16"]
    for found in Search(config, pinned, 8, H200).best(2):
        chosen = found.candidate.config
        assert found.candidate.plan.sizes["tensor"] == 4 and chosen.remat.policy == "full"
        assert chosen.precision.gradients == "bfloat16" and chosen.batch.global_size == 8
        assert not any("tensor" in override or "policy" in override for override in found.overrides)


def test_the_overrides_give_the_candidate_again(config, best):
    for found in best[:2]:
        again = explained(config, found.overrides, 4, H200)
        assert again.candidate.plan.sizes == found.candidate.plan.sizes
        assert again.time == found.time and again.candidate.memory == found.candidate.memory


def test_the_link_class_decides_how_fast_a_group_is():
    assert H200.group_bytes(False, 1) == H200.group_bytes(False, 2) == H200.link_bytes
    assert H200.group_bytes(True, 8) == H200.network_bytes, "one GPU of each host"
    assert H200.group_bytes(True, 1) == 8 * H200.network_bytes, "all cards of a host"
    assert H200.with_links(4, 800).group_bytes(True, 4) == 2 * H200.network_bytes


def test_losses_are_named_by_axis_and_link(config):
    found = explained(config, ["mesh.data=-1", "mesh.fsdp=4", "mesh.tensor=2", "batch.global_size=16"], 32, H200)
    assert found.time.between_hosts == {"data"}
    assert {"communication over data between hosts", "communication over tensor"} <= found.time.losses.keys()


def test_the_table_names_the_losses_and_the_overrides(config, capsys):
    assert main([str(config), "--gpus", "2", "mesh.pipeline=2", "--tokens", "1e12"]) == 0
    printed = capsys.readouterr().out
    assert "| pipeline 2, " in printed
    assert "bubble" in printed and "The fastest: mesh.data=" in printed and "GPU-hours" in printed


def test_one_mesh_is_explained(config, capsys):
    assert main([str(config), "--gpus", "8", "--explain", "tensor=2,fsdp=-1"]) == 0
    printed = capsys.readouterr().out
    assert "| fsdp 4 × tensor 2 |" in printed and "communication over tensor" in printed
    assert "Largest microbatch that fits: 2 sequences" in printed and "twice the length" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "12"], "--gpus=12 is not a whole number of hosts of 8: use 8 or 16."),
        (["--gpus", "8", "--device", "x100"], "--device=x100 is not known: use h200, h100, b200."),
        (["--gpus", "8", "mesh.tensor=3"], "mesh.tensor=3 leaves no mesh of 8 GPUs"),
        (
            ["--gpus", "64", "mesh.tensor=64"],
            "the most frequent reason: mesh.tensor=64 does not divide model.num_heads",
        ),
        (
            ["--gpus", "1", "model.num_layers=80", "batch.global_size=1"],
            "no mesh of 1 H200s holds this: the closest needs",
        ),
        (["--gpus", "8", "--explain", "width=2"], "width=2 is no axis with a size"),
        (["--gpus", "8", "--top", "0"], "--top=0 is below 1."),
        ([], "--gpus is missing"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(config, capsys, arguments, sentence):
    with pytest.raises(SystemExit) as stopped:
        main([str(config), *arguments])
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err
