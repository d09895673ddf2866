"""What is exact in the planner and the estimates, whatever their fitted constants: work that devices share, sums."""

import math
import re
from dataclasses import replace
from functools import cache

import jax
import pytest
import yaml
from jax.interpreters import partial_eval

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.estimate.activations import Activations
from megajax.estimate.costs import flops_per_token
from megajax.estimate.memory import peaks
from megajax.estimate.optimizer_memory import state_bytes
from megajax.estimate.traces import jaxprs_inside
from megajax.estimate.weight_elements import Elements, StepWeights
from megajax.mesh import build_mesh
from megajax.optim.slots import OptimizerSlots
from megajax.options.pipeline_schedules import KINDS as SCHEDULES
from megajax.parallel.experts import expert_parallel
from megajax.parallel.tensor.ring import TensorRing
from megajax.sharding import BLOCKS
from megajax.step.pipeline.buffers import schedule_of
from megajax.tools.plan import work
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import H200, Rates, rates_of
from megajax.tools.plan.search import explained
from megajax.tools.plan.step_time import StepTime
from megajax.training.step import TrainProgram

# Rates that do not depend on sizes: with one the time is that of FLOPs alone, with the other of bytes alone.
FLAT = replace(H200, bf16_half_rate=0, fp8_half_rate=0, attention_half_rate=0, bf16_flops=1.0, fp8_flops=2.0)
FLOPS = replace(FLAT, attention_flops=((64, 1.0),), memory_bytes=1e40)
BYTES = replace(FLAT, bf16_flops=1e60, fp8_flops=1e60, attention_flops=((64, 1e60),), memory_bytes=1.0)

D, V, LENGTH, ROWS = 64, 128, 128, 8
DENSE = {"num_layers": 4, "hidden_size": D, "num_heads": 4, "ffn_hidden_size": 256, "vocab_size": V}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 64}
TOWER = {"image_token": 9, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_hidden_size": 64, "patch_size": 2}
RECURRENCE = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16}
MODELS: dict[str, dict] = {
    "dense": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "norm": "layernorm"},
    "windows": {"sliding_window": 32, "layer_pattern": ["local", "global"]},
    "both sides": {"causal": False},
    "experts": EXPERTS | {"shared_expert_ffn_hidden_size": 64},
    "mixed": EXPERTS | {"moe_layer_interval": 2},
    "modules": {"mtp_layers": 2},
    "latent": {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "encoder": {"encoder": {"kind": "layers", "num_layers": 2, "sequence_length": 64}},
    "vision": {"vision": TOWER | {"patches_per_row": 64, "merge": 2}},
    "hybrid": {"block_pattern": ["gated_deltanet", "dense"], "linear_attention": RECURRENCE},
}
STAGES = {"mesh": {"pipeline": 2}, "batch": {"num_microbatches": 4}}
MESHES: dict[str, dict] = {
    **{axis: {"mesh": {axis: 2}} for axis in ("fsdp", "tensor", "context", "expert")},
    "experts over tensor": {"mesh": {"tensor": 2, "experts_over": ["tensor"]}},
    "experts over fsdp": {"mesh": {"fsdp": 2, "experts_over": ["fsdp"]}},
    "pipeline": STAGES,
    "virtual stages": STAGES | {"pipeline": {"virtual_stages": 2}},
}
# Matrices that all devices of `tensor` have whole: routers, projections of prediction modules and to latents
WHOLE = {"experts": 4 * D * 8, "mixed": 2 * D * 8, "modules": 2 * 2 * D * D, "latent": 4 * D * (32 + 32 + 8)}
TWO_KINDS = ("windows", "mixed", "hybrid")  # virtual stages of one layer would have empty slots, which take time
CASES = [
    (model, mesh)
    for model in MODELS
    for mesh in MESHES
    if ("expert" not in mesh or model == "experts")
    and (mesh not in ("fsdp", "context") or model in WHOLE)
    and mesh != ("virtual stages" if model in TWO_KINDS else "pipeline")
    and (model not in ("biases", "both sides") or mesh == "tensor")
]


@pytest.fixture(autouse=True)
def even_experts(monkeypatch):
    """Experts without partly empty tiles, whose devices have the same rows."""
    monkeypatch.setattr(work, "TILE", 0)
    monkeypatch.setattr(work, "IMBALANCE", 0)


def make(name: str, gpus: int = 1, **sections: dict) -> Candidate:
    model = DENSE | MODELS[name] | sections.pop("model", {})
    batch = {"global_size": ROWS, "sequence_length": LENGTH} | sections.pop("batch", {})
    config = Config.model_validate({"model": model, "batch": batch, "data": {"kind": "synthetic"}, **sections})
    return Candidate.of(config, check_mesh(config, gpus))


def time(candidate: Candidate, rates: Rates) -> StepTime:
    """The step's time at other rates."""
    return replace(candidate, rates=rates).time


@cache
def on(name: str, mesh: str | None) -> Candidate:
    """A model on one device, or on two."""
    return make(name) if mesh is None else make(name, 2, **{key: dict(value) for key, value in MESHES[mesh].items()})


@pytest.mark.parametrize("name", [name for name in MODELS if name != "hybrid"])
def test_work_of_a_device_is_the_flops_of_its_tokens(name):
    """A recurrence takes the time of its bytes. Patches have no gradient, but count as other inputs in the FLOPs."""
    step = time(on(name, None), FLOPS)
    expected = ROWS * LENGTH * flops_per_token(on(name, None).config)
    expected -= ROWS * 64 * 2 * (3 * 2 * 2 * 32) if name == "vision" else 0
    assert step.matmuls + step.attention + step.head == pytest.approx(expected)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_devices_share_the_work_of_one(name, mesh):
    one, two = time(on(name, None), FLOPS), time(on(name, mesh), FLOPS)
    assert 2 * two.head == pytest.approx(one.head)
    if (name, mesh) == ("latent", "context"):  # each device projects all keys
        assert 2 * two.matmuls > one.matmuls
    else:
        assert 2 * two.matmuls == pytest.approx(one.matmuls)
        if name != "hybrid":
            assert 2 * two.attention == pytest.approx(one.attention)
        # Buffers of experts' rows have room for those of several devices, and `tensor` divides their widths only.
        if name not in ("experts", "mixed") or not ("expert" in mesh or mesh == "tensor"):
            assert 2 * time(on(name, mesh), BYTES).elementwise == pytest.approx(time(on(name, None), BYTES).elementwise)


TWO_LAYERS = {"model": {"num_layers": 2}, "kernels": {"scan_unroll": 2}}  # of the steps that are traced


def operations(jaxpr, times: int = 1):
    """(operation, how often it runs) of a traced step."""
    for equation in jaxpr.eqns:
        yield equation, times
        inside = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for each in jaxprs_inside(equation):
            yield from operations(each, inside)


def traced(candidate: Candidate) -> list:
    """The `operations` that the results of a step need."""
    devices = jax.devices()[: math.prod(candidate.plan.sizes.values())]
    program = TrainProgram.build(candidate.config, build_mesh(candidate.plan.sizes, devices))
    jaxpr = program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr.jaxpr
    return list(operations(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]))


def traced_products(candidate: Candidate) -> int:
    """FLOPs of a step's products with weights, which have no batch dimensions."""
    found = 0
    for operation, times in traced(candidate):
        if operation.primitive is jax.lax.dot_general_p:
            (contracted, _), (batch, _) = operation.params["dimension_numbers"]
            depth = math.prod(operation.invars[0].aval.shape[dim] for dim in contracted)
            found += 0 if batch else 2 * times * depth * operation.outvars[0].aval.size
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "policy"),
    [("biases", "fsdp", "full"), ("modules", "tensor", "none"), ("latent", "tensor", "none")],
)
def test_matmuls_are_those_of_the_traced_step(name, mesh, policy):
    layers = {"model": {"num_layers": 1}} if name == "latent" else TWO_LAYERS
    candidate = make(name, 2, mesh={mesh: 2}, remat={"policy": policy}, **layers)
    step = time(candidate, FLOPS)
    assert step.matmuls + step.recomputed.matmuls + step.head == pytest.approx(traced_products(candidate))


def traced_bytes(candidate: Candidate, axis: str, dtypes: tuple[str, ...] = ("bfloat16", "uint8")) -> float:
    """Bytes that a device sends over an axis, in arrays of these dtypes: by default activations, in BF16 or FP8."""
    found, size = 0.0, candidate.plan.sizes[axis]
    for operation, times in traced(candidate):
        if operation.params.get("axis_name") in (axis, (axis,)):
            shares = {"all_gather": size - 1, "reduce_scatter": (size - 1) / size, "ppermute": 1}
            arrays = [v.aval for v in operation.invars if v.aval.dtype.name in dtypes]
            found += times * shares.get(operation.primitive.name, 0) * sum(a.size * a.dtype.itemsize for a in arrays)
    return found


FP8 = {"precision": {"fp8": {"recipe": "current"}}}
ONE_LAYER = {"num_layers": 1}
GATHERED: dict[str, tuple[str, dict]] = {
    "dense": ("biases", {}),
    "recomputed": ("dense", {"remat": {"policy": "full"}}),
    "in pieces": ("dense", {"model": ONE_LAYER | {"ffn_hidden_size": 2 * TensorRing.overlap_width}}),
    "in FP8": ("dense", FP8 | {"model": ONE_LAYER}),
    "one layer in BF16": ("dense", {"precision": {"fp8": {"recipe": "current", "last_bf16_layers": 1}}}),
    "in blocks": ("dense", {"precision": {"fp8": {"recipe": "blockwise"}}, "model": ONE_LAYER | {"hidden_size": 256}}),
    "frozen": ("dense", {"lora": {"rank": 8, "targets": ["output"]}}),
    "latent": ("latent", {"model": ONE_LAYER}),
    "modules": ("modules", {"model": ONE_LAYER | {"mtp_layers": 1}}),
    "experts": ("experts", {"model": ONE_LAYER | {"hidden_size": 128, "expert_ffn_hidden_size": 256}, **FP8}),
}


@pytest.mark.parametrize("case", GATHERED)
def test_what_tensor_gathers_and_sums_is_that_of_the_traced_step(case):
    name, sections = GATHERED[case]
    model = TWO_LAYERS["model"] | sections.get("model", {})
    sections = sections | {"model": model, "kernels": {"scan_unroll": model["num_layers"]}}
    candidate = make(name, 2, mesh={"tensor": 2}, batch={"global_size": 2}, **sections)
    found = traced_bytes(candidate, "tensor")
    if case == "frozen":  # a token's numbers of width RANK are summed, and their gradient is gathered
        found -= 2 * 2 * 2 * LENGTH * RANK * 2 / 2
        # Nothing needs the gradient of the first layer's input, or of its attention.
        found += 2 * 2 * LENGTH * D * 2 / 2
    assert time(candidate, FLOPS).traffic["tensor"].sent == pytest.approx(found, rel=1e-9)


def test_a_ring_sends_keys_to_all_other_devices_and_their_gradients_back():
    """Of four devices: keys and values in both passes three times, their FP32 gradients four times, until home."""
    model, batch = {"num_layers": 1, "num_kv_heads": 2}, {"global_size": 2}
    candidate = make("dense", 4, mesh={"context": 4}, communication={"context": "ring"}, model=model, batch=batch)
    keys = 2 * (2 * LENGTH / 4) * 2 * 16
    assert traced_bytes(candidate, "context", ("uint16",)) == 2 * keys * (2 * 3) + 4 * keys * 4


PROJECTOR, PATCHES = "vision.projector.*", "vision.patch*"
FROZEN: dict[str, list[tuple[str, float]]] = {
    "nothing": [],
    "the tower": [(PROJECTOR, 1.0), ("vision.*", 0.0)],
    "the tower and the projector": [("vision.*", 0.0)],
    "all but the projector": [(PROJECTOR, 1.0), ("*", 0.0)],
    "all but the tower": [(PROJECTOR, 0.0), ("vision.*", 1.0), ("*", 0.0)],
}


@pytest.mark.parametrize(("frozen", "tensor"), [*((name, 1) for name in FROZEN), ("nothing", 2)])
def test_matmuls_of_a_tower_are_those_of_the_traced_step(frozen, tensor):
    groups = [{"parameters": [pattern], "learning_rate": rate} for pattern, rate in FROZEN[frozen]]
    tower = MODELS["vision"]["vision"] | {"num_layers": 1}
    few = {"model": {"num_layers": 1, "vision": tower}, "batch": {"global_size": 2}}
    candidate = make("vision", tensor, mesh={"tensor": tensor}, optimizer={"groups": groups}, **few)
    found, step = traced_products(candidate), time(candidate, FLOPS)
    if frozen != "the tower and the projector":  # XLA does not run the projector's first matmul a second time
        found -= 2 * (2 * 64 / 4) * (4 * 32) ** 2 / tensor
    assert step.matmuls + step.head == pytest.approx(found)


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_what_stages_send_is_that_of_the_traced_step(virtual_stages):
    """Streams to the next stage and back, shares of the head's tokens, and embedding and head once a step."""
    pipeline = {"schedule": "zero_bubble", "virtual_stages": virtual_stages}
    model, batch = {"num_layers": 2 * virtual_stages}, {"num_microbatches": 4}
    candidate = make("dense", 4, mesh={"pipeline": 2, "fsdp": 2}, pipeline=pipeline, model=model, batch=batch)
    step = time(candidate, FLOPS)
    assert step.traffic["pipeline"].sent == traced_bytes(candidate, "pipeline", ("bfloat16", "float32"))
    assert step.weights["pipeline"].sent == (2 + 4) * 2 * D * V / 2 / 2  # of fsdp's shard
    assert step.weights["pipeline"].exposed == step.weights["pipeline"].seconds


def test_fsdp_gathers_the_first_and_last_of_a_stages_four_layers_once_a_step():
    """And each of the others as often as a stage's only layer, in every operation."""
    sections = {"mesh": {"pipeline": 2, "fsdp": 2}, "pipeline": {"schedule": "gpipe"}, "batch": {"num_microbatches": 2}}
    one, four = (
        traced_bytes(make("dense", 4, model={"num_layers": 2 * n}, kernels={"scan_unroll": n}, **sections), "fsdp")
        for n in (1, 4)
    )
    layer = D * 16 * (4 + 2 * 4) + D * D + 3 * D * 256  # a device sends its half, of two bytes each
    assert four - 2 * V * D == 2 * (one - 2 * V * D) + 2 * layer


RANK = 8
LORA = {"rank": RANK, "targets": ["output"]}


def test_frozen_matrices_have_no_gradients_and_their_inputs_have_some():
    """Four of six operations, as in the traced step, where nothing needs the gradient of the first layer's input."""
    frozen, plain = (
        make("dense", 2, mesh={"tensor": 2}, kernels={"scan_unroll": 4}, **own) for own in ({"lora": LORA}, {})
    )
    tokens, layer, adapters, head = ROWS * LENGTH / 2, 4 * D * D + 3 * D * 256, 2 * D * RANK, D * V
    step, trained = time(frozen, FLOPS), time(plain, FLOPS)
    assert trained.matmuls == tokens * 4 * 6 * layer and step.matmuls == tokens * 4 * (4 * layer + 6 * adapters)
    assert step.head == tokens * 4 * head == trained.head * 4 / 6 and step.attention == trained.attention
    assert step.matmuls + step.head - tokens * 2 * (4 * D * D + D * RANK) == traced_products(frozen)
    # The forward pass has half of the matmuls' work, but for adapters, and a third of attention's.
    computed = step.matmuls + step.attention
    assert step.forward * computed == pytest.approx(tokens * 4 * 2 * (layer + adapters) + step.attention / 3)
    assert step.matrices * computed == pytest.approx(tokens * 4 * 2 * adapters)
    again = time(make("dense", 2, mesh={"tensor": 2}, remat={"policy": "full"}, lora=LORA), FLOPS).recomputed
    assert again.matmuls == pytest.approx(tokens * 4 * 2 * (layer + adapters - D * 256))  # the last one does not
    # Inputs and outputs of a linear layer are read or written four times in BF16 for its adapter.
    extra = time(frozen, BYTES).elementwise - time(plain, BYTES).elementwise
    assert extra == pytest.approx(tokens * 4 * 4 * 2 * 2 * D)


WIDER = {"num_layers": 3, "hidden_size": 128, "num_heads": 8, "ffn_hidden_size": 256, "vocab_size": V}
WITH_LORA = {"lora": LORA, "checkpoint": {"init_from": "elsewhere"}}
TEACHERS: dict[str, dict] = {
    "distillation": {"objective": {"kind": "distillation"}, "teacher": {"model": WIDER}},
    "the base": {"objective": {"kind": "dpo"}, "teacher": {"base": True}, **WITH_LORA},
}


@pytest.mark.parametrize(("case", "tensor"), [("distillation", 2), ("the base", 1)])
def test_matmuls_of_a_teacher_are_those_of_the_traced_step(case, tensor):
    """And those of the first pass over the head with which an objective of pairs begins."""
    import_extensions(["docs/examples/distillation.py", "docs/examples/dpo.py"])
    sections = TEACHERS[case] | {"model": {"num_layers": 1}, "batch": {"global_size": 2}}
    candidate = make("dense", tensor, mesh={"tensor": tensor}, **sections)
    found, step = traced_products(candidate), time(candidate, FLOPS)
    if "lora" in sections:  # nothing needs the gradients of what the first layer's adapter reads
        found += 2 * LENGTH * 2 * (4 * D * D + D * RANK)
    assert step.matmuls + step.head == pytest.approx(found)

    of_both = {"batch": {"num_microbatches": 4}, **TEACHERS[case]}
    whole, stages = (time(make("dense", size, mesh={"pipeline": size}, **of_both), FLOPS) for size in (1, 2))
    assert 2 * stages.matmuls == pytest.approx(whole.matmuls) and 2 * stages.head == pytest.approx(whole.head)
    assert 2 * stages.attention == pytest.approx(whole.attention)


def test_frozen_weights_are_gathered_and_neither_reduced_nor_updated():
    """Of an adapter of attention's output A is whole on all devices, B is stored in shards."""
    sections = {"mesh": {"fsdp": 2, "data": 2}, "lora": LORA, "batch": {"num_microbatches": 2}}
    step, matrices = time(make("dense", 4, **sections), BYTES), 4 * (4 * D * D + 3 * D * 256) + 2 * D * V
    whole, shards = 4 * D * RANK, 4 * RANK * D
    assert step.weights["fsdp"].sent == 2 * ((2 + 2) * (matrices + shards) + 4 * shards) / 2
    assert step.weights["data"].sent == (2 * (matrices + shards) + 4 * shards) / 2 / 2
    assert step.optimizer == 31.5 * (whole + shards / 4)
    assert step.conversions == (16 + 2 + 2 * 4) * (whole + shards)  # and one sum with another microbatch's gradient


MATRICES = ("matrix", "embedding")  # roles
HELD = [(name, mesh) for name, mesh in CASES if mesh != "tensor" or name in WHOLE]


@pytest.mark.parametrize(("name", "mesh"), HELD)
def test_devices_hold_each_matrix_once_with_its_moments(name, mesh):
    """Vectors are on all devices, those of layers on their stage."""
    candidate = on(name, mesh)
    sizes = {name: (math.prod(p.shape), p.role) for name, p in on(name, None).plan.declared.items()}
    on_stages = f"{BLOCKS}(?!mtp)" if candidate.plan.is_pipelined else "$"
    vectors = (n for key, (n, role) in sizes.items() if role not in MATRICES and not re.match(on_stages, key))
    expected = sum(n for n, _ in sizes.values()) + sum(vectors) + (WHOLE[name] if "tensor" in mesh else 0)
    assert 2 * candidate.storage.bytes == (4 + 8) * expected
    assert 2 * sum(candidate.storage.state.parameters.values()) == expected
    plan = candidate.plan
    weights = StepWeights(plan, Activations(plan).blocks, 2)
    layers = weights.layers(range(len(plan.layer_slots))) * plan.layer_table.shape[1]
    parts = [*weights.non_block_by_name.values(), weights.extra_layers, layers]
    assert 2 * sum(parts, Elements()).stored == expected


def linear(candidate: Candidate) -> dict[str, float]:
    """What a step has of each layer."""
    work_of, bytes_of, memory = time(candidate, FLOPS), time(candidate, BYTES), next(peaks(candidate.plan))
    times = {"matmuls": work_of.matmuls, "attention": work_of.attention, "elementwise": bytes_of.elementwise}
    sent = {axis: traffic.sent for axis, traffic in work_of.activations.items()}
    held = {"parameters": memory.parameters, "optimizer": memory.optimizer, "saved": memory.activations}
    return times | sent | held


KINDS = {
    "mixed": ({"moe_layer_interval": 1}, {"moe_layer_interval": 4, "first_dense_layers": 4}),
    "windows": ({"layer_pattern": ["local"]}, {"layer_pattern": ["global"]}),
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_two_kinds_have_the_mean_of_models_of_one(name):
    """No kind has the numbers of the other, which are computed once for each."""
    settings = {"mesh": {"tensor": 2}, "kernels": {"scan_unroll": 4}, "remat": {"policy": "selective"}}
    both, *each = (linear(make(name, 2, model=m, **settings)) for m in ({}, *KINDS[name]))
    assert {key: 2 * value for key, value in both.items()} == pytest.approx(
        {key: each[0][key] + each[1][key] for key in both}
    )
    assert each[0] != each[1]


@pytest.mark.parametrize(("name", "mesh"), [("dense", "tensor"), ("experts", "expert")])
def test_half_of_the_layers_in_fp8_have_half_of_the_difference(name, mesh):
    wide = {"experts": {"hidden_size": 128, "expert_ffn_hidden_size": 128}}
    none, half, every = (
        linear(
            make(name, 2, model=wide.get(name, {}), mesh={mesh: 2}, precision={"fp8": fp8}, kernels={"scan_unroll": 4})
        )
        for fp8 in ({}, {"recipe": "current", "first_bf16_layers": 2}, {"recipe": "current"})
    )
    assert {key: 2 * value for key, value in half.items()} == pytest.approx({k: none[k] + every[k] for k in half})
    assert every["matmuls"] < none["matmuls"]


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "data": 2}, {"tensor": 2, "context": 2}])
def test_twice_the_microbatches_are_twice_the_work_with_the_same_memory(mesh):
    name = "modules" if "fsdp" in mesh else "dense"
    one, two = (
        make(name, math.prod(mesh.values()), mesh=mesh, batch={"num_microbatches": n, "global_size": 4 * n})
        for n in (2, 4)
    )
    first, second = time(one, FLOPS), time(two, FLOPS)
    for part in ("matmuls", "attention", "head", "elementwise"):
        assert getattr(second, part) == pytest.approx(2 * getattr(first, part))
    assert second.optimizer == first.optimizer and two.memory == one.memory
    assert {k: t.sent for k, t in second.activations.items()} == {k: 2 * t.sent for k, t in first.activations.items()}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("gradients", "reduced"), [("float32", 4), ("bfloat16", 2)])
def test_traffic_of_weights_is_that_of_their_matrices(microbatches, gradients, reduced):
    """docs/parallelism.md: once a step over the other axes, then twice a microbatch over `fsdp`, in BF16."""
    sections = {"batch": {"num_microbatches": microbatches, "global_size": 16}, "precision": {"gradients": gradients}}
    declared = on("experts", None).plan.declared
    matrices = {n: math.prod(p.shape) for n, p in declared.items() if p.role in MATRICES}
    experts = sum(number for name, number in matrices.items() if "experts" in declared[name].axes)
    others = sum(matrices.values()) - experts
    sent = time(make("experts", 8, mesh={"fsdp": 2, "data": 2, "expert": 2}, **sections), FLOPS).weights
    assert sent["fsdp"].sent == microbatches * (2 + 2 + reduced) * (others + experts / 2) / 2
    # Of the shards of `fsdp` over four devices; experts, which `expert` divides, over two
    per_step = sent["data"].sent + sent["expert"].sent
    assert per_step == (2 + reduced) * (others / 2 * 3 / 4 + experts / 2 / 2 / 2)


@pytest.mark.parametrize("bf16_layers", [0, 1])
def test_matrices_of_layers_in_fp8_are_gathered_in_fp8(bf16_layers):
    """docs/precision.md; of four layers, whose norms are not gathered. Embedding and head are in BF16."""
    fp8 = {"recipe": "current", "first_bf16_layers": bf16_layers}
    sizes = {name: math.prod(p.shape) for name, p in on("dense", None).plan.declared.items() if p.role in MATRICES}
    layers = sum(number for name, number in sizes.items() if name.startswith(BLOCKS))
    for axis, bf16, saved in (("fsdp", 2 + 2 + 4, 2), ("data", 2 + 4, 1)):
        sent = time(make("dense", 2, mesh={axis: 2}, precision={"fp8": fp8}), FLOPS).weights[axis].sent
        expected = bf16 * sum(sizes.values()) - saved * layers * (4 - bf16_layers) / 4
        assert sent == pytest.approx(expected / 2, rel=2e-3)


def test_experts_batched_by_xla_multiply_an_eighth_more_rows():
    batched = time(make("mixed", kernels={"grouped_matmul": "xla"}), FLOPS)
    of_a_token = 2 * (
        2 * 3 * D * 64 + D * 8
    )  # two layers: matrices of two experts, and the router, which counts with them
    assert batched.matmuls - time(on("mixed", None), FLOPS).matmuls == pytest.approx(ROWS * LENGTH * 6 * of_a_token / 8)


@pytest.mark.parametrize(("kernel", "rows"), [("xla", 160), ("auto", 512)])
def test_tokens_that_are_gathered_leave_batched_experts_little_unused_room(kernel, rows):
    """For 64 tokens with two experts each, on 8 devices: a quarter more than an even share, else four times that."""
    plan = make("experts", 8, mesh={"expert": 8}, kernels={"grouped_matmul": kernel}).plan
    experts = expert_parallel(plan.collectives, plan.kernels.experts, lambda amax: amax)
    assert plan.collectives.dispatch.gathers_tokens and experts.rows(64, 2, 1, None) == rows


@pytest.mark.parametrize(
    ("device", "settings", "kernels"),
    [
        ("a100", {}, ("triton", "reference")),
        ("l40s", {"fp8": {"recipe": "current"}}, ("xla", "pallas")),
        ("h100", {"fp8": {"recipe": "current"}}, ("pallas", "pallas")),
        ("b200", {"fp8": {"recipe": "nvfp4"}}, ("xla", "cudnn")),
    ],
)
def test_kernels_are_those_of_the_planned_gpu(tmp_path, device, settings, kernels):
    model, batch = DENSE | EXPERTS, {"global_size": ROWS, "sequence_length": LENGTH}
    content = {"model": model, "batch": batch, "data": {"kind": "synthetic"}, "precision": settings}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    found = explained(tmp_path / "config.yaml", [], 1, rates_of(device)).plan.kernels
    assert (found.grouped_matmul, found.fp8) == kernels


def test_a_step_in_fp32_has_its_rate_and_scores_in_memory():
    """FP32 at half of BF16's rate. Its attention computes all pairs of tokens, twice as many as causal attention."""
    in_fp32, rates = {"precision": {"compute": "float32"}}, replace(FLOPS, fp32_flops=0.5)
    half, full = (time(make("windows", **more), rates) for more in ({}, in_fp32))
    assert (full.matmuls, full.head) == pytest.approx((2 * half.matmuls, 2 * half.head))
    assert 4 * time(make("dense"), rates).attention == pytest.approx(full.attention)  # also where windows are local
    reference = make("dense", kernels={"attention": "reference"})
    assert time(reference, rates).attention == pytest.approx(full.attention)  # TF32 has half of BF16's rate too
    half, full = (time(make("dense", **more), replace(BYTES, fp32_flops=1e60)) for more in ({}, in_fp32))
    assert full.attention == pytest.approx(15 * 4 * 4 * 4 * ROWS * LENGTH**2)  # passes, bytes, heads, layers
    assert (full.head, full.elementwise) == pytest.approx((2 * half.head, 2 * half.elementwise))
    tensor = time(make("dense", 2, mesh={"tensor": 2}, **in_fp32), H200).activations["tensor"]
    assert tensor.seconds > 0 == tensor.exposed  # matmuls take 15 times as long


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_matmuls_of_an_optimizer_have_the_rate_of_their_dtype(compute):
    """Each of four layers has four matrices of 64 × 64 and three of 64 × 256; each side of SOAP's has 8 n R C."""
    precision, rates = {"compute": compute}, replace(FLOPS, fp32_flops=0.5)
    soap = time(make("dense", optimizer={"kind": "soap"}, precision=precision), rates).optimizer
    always = 8 * 4 * (4 * 2 * 64**3 + 3 * (64 + 256) * 64 * 256)
    refreshes = (2 + 8 / 3) * 4 * (11 * 64**3 + 3 * 256**3) / 10
    assert soap == pytest.approx(2 * (always + refreshes))
    muon = make("dense", optimizer={"kind": "muon"}, precision=precision)
    operations = sum(muon.storage.state.matrices.values())
    assert time(muon, rates).optimizer == pytest.approx((2 if compute == "float32" else 1) * operations) != 0


@pytest.mark.parametrize("devices", [2, 4])
def test_rows_of_experts_are_those_of_the_documented_formula(devices):
    """docs/experts.md, rows of D numbers in BF16: four and a half times in each of four layers."""
    for dispatch, sent in (("all_to_all", 1.25 * 2 * (devices - 1) / devices), ("all_gather", devices - 1)):
        candidate = make("experts", devices, mesh={"expert": devices}, communication={"experts": dispatch})
        bytes_of_tokens = ROWS * LENGTH / devices * D * 2
        assert time(candidate, FLOPS).activations["expert"].sent == pytest.approx(4 * 4.5 * sent * bytes_of_tokens)


def test_experts_with_a_capacity_save_that_many_rows():
    def saved(factor, replicas=1):
        plan = make("experts", replicas, mesh={"data": replicas}, model={"router": {"capacity_factor": factor}}).plan
        return Activations(plan).saved(plan.layer_slots[0].block, plan.segments[0], False)

    half, quarter = saved(1.0) - saved(0.5), saved(0.5) - saved(0.25)
    of_a_row = 2 * (D + 2 * 64)  # the token, and the gate and the up side of an expert
    assert half == pytest.approx(2 * quarter) and half >= ROWS * LENGTH * of_a_row  # of two rows of each token one
    # The capacity is that of the tokens of both replicas: an expert may get all its rows from one of them.
    assert saved(0.25, 2) < saved(0.5, 2) == saved(1.0, 2)


def test_gradients_of_a_second_round_are_those_of_experts_alone():
    """Both devices may send all rows to one, which has room for them with all_gather only."""

    def working(block, dispatch):
        mesh, communication = {"expert": 2}, {"experts": dispatch}
        plan = make("experts", 2, mesh=mesh, communication=communication, model={"first_dense_layers": 1}).plan
        return Activations(plan).working(block, plan.segments[0].policy, weight_gradients=10**9)

    assert working("dense", "all_to_all") == working("dense", "all_gather")
    assert working("moe", "all_to_all") > working("moe", "all_gather")


@pytest.mark.parametrize("name", ["experts", "latent"])
def test_policies_save_at_most_what_none_saves_and_compute_the_rest_again(name):
    # Whether attention, and elementwise work with matmuls or without, run again
    again = {"none": (0, 0, False), "full": (1, 1, True), "selective": (1, 0, False)}
    again |= {"save_matmuls": (0, 1, False), "offload": (0, 1, False)}
    saved = {}
    for policy, (attention, elementwise, matmuls) in again.items():
        candidate = make(name, remat={"policy": policy}, kernels={"scan_unroll": 4})
        numbers, segment = Activations(candidate.plan), candidate.plan.segments[0]
        block = candidate.plan.layer_slots[0].block
        saved[policy] = numbers.saved(block, segment, False)
        assert saved[policy] + numbers.recomputed(block, segment, False) >= saved["none"] >= saved[policy] > 0
        step, moved = time(candidate, FLOPS), time(candidate, BYTES)
        assert step.recomputed.attention == pytest.approx(attention * step.attention / 3)
        assert moved.recomputed.elementwise == pytest.approx(elementwise * moved.elementwise / 3)
        assert 0 <= step.recomputed.matmuls < step.matmuls / 3 and (step.recomputed.matmuls > 0) == matmuls
        assert all(min(vars(peak).values()) >= 0 for peak in peaks(candidate.plan))


def test_the_backward_pass_frees_activations_and_adds_gradients_from_the_last_layer_on():
    """Two dense layers one after the other, then a loop over four with experts."""
    model = {"num_layers": 6, "first_dense_layers": 2}
    _, head, *backward, end = peaks(make("experts", model=model, kernels={"scan_unroll": 2}).plan)
    saved, gradients = ([getattr(peak, part) for peak in backward] for part in ("activations", "gradients"))
    assert saved == sorted(saved, reverse=True) and gradients == sorted(gradients)
    assert saved[0] > head.activations / 2 > saved[1] > saved[2] > 0 and head.gradients < end.gradients


def test_operands_of_deferred_gradients_take_half_where_they_are_saved_in_fp8():
    recipes = {}, {"recipe": "current"}, {"recipe": "mxfp8", "backend": "emulated"}
    whole, half, emulated = (
        Activations(make("dense", precision={"fp8": fp8}).plan).deferred("dense") for fp8 in recipes
    )
    assert whole == 2 * half == emulated


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_plan_defers_weight_gradients_where_its_schedule_does(kind, stages):
    sections = {"mesh": {"pipeline": stages}, "batch": {"num_microbatches": 4}, "pipeline": {"schedule": kind}}
    plan = make("dense", stages, **sections).plan
    assert plan.collectives.defers == any(tick.split for tick in schedule_of(plan).flags)


def test_a_stored_state_is_that_of_its_config_and_not_of_an_earlier_one():
    import_extensions(["docs/examples/distillation.py"])
    teacher = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": V}
    found = set()
    for sections in (
        {},
        {"optimizer": {"state": "int8"}},
        {"model": {"tie_embeddings": True}},
        *(
            {"objective": {"kind": "distillation", "settings": {}}, "teacher": {"model": teacher | {"num_layers": L}}}
            for L in (1, 2)
        ),
        *({"mesh": {"pipeline": 2}, "pipeline": {"layout": layout}} for layout in ([2, 2], [1, 3])),
    ):
        candidate = make("experts", 2, **({"mesh": {"fsdp": 2}, "batch": {"num_microbatches": 2}} | sections))
        slots = OptimizerSlots.of(candidate.plan, candidate.plan.trained, candidate.plan.placements)
        assert candidate.storage.bytes == sum(state_bytes(candidate.plan, slots)[:2])
        found.add(candidate.storage.bytes)
    assert len(found) == 7
