"""The chain that `explain-weight` prints, against the collectives of the traced train step."""

import math
import re
from collections import Counter

import jax
import pytest
from mesh_models import MIXTRAL, MODELS, QWEN3_VL

from megajax.config.checks import check_mesh
from megajax.errors import InputError
from megajax.estimate.weight_elements import StepWeights
from megajax.kernel_choice import HOPPER
from megajax.mesh import build_mesh
from megajax.step.graph import Graph
from megajax.step_plan import StepPlan
from megajax.tools import explain_weight
from megajax.training.step import TrainProgram

BF16 = {"compute": "bfloat16"}
DELAYED = {"compute": "bfloat16", "fp8": {"recipe": "delayed"}}
LLAMA = MODELS["llama"]
SPLIT = {"master": "split"}
FULL = {"policy": "full"}  # else XLA merges the two gathers of the last layer without a loop: test_hlo_facts.py
# Of the mesh, the model and the other sections.
CASES = {
    "dense": ({"fsdp": 2, "tensor": 2}, LLAMA, {"precision": BF16, "microbatches": 2, "optimizer": SPLIT}),
    "BF16 gradients over data, unrolled": (
        {"data": 2, "fsdp": 2},
        LLAMA,
        {"precision": {**BF16, "gradients": "bfloat16"}, "kernels": {"scan_unroll": 4}, "remat": FULL},
    ),
    "experts": (
        {"expert": 2, "fsdp": 2},
        MIXTRAL,
        {"precision": BF16, "communication": {"experts": "all_to_all"}, "microbatches": 2},
    ),
    "FP8": ({"fsdp": 2, "tensor": 2}, LLAMA, {"precision": DELAYED}),
    "FP8 over data": ({"data": 2, "fsdp": 2}, LLAMA, {"precision": DELAYED}),
    "adapters": ({"fsdp": 2, "data": 2}, LLAMA, {"lora": {"rank": 4}, "checkpoint": {"init_from": "x"}}),
    "split masters": ({"fsdp": 2, "tensor": 2}, LLAMA, {"precision": BF16, "optimizer": SPLIT}),
    "prediction modules": (
        {"fsdp": 2, "context": 2},
        LLAMA | {"mtp_layers": 1, "block_pattern": ["mlp"]},
        {"precision": BF16, "remat": FULL},
    ),
}


@pytest.fixture
def programs(table):
    def build(name) -> TrainProgram:
        mesh, model, settings = CASES[name]
        config = table.make_config(model, mesh, **{"optimizer": "sgd"} | settings)
        count = math.prod(mesh.values())
        return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))

    return build


def traced(program) -> Counter:
    """Bytes of a step's gathers and reduce-scatters over the axes that store weights, as `Chain.totals`."""
    jaxpr = jax.make_jaxpr(program.train_step)(program.abstract_state, program.abstract_batch)
    found = Counter()
    for each, times in explain_weight.collectives(jaxpr.jaxpr):
        if "tensor" not in each.axes and each.kind != "all-reduce" and not each.dtype.startswith("int"):
            found[each.kind, each.axes, each.dtype] += each.bytes * times
    return found


# "dense" has split masters, in microbatches.
SECOND = ("BF16 gradients over data, unrolled", "FP8 over data", "adapters", "split masters")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SECOND else []) for name in CASES]
)
def test_the_chains_of_all_weights_have_the_collectives_of_the_step(programs, name):
    program = programs(name)
    totals, graph = Counter(), program.graph
    for weight in explain_weight.names(graph):
        for chain in explain_weight.chains(graph, weight):
            totals += chain.totals()
    explained = {key: size for key, size in totals.items() if key[0] != "all-reduce"}
    assert explained and explained == traced(program)


def lines(table, name, case):
    mesh, model, others = CASES[case]
    config = table.make_config(model, mesh, **others)
    plan = StepPlan.make(config, check_mesh(config, math.prod(mesh.values())), HOPPER)
    return explain_weight.lines(Graph.build(plan), name)


def test_the_page_has_each_form_with_its_bytes(table):
    """Hand-worked: MLP of width 128, D of 64, four layers, fsdp 2 and tensor 2: half the columns, half the rows."""
    page = "\n".join(lines(table, "blocks.dense.mlp.down", "split masters"))
    for text in (
        "declared   blocks.dense.mlp.down: layers, mlp, embed; matrix",
        "canonical  [4, 128, 64] float32",
        "stored     [4, 128, 64] bfloat16 and 16 low bits, in shards over fsdp 2, tensor 2: 32 KiB",
        "[64, 64] bfloat16 = 8 KiB",
        "all-gather over fsdp: 8 KiB",
        "reduce-scatter over fsdp: 16 KiB",
    ):
        assert text in page, text
    rows = [" ".join(line.split()) for line in lines(table, "embedding.tokens", "split masters")]
    assert rows[3:] == [  # 256 rows over tensor, 64 columns over fsdp; gradients are added up in FP32
        "stored [256, 64] bfloat16 and 16 low bits, in shards over fsdp 2, tensor 2: 16 KiB",
        "forward look up rows in the shards once a step [128, 32] bfloat16 = 8 KiB",
        "backward sum over the microbatches once a step [128, 32] float32 = 16 KiB",
    ]


def test_forms_of_fp8_adapters_and_fused_weights_are_named(table):
    page = "\n".join(lines(table, "blocks.dense.attention.key", "FP8"))
    assert "attention.query" in page and "attention.value" in page, "they are one weight"
    assert "float8_e4m3fn" in page and "all-gather over fsdp: 4 KiB" in page
    adapted = "\n".join(lines(table, "blocks.dense.attention.query", "adapters"))
    assert "frozen" in adapted and "with its adapter" in adapted and "backward" not in adapted
    rows = "\n".join(lines(table, "final_norm", "dense"))
    assert "whole on each device" in rows and "all-reduce over fsdp, tensor: 256 B" in rows
    [stored] = [line for line in lines(table, "blocks.dense.attention.norm", "dense") if "  stored " in line]
    assert stored.endswith("whole on each device: 1 KiB")  # four layers of 64 numbers in FP32


def test_layers_with_the_same_chain_are_one(table):
    """Without shards over `fsdp` nothing is gathered, so the last layer, whose weights are kept, is as the others."""
    config = table.make_config(CASES["dense"][1], {}, microbatches=1)
    plan = StepPlan.make(config, check_mesh(config, 1), HOPPER)
    page = explain_weight.lines(Graph.build(plan), "blocks.dense.mlp.down")
    assert [line for line in page if "of one layer" in line] == [
        f"\n{config.model.num_layers} layers of a device; of one layer:"
    ]


def test_stages_gather_their_first_and_last_layers_once_a_step(tmp_path, capsys):
    """Four layers on each: those between are gathered forward and backward in each of two microbatches."""
    (tmp_path / "model.yaml").write_text(
        "model: {num_layers: 8, hidden_size: 64, num_heads: 4, vocab_size: 256}\n"
        "batch: {global_size: 8, sequence_length: 16, num_microbatches: 2}\ndata: {kind: synthetic}\n"
    )
    overrides = ["mesh={pipeline: 2, fsdp: 2, data: -1}", "kernels.scan_unroll=4"]
    name = "blocks.dense.mlp.down"
    assert explain_weight.main([str(tmp_path / "model.yaml"), name, *overrides, "--gpus", "8"]) == 0
    page = capsys.readouterr().out
    assert "in shards over pipeline 2, data 2, fsdp 2" in page
    assert re.findall(r"^(\d) layers of a device|gather for the layer +(.*?) a step", page, re.M) == [
        *(("2", ""), ("", "once"), ("2", ""), ("", "4 times"))
    ]


def test_in_pairs_of_microbatches_only_the_layers_gather_half_as_often(table):
    """Of four microbatches; a tower runs each alone, as the weights outside of layers are gathered once a step."""
    model, mesh = QWEN3_VL | {"num_experts": 4, "experts_per_token": 2}, {"expert": 2, "fsdp": 2}
    times = {}
    for pairs in (False, True):
        communication = {"experts": "all_to_all", "overlap_experts": pairs}
        config = table.make_config(model, mesh, microbatches=4, precision=BF16, communication=communication)
        graph = Graph.build(StepPlan.make(config, check_mesh(config, 4), HOPPER))
        for name in ("blocks.moe.moe.down", "vision.blocks.dense.mlp.down", "vision.projector.down"):
            totals = sum((chain.totals() for chain in explain_weight.chains(graph, name)), Counter())
            times[name, pairs] = totals["all-gather", ("fsdp",), "bfloat16"]
    ratios = {name: times[name, False] / times[name, True] for name, _ in times}
    assert ratios == {"blocks.moe.moe.down": 2, "vision.blocks.dense.mlp.down": 1, "vision.projector.down": 1}


def test_a_name_that_the_model_lacks_is_answered_with_one_that_it_has(table):
    with pytest.raises(InputError, match=r"blocks\.dense\.mlp\.dwn.*blocks\.dense\.mlp\.down"):
        lines(table, "blocks.dense.mlp.dwn", "dense")


@pytest.mark.parametrize("name", ["dense", "experts", "FP8", "FP8 over data"])
def test_the_estimate_of_memory_gathers_the_same_bytes_for_a_layer(programs, name):
    """But for the router, which the estimate counts in the compute dtype."""
    graph = programs(name).graph
    (kind,), plan = graph.layers.blocks, graph.plan
    estimated = StepWeights(plan, graph.layers.blocks, plan.compute.itemsize)
    gathered = 0
    for weight in graph.layers.weights.weights[kind].values():
        for edge in (edge for chain in explain_weight.chains(graph, weight.name) for edge in chain.forward):
            own = sum(each.bytes for each in edge.collectives if each.axes == ("fsdp",))
            gathered += own // 2 if weight.placement.computes_in_fp32 else own
    assert gathered == estimated.layer(kind, in_fp8=graph.layers.segments[0].fp8).gathered_bytes > 0
