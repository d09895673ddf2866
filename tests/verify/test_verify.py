"""`megajax verify` agrees with correct code, and names the parameter of a planted error."""

import os
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax import ops
from megajax.config import AXES, Config, load_config
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.layout.kinds import KINDS, layer_kinds
from megajax.mesh import build_mesh
from megajax.model import attention
from megajax.options.optimizers import OPTIMIZERS
from megajax.step import microbatches
from megajax.tools.verify import __main__ as command
from megajax.tools.verify import runs as runs_of_verify
from megajax.tools.verify.differences import RunDifference, compare
from megajax.tools.verify.report import traces
from megajax.tools.verify.runs import (
    Run,
    RunTrace,
    batches,
    computed_gradients,
    first_gradients,
    has_first_moments,
    position_in_model,
)
from megajax.tools.verify.shrink import in_fp32, shrink
from megajax.training import saving
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram
from megajax.weights.weight import Weight

ONE = dict.fromkeys(AXES, 1)
SIZES = ONE | {"context": 2, "tensor": 2}
LARGE = {
    "run": {"steps": 1000},
    "model": {
        "num_layers": 12,
        "hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 4,
        "vocab_size": 5000,
        "num_experts": 8,
        "router": {"expert_bias": True},
    },
    "batch": {"global_size": 64, "num_microbatches": 8, "sequence_length": 512},
    "data": {"kind": "synthetic"},
}


def run_on(sizes):
    one_layer = LARGE | {"model": LARGE["model"] | {"num_layers": 1}}
    return Run(shrink(Config.model_validate(one_layer), [SIZES], 2)[0], sizes)


@pytest.fixture(scope="module")
def one():
    return run_on(ONE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The directory of one device's checkpoint after step 1 of 2."""
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def expected(one, checkpoint):
    return one.train(checkpoint)


def unsummed_gradient(patch):
    complete = Weight.complete

    def lacking(self, gradient):
        return gradient.astype(jnp.float32) if self.name == "final_norm" else complete(self, gradient)

    patch.setattr(Weight, "complete", lacking)


def bias_of_a_rank(patch):
    updated = ops.router.updated_bias
    patch.setattr(
        ops.router,
        "updated_bias",
        lambda b, counts, rate: updated(b, counts, rate * (1 + jax.lax.axis_index("tensor"))),
    )


def wrong_offset(patch):
    """Each device of `context` rotates its tokens as if they stood three places further on than those before."""
    rotate = attention.rotate

    def shifted(config, kind, inputs, *rest):
        further = inputs.positions + 3 * jax.lax.axis_index("context")
        return rotate(config, kind, replace(inputs, positions=further), *rest)

    patch.setattr(attention, "rotate", shifted)


def dropped_microbatch(patch):
    """The last microbatch counts in the number of tokens only."""
    run = microbatches.train

    def lacking(local, arrays, batch):
        return run(local, arrays, {**batch, "loss_mask": batch["loss_mask"].at[-1].set(False)})

    patch.setattr(microbatches, "train", lacking)


@pytest.mark.parametrize(
    ("plant", "sizes", "named"),
    [
        pytest.param(
            *(unsummed_gradient, {"tensor": 2}, "^final_norm differs between devices"), marks=pytest.mark.long
        ),
        pytest.param(
            *(bias_of_a_rank, {"tensor": 2}, r"^blocks\.moe\.moe\.expert_bias differs between devices"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            wrong_offset,
            {"context": 2},
            r"embedding.tokens differs .* most that of blocks\.moe\.attention\.(query|key|norm)",
            marks=pytest.mark.long,
        ),
        (dropped_microbatch, {}, r"embedding.tokens differs .* (\d+) of \1 differ"),
    ],
    ids=["unsummed-gradient", "bias-of-a-rank", "wrong-offset", "dropped-microbatch"],
)
def test_it_names_the_parameter_of_an_error(plant, sizes, named, expected, monkeypatch):
    plant(monkeypatch)
    first = compare(run_on(ONE | sizes).train(), expected).first
    assert re.search(named, first or ""), first


def test_a_correct_mesh_agrees_also_through_checkpoints(one, expected, checkpoint, monkeypatch):
    compared, copies_agree = list[jax.Array](), runs_of_verify._copies_agree
    monkeypatch.setattr(runs_of_verify, "_copies_agree", lambda x: compared.append(x) or copies_agree(x))
    runs = [run for _, run in traces(one, run_on(SIZES), "mesh", checkpoint)]
    state = expected.states[-1]["blocks.moe.moe.expert_bias"]
    assert sum(np.array_equal(x, state) for x in compared) == len(runs), "copies of layer state are compared too"
    differences = [compare(run, expected) for run in runs]
    assert [each.first for each in differences] == [None] * 3
    assert [run.first for run in runs] == [1, 2, 2] and [len(run.losses) for run in runs] == [2, 1, 1]
    for each in differences:
        assert "blocks.moe.moe.expert_bias after step 2" in each.values["layer state"]
        assert each.values["update"].keys() == expected.gradients.keys()
    assert differences[0].values["gradient"].keys() == expected.gradients.keys()


def test_a_checkpoint_needs_no_data_of_the_config():
    data = {"kind": "chat", "train": "elsewhere.jsonl", "tokenizer": "byte"}
    run = Run(shrink(Config.model_validate(LARGE | {"data": data}), [ONE], 2)[0], ONE)
    assert run.program.config.pads_samples("train") and run.saver.description(1)["step"] == 1


@pytest.mark.long
def test_frozen_weights_come_back_without_being_in_the_checkpoint(tmp_path):
    model = {"num_layers": 1, "hidden_size": 64, "num_heads": 2, "vocab_size": 250}
    settings = {"model": model, "lora": {"rank": 2}, "checkpoint": {"init_from": "x"}, "data": {"kind": "synthetic"}}
    sizes = {"batch": {"global_size": 2, "sequence_length": 8}}
    run = Run(shrink(Config.model_validate(settings | sizes), [ONE], 2)[0], ONE)
    whole = run.train(tmp_path)
    assert compare(run.resume(tmp_path, run.saved), whole).first is None


def test_a_checkpoint_that_loses_layer_state_is_named(one, expected, checkpoint, monkeypatch):
    load = saving.loaded_layer_state
    monkeypatch.setattr(saving, "loaded_layer_state", lambda tree: jax.tree.map(lambda x: 0 * x, load(tree)))
    difference = compare(one.resume(checkpoint, one.saved), expected)
    assert difference.first == "layer_state.moe.moe.expert_bias is restored with other values"
    assert "the layer state of blocks.moe.moe.expert_bias after step 2" in replace(difference, problems=()).first


@pytest.mark.long
def test_fp8_and_a_block_from_outside(tmp_path, capsys, monkeypatch):
    """Rounding moves FP8's runs by the measured distance; histories and the block's own state are compared."""
    monkeypatch.setitem(KINDS, "squared", {})
    del KINDS["squared"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    code = "from test_block_kinds import Attention, Squared, register_block as a\na('squared', Attention, Squared)\n"
    (tmp_path / "toy_blocks.py").write_text(code)
    model = {name: value for name, value in LARGE["model"].items() if name not in ("num_experts", "router")}
    settings = LARGE | {"model": model | {"block_pattern": ["dense", "squared"]}}
    settings["batch"] = LARGE["batch"] | {"num_microbatches": 1}
    settings["precision"] = {"fp8": {"recipe": "delayed", "first_bf16_layers": 3, "last_bf16_layers": 2}}
    (tmp_path / "toy.yaml").write_text(Config.model_validate(settings).to_yaml())
    arguments = ["toy.yaml", "run.extensions=[toy_blocks]", "--mesh", "fsdp=2,tensor=2", "--steps", "1"]
    assert command.main(arguments) == 0
    printed = capsys.readouterr()
    named = [line.partition(": ")[2] for line in printed.err.splitlines() if line.startswith("compiling and training")]
    assert named == ["one device…", "one device in FP32…", "fsdp 2 × tensor 2…"]
    shown = printed.out
    assert "precision.fp8.amax_history_length: 1024 → 4" in shown
    assert "precision.fp8.first_bf16_layers: 3 → 1" in shown
    assert "precision.fp8.last_bf16_layers: 2 → 1" in shown
    assert "Linear layers compute in FP8, all else in FP32." in shown
    assert re.search(r"layer state .* (fp8\.|blocks\.squared\.mlp\.mean_power).* after step 1", shown), shown


def test_rounding_explains_twice_its_distance_from_fp32(expected):
    """By hand: the reference's gradient is 3 % from FP32's, so runs up to 6 % from the reference agree.

    Its loss is 1e-3 from FP32's, and may be four times as far from another run's.
    """
    name = "final_norm"

    def moved(share):
        gradients = expected.gradients | {name: expected.gradients[name] * (1 + share)}
        return replace(expected, gradients=gradients, losses=expected.losses * 1.001)

    reference = moved(0.03)
    for share, agrees in ((-0.029, True), (0.09, True), (-0.04, False), (0.1, False), (float("nan"), False)):
        difference = compare(moved(share), reference, expected)
        assert difference.limits["gradient"][name] == pytest.approx(0.06 + 1e-4, rel=1e-6)
        assert difference.limits["loss"]["step 1"] == pytest.approx(4e-3 + 1e-5, rel=1e-6)
        assert (difference.first is None) == agrees and (agrees or f"the gradient of {name} " in difference.first)


@pytest.mark.parametrize(
    "remat, unroll, layers, small_remat, small_unroll",
    [
        ({"policy": "full", "group": 3}, None, 8, {"group": 2}, None),
        ({"policy": "full", "layers": 1}, None, 8, {"layers": 1}, None),  # and a layer that is not recomputed
        ({"policy": "full", "layers": 2, "group": 2}, 3, 16, {"layers": 2, "group": 2}, 2),
        ({}, 3, 8, {}, 2),  # the body of a stage
        ({}, 1, 4, {}, 1),
    ],
)
def test_groups_and_loops_stay_in_the_small_config(remat, unroll, layers, small_remat, small_unroll):
    settings = LARGE | {"remat": remat, "kernels": {"scan_unroll": unroll}, "mesh": {"pipeline": 4}}
    small, _ = shrink(Config.model_validate(settings), [ONE | {"pipeline": 4}], 2)
    assert (small.model.num_layers, small.kernels.scan_unroll) == (layers, small_unroll)
    assert small.remat.model_dump(exclude_defaults=True) == {**remat, **small_remat}
    check_mesh(small.model_copy(update={"mesh": small.mesh.model_copy(update={"pipeline": 4})}), 4)


def test_the_sign_of_a_step_counts_only_where_the_gradient_is_no_rounding(expected):
    """By hand: a gradient of 1, but 1e-7 in the first half, where the true one is zero, and steps of one size."""
    name = "final_norm"
    gradient, step = np.ones_like(expected.gradients[name]), np.full_like(expected.gradients[name], 1e-3)
    half = len(gradient) // 2
    gradient[:half] = 1e-7
    before = expected.weights[0]

    def with_steps(steps):
        weights = before, expected.weights[1] | {name: before[name] + steps}
        return replace(expected, gradients=expected.gradients | {name: gradient}, weights=weights)

    signs = np.ones_like(step)
    signs[:half] = -1
    assert compare(with_steps(signs * step), with_steps(step)).first is None
    signs[half] = -1
    assert f"the update of {name} " in compare(with_steps(signs * step), with_steps(step)).first


@pytest.mark.parametrize(
    ("precision", "compute", "recipe"),
    [("float32", "float32", "none"), ("bfloat16", "bfloat16", "none"), ("fp8", "float32", "current")],
)
def test_the_small_config_computes_in_the_format_that_is_asked_for(precision, compute, recipe):
    fp8 = {"recipe": "current", "first_bf16_layers": 2, "last_bf16_layers": 3}
    formats = dict.fromkeys(("compute", "gradients", "accumulation"), "bfloat16")
    found = shrink(Config.model_validate(LARGE | {"precision": formats | {"fp8": fp8}}), [SIZES], 2, precision)[0]
    small, exact = found.precision, in_fp32(found).precision
    assert (small.compute, small.fp8.recipe) == (compute, recipe)
    assert small.gradients == small.accumulation == "float32"
    if precision == "fp8":
        assert (small.fp8.first_bf16_layers, small.fp8.last_bf16_layers) == (1, 1)
    assert (exact.compute, exact.gradients, exact.fp8.recipe) == ("float32", "float32", "none")


@pytest.mark.parametrize(("precision", "length"), [("float32", 32), ("fp8", 64)])
def test_a_device_has_the_tokens_that_a_recipe_multiplies(precision, length):
    """Two sequences with 32 tokens together, MXFP8's block, on each of four devices; otherwise what is convenient."""
    settings = LARGE | {"precision": {"fp8": {"recipe": "mxfp8"}}}
    assert shrink(Config.model_validate(settings), [SIZES], 2, precision)[0].batch.sequence_length == length


@pytest.mark.parametrize(
    "pattern",
    [
        {"rope_pattern": ["rope", "rope", "rope", "none"]},
        {"layer_pattern": ["local", "local", "local", "global"], "sliding_window": 64},
        {"block_pattern": ["dense", "moe", "moe", "moe"]},
        {"moe_layer_interval": 4},
    ],
    ids=lambda pattern: next(iter(pattern)),
)
def test_the_small_config_has_every_layer_of_a_pattern(pattern):
    large = Config.model_validate(LARGE | {"model": LARGE["model"] | pattern})
    kinds, expected = (
        [(kind.block, kind.window is None, kind.rope) for kind in layer_kinds(each.model)[:4]]
        for each in (shrink(large, [ONE], 2)[0], large)
    )
    assert kinds == expected and len(set(expected)) == 2


@pytest.mark.parametrize(("kv_heads", "small_heads"), [(8, (2, 2)), (4, (4, 2)), (1, (4, 1))])
def test_the_small_config_shares_key_value_heads_as_the_large_one(kv_heads, small_heads):
    settings = LARGE | {"model": LARGE["model"] | {"num_kv_heads": kv_heads}}
    small = shrink(Config.model_validate(settings), [ONE], 2)[0].model
    assert (small.num_heads, small.num_kv_heads) == small_heads


def test_the_mean_does_not_depend_on_the_mesh():
    """That of the microbatches' means does: its microbatches are those of each rank, as in Megatron-LM."""
    settings = LARGE | {"objective": {"average": "microbatches", "label_smoothing": 0.1}}
    small, changes = shrink(Config.model_validate(settings), [ONE | {"data": 2}], 2)
    assert (small.objective.average, small.objective.label_smoothing) == ("tokens", 0.1)
    assert "objective.average: microbatches → tokens" in changes


@pytest.mark.parametrize(("microbatches", "sizes", "expected"), [(8, {"pipeline": 3}, 6), (8, {}, 2), (1, {}, 1)])
def test_one_microbatch_stays_one_and_several_are_multiples_of_the_stages(microbatches, sizes, expected):
    settings = LARGE | {"batch": LARGE["batch"] | {"num_microbatches": microbatches}}
    small, _ = shrink(Config.model_validate(settings), [ONE | sizes], 2)
    assert small.batch.num_microbatches == expected


def test_a_teacher_is_made_small_too_and_a_base_stays_one():
    import_extensions(["docs/examples/distillation.py"])
    teacher = {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "vocab_size": 5000}
    settings = LARGE | {"objective": {"kind": "distillation"}, "teacher": {"model": teacher, "source": "x"}}
    small, changes = shrink(Config.model_validate(settings), [SIZES], 2)
    found = small.teacher.model
    assert found is not None and (found.num_layers, found.hidden_size, found.head_dim) == (2, 64, 16)
    assert found.vocab_size == small.model.vocab_size == 250
    assert "teacher.model.hidden_size: 1024 → 64" in changes
    adapters = {"lora": {"rank": 8}, "checkpoint": {"init_from": "x"}, "teacher": {"base": True}}
    dense = LARGE["model"] | {"num_experts": None, "router": {}}
    small, changes = shrink(Config.model_validate(settings | adapters | {"model": dense}), [SIZES], 2)
    assert small.teacher.base and not any("teacher" in line for line in changes)


def test_devices_have_parts_of_experts_whose_widths_their_matmuls_multiply():
    """Of an expert and a shared one 16 columns on each of four devices, half of the width of the others."""
    settings = LARGE | {"model": LARGE["model"] | {"shared_expert_ffn_hidden_size": 512}}
    model = shrink(Config.model_validate(settings), [ONE | {"tensor": 4}], 2)[0].model
    assert (model.expert_ffn_hidden_size, model.shared_expert_ffn_hidden_size) == (64, 64)


def test_of_several_dense_layers_before_the_experts_one_stays():
    settings = LARGE | {"model": LARGE["model"] | {"first_dense_layers": 3}}
    small, changes = shrink(Config.model_validate(settings), [ONE], 2)
    assert (small.model.first_dense_layers, small.model.num_layers) == (1, 2)
    assert "model.first_dense_layers: 3 → 1" in changes


def test_uneven_stages_stay_uneven_and_parameters_are_in_the_models_order():
    settings = LARGE | {"pipeline": {"layout": [1, 4, 5, 2]}, "mesh": {"pipeline": 4}}
    small, changes = shrink(Config.model_validate(settings), [dict.fromkeys(AXES, 1) | {"pipeline": 4}], 2)
    assert small.pipeline.layout == (1, 2, 2, 2) and small.model.num_layers == 7
    assert "pipeline.layout: (1, 4, 5, 2) → [1, 2, 2, 2]" in changes
    names = ["blocks.mtp.mlp.up", "head", "final_norm", "blocks.dense.mlp.up", "embedding.tokens"]
    assert sorted(names, key=position_in_model) == [names[4], names[3], names[2], names[0], names[1]]


ENCODED = ["run.extensions=[docs/examples/encoder.py, docs/examples/cross_attention.py]"]
ENCODED += ["model={block_pattern: [moe, reads_source], encoder: {kind: source, settings: {length: 16}}}"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--mesh", "tensor=-1"], "--mesh=tensor=-1: tensor=-1 is no axis with a size"),
        (["--mesh", "rows=2"], "--mesh=rows=2: rows is no axis of a mesh"),
        (["--mesh", "data=32"], "needs 32 devices; verify has 16"),
        (["--mesh", "tensor=3"], "mesh.tensor=3 does not divide"),
        (["--steps", "0"], "--steps=0 is below 1"),
        (["--mesh=fsdp=2", "kernels.attention=pallas"], "the config cannot be made small: kernels.attention=pallas"),
        (["--steps", "1", "--checkpoint"], "--checkpoint saves between steps, and --steps=1: use 2 or more"),
        (ENCODED, "verify has no batches for a registered encoder ("),
        (["--precision", "fp8", "--mesh", "fsdp=2"], "--precision=fp8, but precision.fp8.recipe=none"),
        (["checkpoint.save_optimizer=false", "--checkpoint"], "saves weights only, so --checkpoint has nothing to"),
        ([], "the config's mesh is one device"),
        (["--precision=float32"], "the config's mesh is one device"),
        (["--precision=bfloat16"], "the config's mesh is one device"),
    ],
)
def test_a_mistake_is_a_sentence(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    path = tmp_path / "large.yaml"
    path.write_text(Config.model_validate(LARGE).to_yaml())
    with pytest.raises(SystemExit) as stopped:
        command.main([str(path), *arguments])
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err
    # XLA takes the last of two: the user's number of devices, for other commands, may be too small.
    assert os.environ["XLA_FLAGS"].split()[-1] == "--xla_force_host_platform_device_count=16"


def test_the_gradients_of_an_optimizer_with_other_moments_are_computed(one, expected):
    """Those that the moments of a known optimizer hold, too."""
    batch = to_global(one.program, next(batches(one.program.config, one.program.config.run.seed)))
    found = computed_gradients(one.program, one.program.init_state(), batch)
    assert found.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize("reset", [(True, True), (True, False), (False, True), (False, False)])
def test_documents_stay_as_separate_as_they_are(reset):
    settings = dict(zip(("reset_attention", "reset_positions"), reset, strict=True))
    data = LARGE["data"] | settings | ({"synthetic_documents": 2} if any(reset) else {})
    small, _ = shrink(Config.model_validate(LARGE | {"data": data}), [SIZES], 2)
    assert {key: getattr(small.data, key) for key in settings} == settings
    assert (small.data.synthetic_documents is None) == (not any(reset))
    first, counted = next(batches(small, 0)), np.arange(small.batch.sequence_length)
    for row, positions in enumerate(first["positions"]):
        if all(reset):
            ids = first["segment_ids"][row]
            counted = np.concatenate([np.arange((ids == each).sum()) for each in np.unique(ids)])
        np.testing.assert_array_equal(positions, counted)


@pytest.mark.parametrize(("packing", "is_packed"), [("none", False), ("sequential", True), (None, True)])
def test_chats_are_packed_only_if_they_are(packing, is_packed):
    data = {"kind": "chat", "train": "elsewhere.jsonl", "tokenizer": "byte", "packing": packing}
    small, _ = shrink(Config.model_validate(LARGE | {"data": data}), [SIZES], 1)
    assert ("segment_ids" in next(batches(small, 0))) == is_packed


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS.keys() - {"soap"}))
def test_the_first_moments_are_the_first_gradients_times_their_shares(kind):
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 32}
    batch = {"global_size": 1, "sequence_length": 8}
    config = Config.model_validate({"model": model, "batch": batch, "optimizer": {"kind": kind, "clip_norm": 2.0}})
    program, rng = TrainProgram.build(config, build_mesh({}, jax.devices()[:1])), np.random.default_rng(0)
    params, gradients = (
        {name: rng.standard_normal(p.stored_shape).astype(np.float32) for name, p in program.placements.items()}
        for _ in range(2)
    )
    update = program.update
    _, held = jax.jit(lambda p, g: update.directions(g, update.first(p).optimizer, p))(params, gradients)
    assert has_first_moments(program)
    for norm in (0.5, 2.0, 6.0):  # of clipped gradients, `optimizer.clip_norm` 2
        found = first_gradients(program, replace(program.abstract_state, optimizer=held), norm)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            whole = gradient * max(norm / 2, 1)
            np.testing.assert_allclose(found[name], whole, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("name", "border"),
    [("norm", 5 * 1e-5), ("later", 5 * 1e-3), ("loss", 2 * 1e-4), ("moved", 0.5 * 0.1)],
)
def test_an_optimizer_with_wider_updates_has_wider_limits_after_its_first_step(name, border):
    """An update may differ by a tenth, ten times as much as by other optimizers; so may the second step's loss."""
    base = {"loss": 2.0, "moved": 0.5}.get(name, 5.0)
    for share in (0.97, 1.03):
        own, other = (replace(made_up(**{name: n}), update_tolerance=0.1) for n in (base + share * border, base))
        assert (compare(own, other).first is None) == (share < 1)


def test_a_later_norm_is_within_four_times_the_distance_that_rounding_moved_one():
    exact, expected = made_up(), made_up(later=5.05)  # 1e-2 apart
    for share in (0.97, 1.03):
        found = made_up(later=5.05 * (1 + share * (1e-4 + 4e-2)))
        assert (compare(found, expected, exact).first is None) == (share < 1)


def test_the_worst_array_is_the_one_furthest_beyond_its_own_limit():
    found = RunDifference({"gradient": {"a": 1e-5, "b": 2e-5}}, {"gradient": {"a": 1e-6, "b": 1e-3}}, ())
    assert found.worst("gradient") == "a" and found.first.startswith("the gradient of a differs by 1.0e-05")


@pytest.mark.parametrize("nan", range(3))
def test_a_difference_that_is_no_number_is_the_worst(nan):
    """Wherever it is among the others, which its line and the sentence would name without it."""
    names, values = ("first", "second", "third"), [0.2, 0.3, 0.4]
    values[nan] = float("nan")
    found = RunDifference({"update": dict(zip(names, values, strict=True))}, {"update": dict.fromkeys(names, 0.1)}, ())
    assert found.worst("update") == names[nan]
    assert found.first is not None and f"most that of {names[nan]}, by nan" in found.first


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("flan_t5_large", ["batch.sequence_length=128", 'data.denoisers=[{"token": "a"}, {"noise_density": 0.5}]']),
        ("llava_1_5_7b", []),
        ("gemma3_4b", ["data.kind=chat", "data.train=chats.jsonl", "data.tokenizer=byte"]),
        ("qwen2_5_vl_7b", []),
        ("qwen3_vl_8b", ["data.reset_attention=true", "data.synthetic_documents=4"]),
        ("modernbert_large", ["objective.kind=masked_tokens", "objective.masking.mask_token=50284"]),
    ],
)
def test_a_second_stack_stays_in_the_small_config_and_its_fields_in_the_batches(name, overrides):
    config = load_config(
        f"configs/models/{name}.yaml",
        ["batch.global_size=8", "batch.sequence_length=4096", "data.kind=synthetic", *overrides],
    )
    small, _ = shrink(config, [SIZES], 2)
    run = Run(small, SIZES)
    [first, second] = batches(small, 0)
    assert to_global(run.program, first).keys() == {*run.program.graph.fields} - {"is_real"}
    # Each sequence has another share of targets, so that a mean over devices is not one over tokens.
    assert not first["loss_mask"][0].any() and first["loss_mask"][-1].any()
    assert (first["tokens"] != second["tokens"]).any()
    assert small.model.encoder.kind == config.model.encoder.kind
    assert len(small.span_lengths) == len(config.span_lengths)
    before, after = config.model.vision, small.model.vision
    assert (after is None) == (before is None)
    if before is not None and after is not None:
        told = "merge", "class_token", "interpolate", "projector", "bidirectional", "norm", "activation", "final_norm"
        assert [getattr(after, key) for key in told] == [getattr(before, key) for key in told]
        sized = "window", "global_layers", "deepstack_layers", "grid"
        assert [bool(getattr(after, key)) for key in sized] == [bool(getattr(before, key)) for key in sized]
        assert first["patches"].any()


@pytest.mark.parametrize(("name", "patches"), [("llava_1_5_7b", 18), ("qwen3_vl_8b", 4 * 18)])
def test_each_device_has_whole_embeddings_of_the_small_pictures(name, patches):
    """Of six devices that share a sequence, so 18 embeddings where 16 suffice; an embedding has one patch or four."""
    overrides = ["batch.global_size=8", "batch.sequence_length=4096", "data.kind=synthetic"]
    config = load_config(f"configs/models/{name}.yaml", overrides)
    vision = shrink(config, [ONE | {"context": 3, "tensor": 2}], 2)[0].model.vision
    assert vision is not None and vision.patches_per_row == patches


def made_up(**numbers: float) -> RunTrace:
    """Two steps: the gradients (3, 4) and (tiny, 0), losses, norms, and one weight that moves by 0.5."""
    given = {"big": 0.0, "tiny": 0.0, "loss": 2.0, "norm": 5.0, "later": 5.0, "moved": 0.5} | numbers
    gradients = {"big": np.array([3.0, 4.0 + given["big"]]), "tiny": np.array([given["tiny"], 0.0])}
    before, after = ({name: np.full(2, value) for name in gradients} for value in (1.0, 1.0 + given["moved"]))
    return RunTrace(
        1,
        np.array([2.0, given["loss"]]),
        np.array([given["norm"], given["later"]]),
        ({}, {}),
        gradients,
        (before, after),
        (),
    )


# By docs/verify.md: relative 1e-4 of a gradient, whose norm is 5; a gradient below a hundredth of the whole norm may be
# wrong by a millionth of that; 1e-5 of losses and of the first norm, 1e-4 of later norms; 1e-2 of an update of 0.5.
BORDERS = [("big", 5e-4, "gradient of big"), ("tiny", 5e-6, "gradient of tiny"), ("moved", 5e-3, "update of")]
BORDERS += [("loss", 2e-5, "loss of step 2"), ("norm", 5e-5, "gradient norm of step 1")]
BORDERS += [("later", 5e-4, "gradient norm of step 2")]


@pytest.mark.parametrize(("name", "border", "words"), BORDERS)
def test_a_number_differs_beyond_its_tolerance_and_not_before(name, border, words):
    base = {"loss": 2.0, "norm": 5.0, "later": 5.0, "moved": 0.5}.get(name, 0.0)
    assert compare(made_up(**{name: base + 0.97 * border}), made_up()).first is None
    assert words in (compare(made_up(**{name: base + 1.03 * border}), made_up()).first or "")
    # A gradient of a thousandth of the others may be as wrong as one that is zero.
    assert compare(made_up(tiny=5e-3 + 4e-6), made_up(tiny=5e-3)).first is None
