"""The memory estimate: against a calculation by hand for a small model, and against XLA's figures."""

import memory_table
import pytest
from memory_table import GIB, Row

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.estimate.activations import Activations
from megajax.estimate.memory import estimate_memory, peaks, second_activations
from megajax.estimate.weight_elements import StepWeights
from megajax.options.context import ALL_GATHER, RING
from megajax.step.pipeline.schedules import assign_buffer_slots, make_schedule
from megajax.step_plan import StepPlan
from megajax.tools.plan.candidates import Candidate

# Nine layers of one shape on two devices: D = 64, 4 heads of 16, 2 KV heads, F = 256, V = 4096; 2 sequences of 128.
SMALL = (
    "model={num_layers: 9, hidden_size: 64, num_heads: 4, num_kv_heads: 2, head_dim: 16, ffn_hidden_size: 256}",
    "model={vocab_size: 4096, vocab_multiple: 1}",
    "mesh.fsdp=2",
    "batch={global_size: 2, num_microbatches: 1, sequence_length: 128}",
    "kernels.loss_chunk_tokens=64",
)
T, D, F, V = 128, 64, 256, 4096  # tokens of a device
QKV, ATTENTION = 64 * 16 * (4 + 2 * 2), 64 * 64
LAYER = QKV + ATTENTION + 3 * D * F
NORMS = 2 * D  # of a layer, on every device
LSE = 2 * 4  # attention's log-sum-exps of 4 heads, in FP32


def small(*overrides: str, gpus: int = 2):
    return memory_table.estimate(Row(0, "configs/llama3_8b.yaml", (*SMALL, *overrides), gpus))


def test_a_step_needs_most_in_the_head_when_all_layers_have_saved_what_they_computed():
    memory = small()
    stored = 9 * (LAYER // 2 + NORMS) + 2 * V * D // 2 + D
    assert (memory.parameters, memory.optimizer) == (4 * stored, 8 * stored)
    # Queries, keys, values and their output, the products of the MLP, results and inputs of the norms
    saved = 16 * (2 * 4 + 2 * 2) + LSE + 2 * F + 2 * D + 2 * D
    assert memory.activations == 2 * T * 9 * saved
    # All layers' shards, the head whole, and the last layer, which goes backward next
    assert memory.weights == 2 * (9 * (LAYER // 2 + NORMS) + V * D + D + LAYER)
    assert memory.gradients == 4 * (V * D + D)
    # One of two chunks: logits and their gradient, four arrays of its rows, and the gradient of all rows
    assert memory.working == 2 * (T // 2 * (2 * V + 4 * D) + T * D)


def test_with_recomputation_it_needs_most_in_the_backward_pass_of_the_first_layer():
    full = ("remat.policy=full", "model={num_layers: 100, vocab_size: 512}", "kernels.scan_unroll=100")
    memory = small(*full)
    stored, V = LAYER // 2 + NORMS, 512
    saved = 16 * (2 * 4 + 2 * 2) + LSE + 2 * F + 2 * D + 2 * D
    # The first layer's input, and what it recomputes
    assert memory.activations == 2 * T * (D + saved)
    assert memory.weights == 2 * (stored + LAYER)
    # The head's is reduced at the end, the embedding's is made later
    assert memory.gradients == 4 * (99 * stored + V * D + D)
    # Gradients: of the residual stream, of the products and the activation, and the activation; those of the second
    # layer, which are not reduced yet
    assert memory.working == 2 * T * (2 * D + 4 * F) + 2 * LAYER
    # A head of one chunk waits with the logits' gradient and its rows
    assert small(*full, "kernels.loss_chunk_tokens=128").working - memory.working == 2 * T * (V + D)


def test_the_deterministic_gradients_of_cudnn_hold_16_bits_for_each_pair_of_a_devices_heads_and_tokens():
    long = ("model={num_layers: 1, vocab_size: 512}", "batch.sequence_length=4096")
    by_cudnn = (*long, "run.deterministic=true", "kernels.attention=cudnn")
    assert small(*by_cudnn).working == 2 * 4 * 4096**2
    assert small(*by_cudnn, "mesh.fsdp=1", "mesh.tensor=2").working == 2 * 2 * 2 * 4096**2  # two sequences, two heads
    other_kernel = small(*long, "run.deterministic=true")
    assert other_kernel == small(*long) and other_kernel.working < 2 * 4096**2


def test_weights_that_are_stored_in_the_compute_dtype_are_not_cast_and_a_pass_fuses_those_of_its_layer():
    few = ("remat.policy=full", "model={num_layers: 100, vocab_size: 512}", "kernels.scan_unroll=100")
    memory = small(*few, "optimizer.master=split")
    # The layer that goes backward, with its norms, which are not gathered; there is no cast shard
    assert memory.weights == 2 * (LAYER + NORMS)


def test_a_group_keeps_one_input_and_its_layers_are_recomputed_together():
    settings = ("remat={policy: full, group: 4}", "model={num_layers: 100, vocab_size: 512}", "kernels.scan_unroll=100")
    saved = 16 * (2 * 4 + 2 * 2) + LSE + 2 * F + 2 * D + 2 * D
    assert small(*settings).activations == 2 * T * (D + 4 * saved)


def test_with_few_tokens_it_needs_most_at_the_end_when_the_embedding_gets_its_gradient():
    few = ("remat.policy=full", "model={num_layers: 100}", "batch.sequence_length=8", "kernels.loss_chunk_tokens=4")
    memory = small(*few, "kernels.scan_unroll=100")
    assert (memory.weights, memory.activations) == (0, 0)
    assert memory.gradients == 4 * (100 * (LAYER // 2 + NORMS) + 2 * V * D // 2 + D)
    # The embedding's zeros, and the first layer, which is reduced
    assert memory.working == 4 * (V * D // 2 + LAYER)


def test_an_update_has_the_moments_of_the_largest_parameter_that_come_from_the_host_and_go_back():
    few = ("remat.policy=full", "batch.sequence_length=8", "kernels.loss_chunk_tokens=4", "optimizer.offload=1")
    assert small(*few).working == 2 * 8 * V * D // 2  # the embedding's shard, two FP32 moments
    # From files a small parameter comes meanwhile: the keys of 2 heads of all layers
    assert small(*few, "optimizer.offload_dir=/disk").working == 2 * 8 * (V * D + 9 * D * 32) // 2


def test_a_head_of_one_chunk_gets_its_gradient_last_beside_the_first_layers():
    four = ("mesh.fsdp=4", "batch={global_size: 4, sequence_length: 8}", "model={vocab_size: 65536}")
    memory = small(*four, "remat.policy=full", gpus=4)
    stored, V = LAYER // 4 + NORMS, 65536
    assert memory.gradients == 4 * (9 * stored + V * D + D)
    assert memory.weights == 2 * (stored + LAYER)
    assert memory.working == 4 * LAYER


def test_loops_stack_gradients_before_they_run_and_copy_the_activations_that_they_read():
    memory = small("model={vocab_size: 512}", "kernels.scan_unroll=1")
    saved = 16 * (2 * 4 + 2 * 2) + LSE + 2 * F + 2 * D
    assert memory.activations == 2 * T * (9 * saved + 2 * D)  # results of norms are recomputed
    # The head's, and those of all loops but the last, which has the first two layers
    assert memory.gradients == 4 * (7 * (LAYER // 2 + NORMS) + 512 * D + D)
    assert memory.weights == 2 * (LAYER + NORMS)
    assert memory.working == 2 * T * (2 * D + 4 * F) + 2 * T * saved
    # Gradients that no axis reduces are stacked in the compute dtype; norms' are FP32
    whole = small("mesh.fsdp=1", "model={vocab_size: 512}", "kernels.scan_unroll=1", gpus=1)
    assert whole.gradients == 7 * (2 * LAYER + 4 * NORMS) + 4 * (512 * D + D)


def test_a_loop_over_recomputed_layers_needs_most_before_its_backward_pass_frees_what_all_loops_saved():
    memory = small("remat.policy=full", "model={num_layers: 100, vocab_size: 512}", "kernels.scan_unroll=1")
    saved = 16 * (2 * 4 + 2 * 2) + LSE + 2 * F + 2 * D + 2 * D
    assert memory.activations == 2 * T * (100 * D + saved)  # all layers' inputs, and what one recomputes


def test_weight_gradients_that_are_added_to_sums_keep_the_operands_of_all_layers_unless_moments_are_small():
    two = ("mesh.fsdp=1", "batch={global_size: 2, num_microbatches: 2, sequence_length: 512}")
    two += ("model={vocab_size: 512}", "remat.policy=full", "kernels.scan_unroll=9")
    memory, offloaded, in_int8 = (
        small(*two, *chosen, gpus=1) for chosen in ((), ("optimizer.offload=1",), ("optimizer.state=int8",))
    )
    # Of eight layers the inputs and the output gradients of the matmuls
    inputs, outputs = 2 * D + 64 + F, 16 * (4 + 2 * 2) + 2 * F + 2 * D
    in_layer = 2 * 512 * (2 * D + 4 * F)
    assert memory.working == in_layer + 8 * 2 * 512 * (inputs + outputs)
    assert memory.gradients == 4 * (9 * (LAYER + NORMS) + 2 * 512 * D + D)
    assert in_layer < offloaded.working == in_int8.working < 2 * in_layer
    assert offloaded.optimizer == 8 * (9 * NORMS + D)  # vectors stay on the device


@pytest.mark.parametrize(("length", "waits"), [(2**23, True), (2**24, False)])
def test_the_last_layers_weight_gradients_wait_if_their_operands_fit_into_the_schedulers_memory(length, waits):
    """Of its MLP: the inputs of the matmuls, and their output gradients. Of two layers at 103 and 206 GB."""
    two = ("mesh.fsdp=1", "model={num_layers: 2, vocab_size: 512}", "remat.policy=full", "kernels.scan_unroll=2")
    memory = small(*two, f"batch.sequence_length={length}", gpus=1)
    operands = (D + F) + (2 * F + D)
    assert memory.working == 2 * (2 * length) * (2 * D + 4 * F + waits * operands)


def test_kept_matmuls_do_not_include_the_output_of_a_layer_which_is_the_next_ones_input():
    qkv_and_output, products, streams = 16 * (2 * 4 + 2 * 2) + LSE, 2 * F, 2 * D  # the layer's input, attention's term
    memory = small("remat.policy=save_matmuls", "mesh.fsdp=1", gpus=1)
    assert memory.activations == 2 * (2 * T) * 9 * (qkv_and_output + products + streams)


EXPERTS = "model={num_experts: 8, experts_per_token: 2, expert_ffn_hidden_size: 64, vocab_size: 512}"


def test_loops_cast_the_experts_of_their_layer_only_and_once_a_step_what_other_devices_store():
    of_experts, shared = 3 * 8 * D * 64 // 2, QKV + ATTENTION + 8 * D  # of a device, of both devices
    memory = small("mesh.fsdp=1", "mesh.expert=2", EXPERTS, "kernels.scan_unroll=1", "remat.policy=full")
    cast = 9 * shared + of_experts
    assert 2 * cast < memory.weights < 2 * (cast + 9 * of_experts // 2)


@pytest.mark.parametrize(("tensor", "over"), [(1, "[expert]"), (2, "[expert]"), (2, "[expert,tensor]")])
def test_devices_of_tensor_share_the_width_of_the_experts_that_each_group_has_or_their_rows(tensor, over):
    """Of each row the products of gate and up-projection are kept; for each token 2 rows and a quarter more."""
    sizes = ("mesh.fsdp=1", "mesh.expert=2", f"mesh.tensor={tensor}", "communication.experts=all_to_all")
    sizes += (f"mesh.experts_over={over}",)
    narrow, wide = (small(*sizes, EXPERTS.replace("size: 64", f"size: {n}"), gpus=2 * tensor) for n in (64, 128))
    assert wide.activations - narrow.activations == 2 * T * 9 * 1.25 * 2 * 2 * 64 // tensor


def test_tensor_need_not_divide_a_sequence():
    """Only a microbatch's tokens, here 2 x 127."""
    found = [
        small("mesh={fsdp: 1, tensor: 2}", f"batch.sequence_length={length}").activations for length in (126, 127, 128)
    ]
    assert found[1] == (found[0] + found[2]) / 2 > 0


def test_a_later_round_of_experts_rows_has_gradients_of_weights_that_are_added_to_the_first_rounds():
    wide, few = EXPERTS.replace("size: 64", "size: 1024"), ("batch.sequence_length=8", "kernels.loss_chunk_tokens=4")
    two = ("mesh.fsdp=1", "mesh.expert=2", "communication.experts=all_to_all", "kernels.scan_unroll=1")
    memory = small(*two, *few, wide, "remat.policy=full")
    layer = QKV + ATTENTION + NORMS + 8 * D + 3 * 4 * D * 1024  # with the router and half of the experts
    # Gradients of the output and of the residual stream, a copy of the layer's input, and gradients of weights twice
    assert memory.working == 2 * 8 * (2 * D + D) + 2 * 2 * layer


def test_where_all_is_recomputed_the_rows_of_the_next_layers_experts_are_exchanged_early():
    two = ("mesh.fsdp=1", "mesh.expert=2", "communication.experts=all_to_all", "kernels.scan_unroll=9")
    memory = small(*two, EXPERTS, "remat.policy=full")
    rows = 1.25 * 2  # for each token, with room for a quarter more
    layer = QKV + ATTENTION + NORMS + 8 * D + 3 * 4 * D * 64  # with the router and half of the experts
    live = 2 * D + 4 * rows * D  # gradients of the output and of the residual stream; two layers' rows, their gradients
    assert memory.working == 2 * T * (live + 8 + 2 * rows * 64) + 2 * layer  # and those of products, and of weights
    # With more tokens the activation and its gradient are more than those; only `full` exchanges rows early
    more = ("batch.sequence_length=512", EXPERTS.replace("vocab_size: 512", "vocab_size: 64"))
    for policy, early in (("full", 3 * rows * D), ("selective", 0)):
        live = 2 * D + early + rows * D + 8 + 2 * rows * 64 + 2 * rows * 64
        assert small(*two, *more, f"remat.policy={policy}").working == 2 * 512 * live


def test_frozen_experts_keep_no_rows_for_gradients_of_weights():
    adapters = ("lora.rank=4", "checkpoint.init_from=elsewhere")
    trained, frozen = (
        small("mesh.fsdp=1", EXPERTS, "model={vocab_size: 16384}", *more, gpus=1) for more in ((), adapters)
    )
    rows, norms = 2 * D, 2 * D
    adapted = D  # input of the adapters of queries, keys and values; that of attention's output is kept anyway
    inner = 4 * 4  # outputs of the first matrices: of queries, keys, values and attention's output
    assert trained.activations - frozen.activations == 2 * (2 * T) * 9 * (rows + norms - adapted - inner)


def test_attention_without_a_kernel_saves_its_scores_in_fp32():
    kernel, none = small(), small("kernels.attention=reference")
    assert none.activations - kernel.activations == 9 * 2 * 4 * (4 * T * T)  # before and after the softmax, 4 heads
    kernel, none = (small("remat.policy=selective", f"kernels.attention={name}") for name in ("auto", "reference"))
    assert none.activations == kernel.activations  # they are computed again


LOOP = "kernels.scan_unroll=1"


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], True),
        (["mesh={fsdp: 1, tensor: 2}"], True),  # which share the tokens of both sequences
        ([LOOP], False),  # its residuals do not include what norms compute, unless that is expensive
        ([LOOP, "mesh={fsdp: 1, tensor: 2}"], True),
        ([LOOP, "precision.fp8.recipe=current"], True),
    ],
)
def test_layer_norms_keep_their_inputs_minus_the_means_in_fp32(overrides, kept):
    rms, layer = (small(f"model.norm={norm}norm", *overrides) for norm in ("rms", "layer"))
    assert layer.activations - rms.activations == kept * 9 * 2 * 4 * T * D


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("ring", 4 / 2 * 64 + 2 * 32),  # half of the queries for each of four steps, the first keys that arrive
        ("all_gather", 2 * 4 * 2 * 32 + 64),  # all keys and values for each of two chunks, the output once more
        ("all_to_all", 64),  # the output before and after it is exchanged
        ("all_to_all+ring", 2 / 2 * 64 + 2 * 32 + 64),  # two key-value heads, so rings of two devices
    ],
)
def test_attention_over_context_keeps_what_both_passes_use(strategy, more):
    divided = ("mesh.fsdp=1", "mesh.context=4", f"communication.context={strategy}")
    saved = 16 * (2 * 4 + 2 * 2) + LSE + 2 * F + 2 * D + 2 * D
    assert small(*divided, gpus=4).activations == 2 * (2 * 128 // 4) * 9 * (saved + more)
    again = small(*divided, "remat.policy=selective", gpus=4)  # keeps nothing of attention, of half of the tokens
    assert again.activations == small("remat.policy=selective").activations / 2


def test_devices_of_tensor_share_what_attention_over_context_keeps():
    none = small("mesh={fsdp: 1, tensor: 2}")
    ring = small("mesh={fsdp: 1, tensor: 2, context: 2}", "communication.context=ring", gpus=4)
    assert ring.activations - none.activations / 2 == 2 * (2 * 128 // 2) * 9 * (2 / 2 * 64 + 2 * 32) / 2


def test_the_host_keeps_what_layers_name_and_a_device_their_inputs():
    assert small("remat.policy=offload").activations == 2 * T * 9 * D


def test_a_tower_keeps_what_its_layers_save_and_its_output_before_and_after_its_norm():
    tower = "model.vision={{image_token: 9, hidden_size: 64, num_heads: 4, ffn_hidden_size: 256, num_layers: {layers},"
    tower += " patch_size: 2, grid: 4, projector: average, patches_per_row: 192}}"
    none, one, two = small(), *(small(tower.format(layers=layers)) for layers in (1, 2))
    layer = two.activations - one.activations
    assert layer > 0 and one.activations - none.activations == layer + 2 * (2 * 192 * 64)


def plan_of(gpus: int = 1, **sections: dict) -> StepPlan:
    """Of a small model on GPUs: 4 sequences of 32 tokens, D = 64."""
    model = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 64, "vocab_size": 512}
    batch = {"global_size": 4, "sequence_length": 32} | sections.pop("batch", {})
    sections |= {"model": model | sections.pop("model", {}), "batch": batch, "data": {"kind": "synthetic"}}
    config = Config.model_validate(sections)
    return Candidate.of(config, check_mesh(config, gpus)).plan


def test_a_stages_first_and_last_layers_are_whole_after_the_gather_of_a_step():
    plan = plan_of(4, model={"num_layers": 8}, mesh={"pipeline": 2, "fsdp": 2}, batch={"num_microbatches": 2})
    layers = StepWeights(plan, Activations(plan).blocks, 2).layers(range(4))
    matrices, norms = 64 * 16 * 12 + 64 * 64 + 3 * 64 * 64, 2 * 64
    assert layers.per_step == (2 + 2 / 2) * matrices + 4 * norms and layers.whole == 4 * (matrices + norms)
    assert layers.gathered_bytes == 2 * 2 * matrices


def test_layers_in_bf16_beside_those_in_fp8_have_weights_of_their_own_format():
    recipe = {"recipe": "delayed"}
    some, none, whole = (plan_of(precision={"fp8": fp8}) for fp8 in (recipe | {"first_bf16_layers": 1}, {}, recipe))
    first, rest = (StepWeights(plan, Activations(plan).blocks, 2).layers([3]) for plan in (none, whole))
    assert first != rest
    weights = StepWeights(some, Activations(some).blocks, 2)
    assert [weights.slot(slot) for slot in range(4)] == [first, rest, rest, rest]
    assert weights.layers(range(4)) == first + rest * 3


def test_a_pipeline_keeps_the_carry_of_a_tick_and_several_pending_gradients_of_the_head():
    """Of two stages with two layers each: gpipe has a slot for each microbatch and one more, 1f1b two.

    Of 1f1b with one operation a tick.
    """
    layer, stream = 2 * 32 * (16 * 16 + LSE + 2 * 64 + 2 * 64), 2 * 32 * 64
    for microbatches in (4, 12):
        gpipe = (microbatches + 1) * 2 * layer + layer + (microbatches + 2) * stream
        for schedule, expected in (("gpipe", gpipe), ("1f1b", 2 * 2 * layer + 2 * stream)):
            batch = {"num_microbatches": microbatches, "global_size": microbatches}
            sections = {"mesh": {"pipeline": 2}, "batch": batch, "pipeline": {"schedule": schedule}}
            assert next(peaks(plan_of(2, **sections))).activations == expected  # in the head


def test_stages_share_the_values_of_prediction_modules():
    more = []
    for gpus in (1, 2):
        sections = {"mesh": {"pipeline": gpus}, "batch": {"num_microbatches": 4}, "model": {"mtp_layers": 2}}
        head, modules, *_ = peaks(plan_of(gpus, **sections, kernels={"scan_unroll": 4 // gpus}))
        more.append(modules.activations - head.activations)
    assert more[0] == 2 * more[1] > 0


def test_sums_over_microbatches_exist_for_the_whole_step_and_no_peak_is_after_the_first_layers():
    plan = plan_of(model={"mtp_layers": 1}, batch={"num_microbatches": 2}, kernels={"scan_unroll": 4})
    head, module, *layers, end = peaks(plan)
    assert {each.gradients for each in (head, module, *layers, end)} == {head.parameters}  # both in FP32
    assert len(layers) == 4 and (end.weights, end.working) == (0, 0)


def test_virtual_stages_divide_a_stages_weights_and_gradients():
    found = []
    for virtual_stages in (1, 2):
        pipeline = {"virtual_stages": virtual_stages, "schedule": "gpipe"}
        sections = {"mesh": {"pipeline": 2, "fsdp": 2}, "batch": {"num_microbatches": 2}, "pipeline": pipeline}
        head = next(peaks(plan_of(4, **sections)))
        found.append((head.parameters, head.optimizer, head.gradients, head.weights))
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [1, 2])
def test_prediction_modules_keep_their_shards_and_the_last_one_is_whole(count):
    plan = plan_of(2, model={"mtp_layers": count}, mesh={"fsdp": 2}, kernels={"scan_unroll": 4})
    head, modules, *_ = peaks(plan)
    matrices, norms = 64 * 16 * 12 + 64 * 64 + 3 * 64 * 64 + 2 * 64 * 64, 5 * 64
    assert modules.weights - head.weights == 2 * count * (matrices // 2 + norms) + 2 * matrices
    assert modules.gradients - head.gradients == 4 * count * (matrices // 2 + norms)


@pytest.mark.parametrize("gpus", [1, 2])
def test_an_objective_without_logits_has_all_rows_of_a_microbatch_at_once(gpus):
    """In BF16 before and after the norm and their gradient, in FP32 two arrays more."""
    import_extensions(["docs/examples/value_head.py"])
    objective = {"kind": "value_head", "settings": {"outputs": 1}}
    head = next(peaks(plan_of(gpus, mesh={"tensor": gpus}, objective=objective)))
    assert head.working == 4 * 32 * 64 // gpus * (3 * 2 + 2 * 4)


def test_each_prediction_module_has_weights_of_its_own():
    plan = plan_of(model={"mtp_layers": 2})
    matrices, norms = 64 * 16 * 12 + 64 * 64 + 3 * 64 * 64 + 2 * 64 * 64, 5 * 64  # with both of the join and its own
    modules = StepWeights(plan, Activations(plan).blocks, 2).extra_layers
    assert (modules.stored, modules.whole) == (2 * (matrices + norms),) * 2


@pytest.mark.parametrize(("tied", "zeros"), [(True, 256 * 64), (False, 0)])
def test_the_gradient_of_a_whole_table_is_added_to_zeros_as_large_as_the_stored_one(tied, zeros):
    """Both devices store 256 of 512 rows; one that is not tied has no whole gradient. Several microbatches."""
    plan = plan_of(2, model={"tie_embeddings": tied}, batch={"num_microbatches": 2}, mesh={"fsdp": 2})
    *_, end = peaks(plan)
    assert end.working == 4 * zeros


def kept_before(plan: StepPlan) -> int:
    assert plan.second_stack is not None
    return second_activations(plan, plan.second_stack)[0]


def test_a_tower_with_features_of_its_layers_keeps_their_inputs_and_gives_more_streams():
    tower = {"image_token": 9, "num_layers": 3, "hidden_size": 32, "num_heads": 2, "ffn_hidden_size": 32}
    tower |= {"patch_size": 2, "patches_per_row": 64, "merge": 2}
    of_layers = [kept_before(plan_of(model={"vision": tower | {"deepstack_layers": n}})) for n in ([], [0], [0, 1])]
    rows = 4
    # In BF16 the stream after a layer, of the width of the tower, and image embeddings of the width of the model
    more = 2 * rows * (64 * 32 + 64 // 4 * 64)
    assert of_layers[1] - of_layers[0] == of_layers[2] - of_layers[1] == more


def test_a_frozen_tower_keeps_its_output_and_in_a_pipeline_the_image_embeddings_of_all_microbatches():
    tower = {"image_token": 9, "num_layers": 3, "hidden_size": 32, "num_heads": 2, "ffn_hidden_size": 32}
    tower |= {"patch_size": 2, "patches_per_row": 64, "merge": 2}
    frozen = {"groups": [{"parameters": ["vision.*"], "learning_rate": 0}]}
    output, embeddings = 2 * 64 * 32, 2 * 64 // 4 * 64  # of a row, in BF16
    for stages, held in ((1, 1), (2, 4)):
        plan = plan_of(
            stages,
            model={"vision": tower},
            optimizer=frozen,
            batch={"num_microbatches": 4},
            mesh={"pipeline": stages},
        )
        assert kept_before(plan) == output + held * embeddings


def test_stages_keep_their_share_of_an_encoders_microbatches_rounded_up_and_the_streams_of_all():
    encoder = {"encoder": {"kind": "layers", "num_layers": 2, "sequence_length": 16}}
    one = kept_before(plan_of(model=encoder, batch={"global_size": 1}))
    stream = 2 * 16 * 64
    for microbatches, share in ((4, 2), (5, 3), (6, 3)):
        batch = {"global_size": microbatches, "num_microbatches": microbatches}
        staged = kept_before(plan_of(2, model=encoder, batch=batch, mesh={"pipeline": 2}))
        assert staged == share * (one - stream) + microbatches * stream


@pytest.mark.parametrize(("microbatches", "copies"), [(2, False), (4, True)])
def test_a_loop_over_an_encoders_microbatches_copies_what_one_keeps(microbatches, copies):
    """Each stage has half of them; XLA makes no loop for one."""
    encoder = {"encoder": {"kind": "layers", "num_layers": 2, "sequence_length": 16}}
    kept = kept_before(plan_of(model=encoder, batch={"global_size": 1})) - 2 * 2 * 16 * 64  # without two streams
    batch = {"global_size": microbatches, "num_microbatches": microbatches}
    found = [*peaks(plan_of(2, model=encoder, batch=batch, mesh={"pipeline": 2}))]
    beside = [peak for peak in found if peak.working == kept]
    assert len(beside) == copies and all(peak.activations >= found[0].activations for peak in beside)


def test_a_teachers_output_is_kept_of_a_microbatch_and_by_stages_of_all():
    import_extensions(["docs/examples/distillation.py"])
    own = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 512}
    learning = {"objective": {"kind": "distillation", "settings": {}}, "teacher": {"model": own}}
    for gpus, mesh, held in ((1, {}, 1), (2, {"pipeline": 2}, 4)):
        batch, none = {"num_microbatches": 4}, {"objective": {"kind": "next_token"}}
        taught, alone = (
            estimate_memory(plan_of(gpus, mesh=mesh, batch=dict(batch), **each)) for each in (learning, none)
        )
        assert taught.activations - alone.activations == 2 * held * 32 * 32


@pytest.mark.parametrize("by_chunk", [True, False])
def test_what_a_strategy_keeps_of_each_token(by_chunk):
    """Of four devices, 10 numbers in attention's output and 3 in its keys and values."""
    ring = (4 / 2 if by_chunk else 2) * 10 + 3
    gathered = 2 * 4 * 3 + 10 if by_chunk else 4 * 3
    assert (RING.kept(4, 10, 3, by_chunk), ALL_GATHER.kept(4, 10, 3, by_chunk)) == (ring, gathered)
    assert RING.kept(6, 10, 3, by_chunk) == (3 if by_chunk else 2) * 10 + 3
    assert RING.kept(8, 10, 3, by_chunk) == (4 if by_chunk else 2) * 10 + 3  # 7 steps are the most that are no loop
    for devices in (9, 16):
        assert RING.kept(devices, 10, 3, by_chunk) == 3 * 10 + 3


def test_the_parts_add_up_to_the_total():
    memory = small()
    parts = (memory.parameters, memory.optimizer, memory.gradients, memory.weights, memory.activations, memory.working)
    assert memory.total == sum(parts)


# XLA could keep the operands of the last layer's weight gradients (10 GiB), as it does for qwen3_235b, and does not.
# With few tokens XLA computes all weight gradients of a layer while those of the layer above are reduced in FP32.
# XLA keeps 1.2 GiB of two layers of 70B parameters over `context` that are not counted: 5.8 %.
LOOSE = (
    "configs/deepseek_v3.yaml --gpus 1024",
    "configs/models/nemotron4_340b.yaml mesh.fsdp=4 mesh.data=2 mesh.tensor=4 mesh.context=4",
    "configs/models/llama3_70b.yaml mesh.fsdp=2 mesh.data=2 mesh.context=8",
)


# The layers of these take longest to trace, and cheaper rows of such models reach each branch of the estimate.
LONG = (
    "configs/qwen3_next_l4.yaml --gpus 1",
    "configs/nemotron3_nano_l7.yaml model.expert_ffn_hidden_size=1920",
    "configs/deepseek_v3.yaml --gpus 1024",
    "configs/models/deepseek_v3.yaml mesh.fsdp=4 mesh.data=4 mesh.context=2 mesh.expert=2",
    "configs/models/deepseek_v2_lite.yaml data.kind=synthetic batch.sequence_length=4096 batch.global_size=8",
    "configs/qwen3_235b.yaml --gpus 256",
    "configs/llama3_8b_l8.yaml mesh.fsdp=1 model.mtp_layers=1",
    "configs/models/llama2_7b.yaml mesh.fsdp=4 mesh.data=2 mesh.pipeline=2",
    "configs/models/mixtral_8x7b.yaml model.num_layers=2 batch.sequence_length=2048",
    "configs/models/deepseek_v2_lite.yaml",
    "configs/models/qwen3_30b_a3b.yaml model.num_layers=4",
    "configs/models/qwen3_30b_a3b.yaml mesh.pipeline=2",
    "configs/models/llama2_7b.yaml",
    "configs/gated_deltanet_2b.yaml",
    "configs/llama3_70b.yaml mesh.tensor=1 mesh.data=64 mesh.fsdp=8 batch.global_size=512 batch.num_microbatches=1 k",
    "configs/llama3_8b.yaml mesh.fsdp=2 batch.num_microbatches=1 batch.global_size=2 kernels.scan_unroll=32",
    "configs/mixtral_l2.yaml model.num_layers=4",
    "configs/qwen3_30b_l6.yaml",
)
ROWS = [
    pytest.param(row, id=row.case.removeprefix("configs/"), marks=[pytest.mark.long] * row.case.startswith(LONG))
    for row in memory_table.read_rows()
]


@pytest.mark.parametrize("row", ROWS)
def test_the_estimate_is_within_a_twentieth_of_what_xla_plans_but_for_three_rows(row):
    ours, tolerance = memory_table.estimate(row).total / GIB, 0.14 if row.case.startswith(LOOSE) else 0.05
    assert ours == pytest.approx(row.gib, rel=tolerance), f"XLA plans {row.gib} GiB, the estimate is {ours:.2f} GiB"


def test_bf16_sums_of_gradients_save_two_bytes_for_each_number_of_a_stage():
    """XLA saves a quarter more, in copies of the sums."""
    case = "configs/llama3_8b_l16_pipeline.yaml mesh.pipeline=2{} --gpus 2"
    found = {row.case: row for row in memory_table.read_rows()}
    fp32, bf16 = found[case.format("")], found[case.format(" precision.accumulation=bfloat16")]
    layer = 4096 * 128 * (32 + 2 * 8) + 4096 * 4096 + 3 * 4096 * 14336
    numbers = 8 * layer + 2 * 32768 * 4096
    ours = memory_table.estimate(fp32).gradients - memory_table.estimate(bf16).gradients
    assert ours == pytest.approx(2 * numbers, rel=0.01)
    assert (fp32.gib - bf16.gib) * GIB == pytest.approx(2 * numbers, rel=0.3)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_sums_in_bf16_have_the_fp32_gradient_of_the_whole_head_beside_them_unless_it_is_frozen(tied):
    few = ("batch={global_size: 4, num_microbatches: 2, sequence_length: 8}", "kernels.loss_chunk_tokens=4")
    few += (f"model.tie_embeddings={tied}", "precision.accumulation=bfloat16")
    # One of two chunks: logits and their gradient, four arrays of its rows, and the gradient of all rows
    assert small(*few).working == 2 * (4 * (2 * V + 4 * D) + 8 * D) + 4 * V * D
    adapters = ("lora.rank=4", "checkpoint.init_from=elsewhere")
    assert small(*few, *adapters).working == small(*few, *adapters, "precision.accumulation=float32").working


def test_a_line_of_the_table_is_a_figure_a_config_overrides_and_gpus():
    row = Row.parse("10.75 configs/llama3_8b.yaml mesh.fsdp=8 model.num_layers=4 --gpus 8")
    assert row == Row(10.75, "configs/llama3_8b.yaml", ("mesh.fsdp=8", "model.num_layers=4"), 8)
    assert row.case == "configs/llama3_8b.yaml mesh.fsdp=8 model.num_layers=4 --gpus 8"
    with pytest.raises(memory_table.InputError, match=r"is no row: write GiB"):
        Row.parse("10.75 configs/llama3_8b.yaml --gpu 8")


@pytest.mark.long
def test_the_page_of_the_table_is_up_to_date():
    assert memory_table.TABLE.read_text() == memory_table.page(), "run python dev/memory_table.py"


@pytest.mark.parametrize(("kind", "virtual_stages"), [("1f1b", 1), ("1f1b", 2), ("zero_bubble", 1), ("zero_bubble", 2)])
def test_four_microbatches_a_stage_need_the_buffers_of_any_more(kind, virtual_stages):
    few, more = (make_schedule(kind, 4, microbatches, virtual_stages) for microbatches in (16, 52))
    for per_virtual_stage in (False, True):
        one, other = assign_buffer_slots(few, per_virtual_stage), assign_buffer_slots(more, per_virtual_stage)
        assert one.activation_slots == other.activation_slots and one.pending_head_slots == other.pending_head_slots
        assert one.deferred_slots == other.deferred_slots
