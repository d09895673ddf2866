"""Terms of the memory estimate that few configs have, each worked out by hand."""

import pytest

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.estimate.activations import Activations
from megajax.estimate.memory import estimate_memory, peaks
from megajax.step_plan import StepPlan
from megajax.tools.plan.candidates import Candidate

ROWS, LENGTH, D, V = 4, 32, 64, 512
STREAM = 2 * ROWS * LENGTH * D  # bytes in BF16
MATRICES, NORMS = 4 * D * D + 3 * D * D, 2 * D  # of a layer


def plan_of(gpus: int = 1, **sections: dict) -> StepPlan:
    model = {"num_layers": 4, "hidden_size": D, "num_heads": 4, "ffn_hidden_size": D, "vocab_size": V}
    batch = {"global_size": ROWS, "sequence_length": LENGTH} | sections.pop("batch", {})
    sections |= {"model": model | sections.pop("model", {}), "batch": batch, "data": {"kind": "synthetic"}}
    config = Config.model_validate(sections)
    return Candidate.of(config, check_mesh(config, gpus)).plan


@pytest.mark.parametrize("axis", ["data", "fsdp", "expert", "context", "tensor"])
def test_weight_gradients_are_tied_to_their_layer_where_its_backward_pass_hides_their_reduction(axis):
    """With sums over microbatches those of `data` and `context` are reduced after the last one."""
    model = {"num_experts": 4} if axis == "expert" else {}
    plan = plan_of(2, model=model, mesh={axis: 2}, batch={"num_microbatches": 2})
    assert plan.ends_reductions_per_layer(complete=True)
    assert plan.ends_reductions_per_layer(complete=False) == (axis in ("fsdp", "expert", "tensor"))
    assert not plan_of(batch={"num_microbatches": 2}).ends_reductions_per_layer(complete=True)


def test_two_microbatches_side_by_side_need_the_memory_of_one_of_their_size():
    batch, communication = {"num_microbatches": 2}, {"experts": "all_to_all", "overlap_experts": True}
    plan = plan_of(2, model={"num_experts": 4}, mesh={"expert": 2}, batch=batch, communication=communication)
    for each, at_once, count, rows in ((plan, 2, 2, 2), (plan.with_large_microbatches, 1, 1, 4)):
        assert (each.microbatches_at_once, each.num_microbatches, each.batch_shape[1]) == (at_once, count, rows)


def test_a_single_microbatch_has_no_sums_whatever_their_dtype():
    in_bf16 = plan_of(precision={"accumulation": "bfloat16"})
    assert estimate_memory(in_bf16) == estimate_memory(plan_of())
    assert [peak.gradients for peak in peaks(in_bf16)] == [peak.gradients for peak in peaks(plan_of())]


def test_the_sum_of_a_table_that_is_looked_up_in_its_shards_is_a_shard():
    plan = plan_of(2, mesh={"fsdp": 2}, batch={"num_microbatches": 2})
    assert plan.embedding_axes == ("fsdp",)
    expected = 4 * (4 * (MATRICES // 2 + NORMS) + D + V * D + V * D // 2)  # layers, the last norm, the head whole
    assert {peak.gradients for peak in peaks(plan)} == {expected}


def test_each_prediction_module_keeps_its_input_and_its_output():
    kept = []
    for count in (1, 2):
        head, modules, *_ = peaks(plan_of(model={"mtp_layers": count}, remat={"policy": "full"}))
        kept.append(modules.activations - head.activations)
    assert kept[1] - kept[0] == 2 * STREAM


@pytest.mark.parametrize("policy", ["none", "save_matmuls"])
def test_of_the_encoders_rows_a_decoder_layer_keeps_its_keys_and_values_alone(policy):
    """The rows themselves are there once for all layers."""

    def kept(length: int) -> int:
        encoder = {"kind": "layers", "num_layers": 1, "sequence_length": length}
        plan = plan_of(model={"encoder": encoder}, remat={"policy": policy})
        return Activations(plan).saved(plan.layer_slots[0].block, plan.segments[0], False)

    assert kept(48) - kept(16) == 2 * ROWS * 32 * 2 * D


@pytest.mark.parametrize("axis", ["pipeline", "data", "context", "fsdp"])
def test_a_teachers_layers_are_gathered_once_a_step_but_over_fsdp_one_by_one(axis):
    import_extensions(["docs/examples/distillation.py"])
    matrices, norms = 4 * 32 * 32 + 3 * 32 * 128, 2 * 32

    def weights(layers: int) -> int:
        teacher = {"model": {"num_layers": layers, "hidden_size": 32, "num_heads": 2, "vocab_size": V}}
        batch, objective = {"num_microbatches": 4 if axis == "pipeline" else 1}, {"kind": "distillation"}
        return next(peaks(plan_of(2, mesh={axis: 2}, batch=batch, objective=objective, teacher=teacher))).weights

    assert weights(3) - weights(2) == (0 if axis == "fsdp" else 2 * (matrices + norms))
