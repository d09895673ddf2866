"""The estimate of a step's time against steps that were measured on H200s (docs/performance.md)."""

import itertools
import json

import pytest
import time_table

from megajax.config import Config, Keep, ModelConfig, RematPolicy, register_remat
from megajax.config.checks import check_mesh
from megajax.estimate.traces import traces
from megajax.options.remat import POLICIES
from megajax.schema.lora import LoraConfig
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import H200
from megajax.tools.plan.step_time import StepTime


@pytest.fixture(scope="module")
def speeds() -> dict:
    return {row: time_table.estimate(row)[0] for row in time_table.read_rows()}


def test_rows_that_were_not_fitted_are_within_nine_per_cent(speeds):
    others = [row for row in speeds if not row.fitted]
    assert len(others) >= 70
    for row in others:
        assert speeds[row] == pytest.approx(row.teraflops, rel=0.09), row
    errors = [abs(speeds[row] / row.teraflops - 1) for row in others]
    assert sum(errors) / len(errors) < 0.03


def test_nine_of_ten_pairs_that_differ_are_in_the_right_order(speeds):
    pairs = [p for p in itertools.combinations(speeds, 2) if not 0.95 < p[0].teraflops / p[1].teraflops < 1.05]
    right = sum((one.teraflops > other.teraflops) == (speeds[one] > speeds[other]) for one, other in pairs)
    assert right >= 0.9 * len(pairs) and len(pairs) > 100


def test_the_parts_of_a_step_add_up_and_losses_are_named(speeds):
    row = next(row for row in speeds if "pipeline=2" in " ".join(row.overrides))
    step = time_table.estimate(row)[1]
    useful = step.matmuls + step.attention + step.head
    assert step.total == pytest.approx(useful + sum(step.losses.values()))
    assert step.losses["bubble"] > 0 and "communication over tensor" not in step.losses


def parts_of(*overrides: str, config: str = "configs/llama3_8b_l8.yaml", gpus: int = 1):
    return time_table.estimate(time_table.Row(False, 1.0, config, overrides, gpus))[1]


def test_the_parts_of_a_traced_step_are_near_the_estimate():
    """One H200 with 8 sequences, docs/profiling.md; the whole step took 1,678 ms."""
    step = parts_of("batch.global_size=8")
    found = {"matmuls": step.matmuls, "attention": step.attention, "head": step.head, "elementwise": step.elementwise}
    measured = {"matmuls": 0.990, "attention": 0.289, "head": 0.325, "elementwise": 0.0747}
    assert found == pytest.approx(measured, rel=0.08) and step.total == pytest.approx(1.678, rel=0.02)


def test_traffic_is_the_bytes_that_collectives_send():
    """Llama 3 8B's eight layers: of a stream of 32,768 × 4096 BF16 two gathers and two sums for each part.

    Embedding and head have as many, by NCCL.
    """
    step = parts_of("mesh.fsdp=1", "mesh.tensor=2", gpus=2)
    assert step.traffic.keys() == {"tensor"}
    sent = step.traffic["tensor"]
    assert sent.sent == (8 * 2 + 1) * 4 * 32768 * 4096 * 2 / 2
    rates = time_table.H200
    assert sent.seconds == pytest.approx(sent.sent / 17 * (16 / rates.link_bytes + 1 / rates.nccl_bytes))
    assert 0 < sent.exposed < sent.seconds
    step = parts_of("mesh.fsdp=2", gpus=2)  # weights gathered twice in BF16, gradients reduced in FP32
    assert step.traffic["fsdp"].sent == pytest.approx((2 + 2 + 4) * (8 * 218.1e6 + 2 * 128256 * 4096) / 2, rel=0.01)
    # Four microbatches of 8192 tokens, whose streams and gradients go one stage on in each of 4 + 2 - 1 periods or
    # ticks. The head's are divided among the stages and gathered, and embedding and head are gathered once a step.
    staged, stream = ("mesh.fsdp=1", "mesh.pipeline=2", "batch.num_microbatches=4"), 8192 * 4096 * 2
    for schedule in ("1f1b", "zero_bubble"):
        sent = parts_of(*staged, f"pipeline.schedule={schedule}", gpus=2).traffic["pipeline"].sent
        assert sent == (2 * 5 + 4) * stream + (2 + 4) * 2 * 128256 * 4096 / 2


# Four layers of D = 256, 4 heads of 64, 2 KV heads, F = 1024, V = 1024; 4 sequences of 512
D, V, T = 256, 1024, 2048
SMALL = {"num_layers": 4, "hidden_size": D, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 1024}
SMALL |= {"vocab_size": V, "vocab_multiple": 1}
MATRICES = D * 64 * (4 + 2 * 2) + 4 * 64 * D + 3 * D * 1024  # of a layer
LAYER = MATRICES + 2 * D


def small(gpus: int = 1, **sections: dict) -> StepTime:
    model, batch = SMALL | sections.pop("model", {}), {"global_size": 4, "sequence_length": 512}
    batch |= sections.pop("batch", {})
    config = Config.model_validate({"model": model, "batch": batch, "data": {"kind": "synthetic"}, **sections})
    return Candidate.of(config, check_mesh(config, gpus)).time


def test_each_fitted_constant_is_a_multiple_of_what_its_comment_says():
    """Rows of a table that differ by a few per cent do not tell their constants, so each has a case by hand."""
    plain, number, memory = small(), 4 * LAYER + 2 * V * D + D, H200.memory_bytes
    assert plain.losses.keys() == {"elementwise", "optimizer", "casts and sums of gradients"}
    assert plain.optimizer == pytest.approx(31.5 * number / memory)
    assert plain.conversions == pytest.approx(16 * number / memory)
    # A loop copies each layer's input, which is saved, and casts its weights in both passes.
    unrolled, looped = (small(kernels={"scan_unroll": n}, remat={"policy": "full"}) for n in (4, 1))
    assert (unrolled.loops, looped.loops) == (0, pytest.approx((1.9 * 4 * 2 * T * D + 2 * 6 * 4 * LAYER) / memory))
    assert looped.losses["copies of saved activations"] == looped.loops
    fp8 = small(precision={"fp8": {"recipe": "current"}})
    assert fp8.conversions - plain.conversions == pytest.approx(4.8 * 4 * LAYER / memory)
    half = small(precision={"fp8": {"recipe": "current", "first_bf16_layers": 2}})
    assert half.matmuls == pytest.approx((fp8.matmuls + plain.matmuls) / 2) and fp8.matmuls < plain.matmuls
    offloaded = small(optimizer={"offload": 1})  # two moments of each matrix, in FP32
    assert offloaded.optimizer - plain.optimizer == pytest.approx(8 * (4 * MATRICES + 2 * V * D) / 33e9)
    # The slowest of the GPUs of a host, whatever their number is
    batch = {"global_size": 16}
    for gpus, doublings in ((1, 0), (2, 1), (8, 3), (16, 3)):
        step = small(gpus, mesh={"data": gpus}, batch=dict(batch))
        assert step.waiting == pytest.approx(0.0108 * doublings * (step.computation + step.head)), gpus
    # Fifteen ticks in five periods, each with a stream of a microbatch of 512 tokens and its gradient; or six ticks
    shape, stream = {"mesh": {"pipeline": 2}, "batch": {"num_microbatches": 4}}, 2 * 512 * D / H200.link_bytes
    for schedule, ticks, sends in (("1f1b", 15, 10), ("zero_bubble", 6, 6)):
        step = small(2, **shape, pipeline={"schedule": schedule})
        assert step.ticks == pytest.approx(ticks * 150e-6 + sends * stream), schedule
        assert step.sends.seconds == step.sends.exposed == pytest.approx(sends * stream), schedule


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize(
    "model", [{"mtp_layers": 1}, {"encoder": {"kind": "layers", "num_layers": 2, "sequence_length": 512}}]
)
def test_stages_share_the_layers_before_and_after_the_models(model, virtual_stages):
    batch, stages = {"num_microbatches": 4}, {"virtual_stages": virtual_stages}
    staged = small(2, mesh={"pipeline": 2}, pipeline=stages, model=model, batch=dict(batch))
    assert 2 * staged.matmuls == pytest.approx(small(model=model, batch=dict(batch)).matmuls)


def test_a_prediction_module_is_a_layer_behind_a_projection_of_both_streams():
    """With full recomputation all but the last matmul runs again."""
    modules, plain = (small(model={"mtp_layers": n}, remat={"policy": "full"}) for n in (2, 0))
    module = MATRICES + 2 * D * D
    assert modules.matmuls / plain.matmuls == pytest.approx(1 + 2 * module / (4 * MATRICES))
    again = (modules.recomputed.matmuls - plain.recomputed.matmuls) / 2
    assert again / (plain.matmuls / 4) == pytest.approx((module - D * 1024) / MATRICES / 3)


def test_the_first_layers_gathers_and_a_share_of_the_others_are_exposed_where_layers_hide_them():
    """Two microbatches of four layers: one of 8 layers' gathers is alone, 0.47 of the others takes from computation."""
    batch = {"global_size": 1024, "num_microbatches": 2}
    fsdp = small(2, model={"vocab_size": 128}, mesh={"fsdp": 2}, batch=batch).weights["fsdp"]
    number = 4 * LAYER + 2 * 128 * D + D  # vectors are whole on both
    sent = 2 * (2 + 2 + 4) * (number - 4 * 2 * D - D) / 2  # BF16 twice, gradients in FP32, in each microbatch
    assert fsdp.sent == sent and fsdp.seconds == pytest.approx(sent / min(H200.link_bytes, H200.nccl_bytes))
    first = fsdp.seconds / 4 / 2
    assert fsdp.exposed == pytest.approx(first + 0.47 * (fsdp.seconds - first))


def test_one_microbatch_hides_the_gathers_and_reductions_that_are_once_a_step():
    """Of eight microbatches of 64 tokens each; a third of the bytes and of the computation are the forward pass's."""
    batch = {"global_size": 16, "sequence_length": 64, "num_microbatches": 8}
    step = small(2, mesh={"data": 2}, batch=batch)
    data, computation = step.weights["data"], (step.computation + step.head) / 8
    assert 8 * 0.9 * computation > 0.5 * data.seconds
    assert data.exposed == pytest.approx(data.seconds - 0.9 * computation)


def test_collectives_of_activations_and_uneven_experts_by_hand():
    """Of half of the tokens on each of two devices: keys and values are sent and gathered in both passes."""
    context = small(2, mesh={"context": 2}).activations["context"]
    assert context.sent == 4 * (4 * 2 * T / 2 * 2 * (64 + 64) * 2) / 2
    assert context.seconds == pytest.approx(context.sent / min(H200.link_bytes, H200.nccl_bytes))
    assert context.exposed == pytest.approx(0.29 * context.seconds)
    tensor = small(2, mesh={"tensor": 2}).activations["tensor"]
    assert tensor.exposed == pytest.approx(0.44 * tensor.seconds)
    # Matmuls in FP8 take 1/2, or with scales of blocks 1/(2 · 0.73), of the time, and so hide as much less. With one
    # scale two of four collectives are FP8's, and have half of the bytes beside as much computation.
    for recipe, exposed in (("blockwise", 1 - 0.56 / (2 * 0.73)), ("current", 1 - 4 * 0.56 / 2 / 3)):
        fp8 = small(2, mesh={"tensor": 2}, precision={"fp8": {"recipe": recipe}}).activations["tensor"]
        assert fp8.exposed == pytest.approx(exposed * fp8.seconds), recipe
    # As many rows for each expert: four on each device, or four on one.
    experts = {"block_pattern": ["experts"], "experts_per_token": 2, "expert_ffn_hidden_size": 1024}
    divided = small(2, mesh={"expert": 2}, model=experts | {"num_experts": 8})
    whole = small(2, mesh={"data": 2}, model=experts | {"num_experts": 4})
    assert divided.matmuls / whole.matmuls == pytest.approx(1.124, rel=1e-3)  # but for the router
    # All tokens to both devices, a half of them from the other
    sent = divided.activations["expert"]
    assert sent.sent == 4 * 4.5 * 2 * T / 2 * D * 2 / 2
    assert sent.exposed == sent.seconds == pytest.approx(sent.sent / H200.link_bytes)
    # Half of the bytes of the tokens and, without biases, gradients; scales of blocks are not sent.
    for recipe, biased, times in (("current", False, 3.5), ("current", True, 4.0), ("blockwise", False, 4.5)):
        model, precision = experts | {"num_experts": 8, "mlp_bias": biased}, {"fp8": {"recipe": recipe}}
        fp8 = small(2, mesh={"expert": 2}, model=model, precision=precision).activations["expert"]
        assert fp8.sent == sent.sent * times / 4.5, recipe
    # Of a token: the router's scores, gate, value and product of two experts, and their rows. An all-to-all of two
    # devices writes buffers that have room for a quarter more.
    model, own, rows = experts | {"num_experts": 8}, 11 * D + 3.3 * (8 + 2 * 3 * 1024), 2 * D
    shared = small(2, mesh={"expert": 2}, communication={"experts": "all_to_all"}, model=model).elementwise
    assert small(model=model).elementwise == pytest.approx(4 * 2 * T * (own + 8.7 * rows) / H200.memory_bytes)
    assert shared == pytest.approx(4 * 2 * T / 2 * (own + (8.7 + 2 * 1.25) * rows) / H200.memory_bytes)


def test_rows_of_experts_over_two_axes_use_the_network_cards_of_all_gpus_of_a_host():
    """Experts over 16 neighbours, in two hosts."""
    model = {"block_pattern": ["experts"], "num_experts": 16, "expert_ffn_hidden_size": 1024}
    mesh = {"expert": 8, "context": 2, "experts_over": ["expert", "context"]}
    rows = small(16, mesh=mesh, model=model, batch={"global_size": 8}).activations["expert"]
    assert rows.seconds == pytest.approx(rows.sent / (8 * H200.network_bytes))
    # Two hosts with the shards of a model each: a group over data is one GPU of each host.
    data = small(16, mesh={"data": 2, "fsdp": 8}, batch={"global_size": 16}).weights["data"]
    assert data.seconds == pytest.approx(data.sent / H200.network_bytes)


def test_latents_are_sent_over_tensor_in_place_of_attentions_input_only():
    """Two collectives of each part's input, the latents of queries and keys or the stream, and two of its output."""
    latent = {"num_kv_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    sent = small(2, mesh={"tensor": 2}, model=latent | {"qk_rope_head_dim": 16}).activations["tensor"].sent
    assert sent == 4 * T * 2 * (2 * (32 + 64 + 16) + 2 * D + 4 * D) / 2


def test_experts_over_tensor_have_the_rows_of_the_tokens_that_its_devices_share():
    experts = {"block_pattern": ["experts"], "num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 1024}
    one, half = small(model=experts), small(2, mesh={"tensor": 2, "experts_over": ["tensor"]}, model=experts)
    assert half.matmuls / one.matmuls == pytest.approx(1.124 / 2, rel=1e-3)  # but for the router
    # Of each token's stream two collectives in both passes, and as many of a shared expert's.
    for shared, collectives in ((0, 4), (512, 8)):
        model = experts | {"shared_expert_ffn_hidden_size": shared}
        sent = small(2, mesh={"tensor": 2}, model=model).activations["tensor"].sent
        assert sent == 4 * collectives * T * D * 2 / 2, shared


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_head_reads_and_writes_the_sum_of_its_gradients_between_chunks(chunks):
    """By hand, of 64 tokens: six operations for each token and weight, 3.5 bytes for each logit, and the FP32 sums."""
    model = {"num_layers": 1, "hidden_size": 128, "num_heads": 4, "vocab_size": 1024, "vocab_multiple": 1}
    sections = {"batch": {"global_size": 1, "sequence_length": 64}, "kernels": {"loss_chunk_tokens": 64 // chunks}}
    config = Config.model_validate({"model": model, **sections})
    weights = 128 * 1024
    moved = 3.5 * 64 * 1024 + (chunks - 1) * 2 * 4 * weights
    expected = 6 * 64 * weights / H200.matmul_flops(128, False) + moved / H200.memory_bytes
    assert Candidate.of(config, check_mesh(config, 1)).time.head == pytest.approx(expected)


def test_recomputation_leaves_out_the_last_matmul_of_a_layer():
    plain, full = parts_of(), parts_of("remat.policy=full")
    linear = 4096 * (4096 + 2 * 1024 + 4096 + 2 * 14336)  # parameters of a layer without the down-projection
    share = linear / (linear + 4096 * 14336)
    assert full.recomputed.matmuls == pytest.approx(plain.matmuls / 3 * share, rel=0.01)


def test_the_attention_that_a_policy_does_not_keep_is_recomputed():
    register_remat(RematPolicy("all_but_attention", Keep.NAMED, recomputed_by_blocks=("attention",)))
    names = ("none", "selective", "save_matmuls", "all_but_attention")
    try:
        found = {name: small(remat={"policy": name}) for name in names}
    finally:
        del POLICIES["all_but_attention"]
    forward = found["none"].attention / 3  # the backward pass has twice the operations
    again = {name: step.recomputed.attention for name, step in found.items()}
    assert again == pytest.approx({"none": 0, "selective": forward, "save_matmuls": 0, "all_but_attention": forward})


def test_attention_to_an_encoder_reads_and_writes_as_much_as_a_layers_own():
    """Of 4 heads of 64 the numbers of a token's output, and the products with all 16 tokens of the encoder."""
    model = ModelConfig.model_validate(SMALL | {"encoder": {"kind": "layers", "num_layers": 1, "sequence_length": 16}})
    parts = traces(model, LoraConfig(), 32, "bfloat16").of("decoder").parts
    found = {name: (parts[name].attended, parts[name].mixing) for name in ("attention", "cross_attention", "mlp")}
    assert found == {"attention": (256, 0), "cross_attention": (256, 16 * 256 * 2), "mlp": (0, 0)}


def test_devices_of_context_project_the_keys_of_the_others_from_latents():
    latent = parts_of("mesh.context=2", config="configs/dsv3_l4_e16.yaml", gpus=2)
    heads = parts_of("mesh.context=2", "communication.context=all_to_all", config="configs/dsv3_l4_e16.yaml", gpus=2)
    tokens, up = 4096, 512 * 128 * 256  # of a device; parameters of the up-projection
    extra = 4 * tokens * up * (8 + 2) / time_table.H200.matmul_flops(512, False)
    assert latent.matmuls == pytest.approx(heads.matmuls + extra, rel=1e-6)
    # Of the other device's tokens: their 128 heads of 128 + 128 numbers, with keys of 192 and values in attention
    moved = 3.3 * 2 * tokens * 4 * 128 * (128 + 128 + 192 + 128) / time_table.H200.memory_bytes
    assert latent.elementwise - heads.elementwise == pytest.approx(moved)
    # Latents of 512 numbers and rotary keys of 64, gathered and their gradients summed in four collectives of a layer
    assert latent.activations["context"].sent == 4 * 4 * tokens * 2 * (512 + 64)


def test_the_table_is_of_a_file_of_rates(speeds, tmp_path, monkeypatch, capsys):
    """With half of all rates of computation, one GPU takes twice the time."""
    file, rates = tmp_path / "rates.json", time_table.H200
    names = ("bf16_flops", "fp8_flops", "memory_bytes")
    halves = {name: getattr(rates, name) / 2 for name in names}
    attention = {str(width): rate / 2 for width, rate in rates.attention_flops}
    file.write_text(json.dumps(halves | {"attention_flops": attention}))
    rows = [next(row for row in speeds if row.gpus == 1 and row.fitted == fitted) for fitted in (True, False)]
    monkeypatch.setattr(time_table, "read_rows", lambda: rows)
    assert time_table.main([f"--rates={file}"]) == 0
    estimates = [int(line.split("|")[4]) for line in capsys.readouterr().out.splitlines()[2:4]]
    assert estimates == pytest.approx([speeds[row] / 2 for row in rows], abs=0.5)
