"""The planner: what it tries, what it keeps, its table, and the sentences for what it cannot plan."""

import contextlib
import itertools
import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from megajax.config import Config, load_config
from megajax.config.checks import check_mesh
from megajax.config.sentences import value
from megajax.errors import ConfigError, InputError
from megajax.layout.stages import layouts_to_try, slot_kinds
from megajax.schema.config import PipelineConfig
from megajax.tools.plan.__main__ import main
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import rates_of
from megajax.tools.plan.report import mesh_text
from megajax.tools.plan.search import Search, explained
from megajax.tools.plan.variations import VARIED, Variations, as_overrides

H200 = rates_of("h200")


@pytest.fixture(scope="module")
def config(eight_layers):
    """80 of its layers do not fit on a GPU."""
    return eight_layers(8)


# Values that no mesh of two GPUs has; each with a value to pin that none has either
OWN = {"mesh.pipeline": "mesh.tensor=3"} | dict.fromkeys(
    (*(f"mesh.{axis}" for axis in ("data", "fsdp", "expert", "context", "tensor")), "batch.num_microbatches"),
    "mesh.pipeline=3",
)
OWN |= dict.fromkeys(("pipeline.virtual_stages", "pipeline.layout"), "mesh.pipeline=3")


@pytest.mark.parametrize("key", OWN)
def test_the_files_own_value_of_a_varied_key_is_never_to_blame(eight_layers, tmp_path, key):
    section, name = key.split(".")
    own = {"pipeline": 16, "virtual_stages": 9, "layout": [1, 2]}.get(name, 3)
    texts = {}
    for more in ("", f"{section}: {{{name}: {own}}}"):
        (tmp_path / "own.yaml").write_text(f"include: {eight_layers(8)}\n{more}\n")
        with pytest.raises(InputError, match=f"^{OWN[key]} rules out every mesh of 2 GPUs") as refused:
            Search(tmp_path / "own.yaml", [OWN[key]], 2, H200).best(1)
        texts[more] = re.sub(r"\(.*?\)", "", str(refused.value))
    assert len({*texts.values()}) == 1, texts


def test_a_search_sets_the_keys_that_can_be_pinned_and_tries_each_schedule(eight_layers):
    experts = ["model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_hidden_size=64"]
    vary = Variations(load_config(eight_layers(8), experts), {}, 8, 8)
    first = next(each for each in vary.first_pass("none") if each["mesh.pipeline"] == 2)
    schedules = [*vary.schedules(first)]
    found = first | schedules[0] | next(vary.remats(first)) | next(vary.experts_over(first))
    assert found.keys() == {*VARIED} and first.keys() == {*VARIED} - {"mesh.experts_over"}
    mesh = {f"mesh.{axis}": size for axis, size in dict(data=2, fsdp=4, expert=2, context=1, tensor=2).items()}
    over = [each["mesh.experts_over"] for each in vary.experts_over(mesh)]
    assert over == [["expert"], ["expert", "data"], ["expert", "tensor"]]  # fsdp leaves less than an expert
    kinds = PipelineConfig.model_json_schema()["properties"]["schedule"]["enum"]
    assert {each["pipeline.schedule"] for each in schedules} == {*kinds} - {"gpipe"}  # slower than 1f1b


@pytest.fixture(scope="module")
def best(config) -> list[Candidate]:
    return Search(config, [], 4, H200).best(6)


def test_the_fastest_that_fit_come_first_one_of_each_mesh(best):
    times, meshes = [found.time.total for found in best], [tuple(found.plan.sizes.values()) for found in best]
    assert times == sorted(times) and len(set(meshes)) == len(meshes) == 6
    assert all(math.prod(mesh) == 4 for mesh in meshes) and all(found.gib <= H200.memory_gib for found in best)


def test_the_files_own_values_of_varied_keys_need_not_suit_what_is_pinned(eight_layers, tmp_path):
    """16 microbatches do not divide a batch of 2, tensor 8 does not divide one head, some layers need policy full."""
    path = tmp_path / "own.yaml"
    own = "batch: {num_microbatches: 16}\nmesh: {tensor: 8}\nremat: {policy: full, layers: 2}\n"
    path.write_text(f"include: {eight_layers(8)}\n{own}")
    assert Search(path, ["remat.policy=none"], 2, H200).base.remat.layers is None
    pinned = ["batch.global_size=2"]
    search = Search(path, pinned, 2, H200)
    [fastest] = search.best(1)
    changed = search.changed(fastest)
    assert any(each.startswith("batch.num_microbatches=") for each in changed)
    assert any(each.startswith("mesh.tensor=") for each in changed)
    config = load_config(path, [*pinned, *changed])
    assert check_mesh(config, 2) == fastest.plan.sizes
    with pytest.raises(InputError, match="batch.num_microbatches=16"):
        Search(path, [*pinned, "batch.num_microbatches=16"], 2, H200).best(1)


def test_microbatches_divide_each_size_of_a_batch_schedule(config):
    """Of a batch of 8 that begins with 4, so that one microbatch is not possible."""
    pinned = ["batch.schedule={0: 4, 1M: 8}"]
    found = [each.config.batch for each in Search(config, pinned, 2, H200).best(3)]
    assert found and all(batch.global_size == 8 and batch.num_microbatches in (2, 4, 8) for batch in found)
    with pytest.raises(InputError, match=r"batch.num_microbatches=1 rules out .* set batch.num_microbatches to 2, 4"):
        Search(config, [*pinned, "batch.num_microbatches=1"], 2, H200).best(1)


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


@pytest.mark.long
def test_the_search_finds_what_trying_everything_finds(config):
    """Each combination is loaded from the file and its memory is estimated; the limits rule out some and all."""
    pinned = ["model.num_experts=4", "model.num_layers=4", "batch.global_size=2", "mesh.context=1"]
    vary, ways = Search(config, pinned, 2, H200).variations, list[list[Candidate]]()
    for settings in vary.first_pass("full"):
        for experts, change in itertools.product(vary.experts_over(settings), vary.schedules(settings)):
            ways.append([])
            for remat in vary.remats(change):
                overrides = as_overrides({**settings, **change, **experts, **remat})
                with contextlib.suppress(ConfigError):
                    ways[-1].append(explained(config, [*pinned, *overrides], 2, H200))
    memory = sorted(found.gib for found in itertools.chain(*ways))
    for limit in memory[len(memory) // 3], memory[-1]:
        expected: dict[tuple, Candidate] = {}
        fitting = filter(None, (next((found for found in way if found.gib <= limit), None) for way in ways))
        for found in sorted(fitting, key=lambda found: found.time.total):
            expected.setdefault(found.mesh, found)
        best = Search(config, pinned, 2, replace(H200, memory_gib=limit)).best(3)
        figures = [[(each.time.total, each.gib) for each in found] for found in (best, list(expected.values())[:3])]
        assert figures[0] == figures[1] and len({each.mesh for each in best}) == 3
    with pytest.raises(InputError, match=f"the closest needs {memory[0]:.1f} GiB"):
        Search(config, pinned, 2, replace(H200, memory_gib=0.5 * memory[0])).best(1)
    assert len(memory) > 60


def test_the_axes_of_experts_are_varied_too(config):
    experts = ["model.num_experts=8", "model.ffn_hidden_size=4096", "mesh.context=2", "batch.global_size=2"]
    [best] = Search(config, experts, 2, H200).best(1)
    [whole] = Search(config, [*experts, "mesh.experts_over=[expert]"], 2, H200).best(1)
    assert best.config.mesh.experts_over == ("expert", "context")
    assert whole.config.mesh.experts_over == ("expert",) and best.time.total < whole.time.total
    over_context = [
        sum(number for axes, number in found.storage.state.parameters.items() if "context" in axes)
        for found in (whole, best)
    ]
    # 8 layers of 8 experts with three matrices of 4096 × 4096; a device has half of them.
    assert over_context[0] - over_context[1] == 8 * 8 * 3 * 4096 * 4096 / 2


def test_pinned_keys_are_kept_and_what_changes_numbers_is_not_varied(config):
    pinned = ["mesh={tensor: 4, fsdp: -1}", "remat.policy=full", "precision.gradients=bfloat16"]
    for found in Search(config, pinned, 8, H200).best(2):
        chosen = found.config
        assert found.plan.sizes["tensor"] == 4 and chosen.remat.policy == "full"
        assert chosen.precision.gradients == "bfloat16" and chosen.batch.global_size == 8
        assert not any("tensor" in override or "policy" in override for override in found.overrides)


@pytest.mark.parametrize(
    "pinned",
    [
        "pipeline.schedule=1f1b",
        "pipeline.virtual_stages=4",
        "pipeline.layout=[5,3]",
        "remat.layers=1",
        "mesh.context=2",
    ],
)
def test_each_key_that_is_varied_is_kept_if_it_is_pinned(config, pinned):
    key, _, value = pinned.partition("=")
    beside = ["mesh.pipeline=2"] * key.startswith("pipeline") + ["remat.policy=full"] * key.startswith("remat")
    search = Search(config, [pinned, *beside], 2, H200)
    chosen = [each.config.model_dump() for each in search.best(2)]
    section, name = key.split(".")
    assert {str(each[section][name]).replace(" ", "") for each in chosen} == {value.replace("[", "(").replace("]", ")")}


def test_keys_beside_a_pinned_one_in_braces_are_kept(config):
    [found] = Search(
        config, ["batch={num_microbatches: 2, global_size: 4}", "remat={policy: full, group: 2}"], 2, H200
    ).best(1)
    assert found.config.batch.global_size == 4 and found.plan.batch_shape[0] == 2
    assert found.config.remat.group == 2


def test_fp8_is_tried_if_asked_for_and_nothing_sets_its_recipe(config, tmp_path):
    pinned = ["mesh={pipeline: 1, context: 1, tensor: 2}", "batch.num_microbatches=1"]
    found = Search(config, pinned, 4, H200, fp8=True).best(2)
    assert found[0].in_fp8 and "precision.fp8.recipe=current" in found[0].overrides
    assert [mesh_text(each).endswith(", FP8") for each in found] == [True, True, False]
    assert not found[-1].in_fp8 and found[-1].time.total > found[0].time.total
    narrow = "model={hidden_size: 128, num_heads: 2, num_kv_heads: 2, ffn_hidden_size: 256}"  # too small for FP8
    assert [each.in_fp8 for each in Search(config, [narrow], 1, H200, fp8=True).best(1)] == [False]
    [plain] = Search(config, pinned, 4, H200).best(1)
    assert found[-1].time.total == plain.time.total and not any("fp8" in override for override in plain.overrides)
    own = tmp_path / "own.yaml"
    own.write_text(f"include: {config}\nprecision: {{fp8: {{recipe: none}}}}\n")
    for path, pinned in ((config, ["precision.fp8.recipe=current"]), (own, [])):
        with pytest.raises(InputError, match=r"--fp8 tries precision\.fp8\.recipe, but it is set to"):
            Search(path, pinned, 4, H200, fp8=True)


def test_layers_that_no_even_layout_holds_have_pipelines_too(config):
    """Seven layers on four stages; a pattern of layers that only a layout of its own keeps."""
    pinned = ["mesh.pipeline=4", "batch.num_microbatches=8"]
    [found] = Search(config, [*pinned, "model.num_layers=7"], 4, H200).best(1)
    assert found.config.pipeline.virtual_stages == 2 and found.plan.layer_table.shape[2] == 1
    pattern = ["model.num_layers=12", "model.layer_pattern=[local,local,global]", "model.sliding_window=1024"]
    [found] = Search(config, [*pinned[1:], *pattern, "mesh.pipeline=2", "pipeline.virtual_stages=1"], 2, H200).best(1)
    assert found.config.pipeline.layout is None  # six layers on each
    pattern[0] = "model.num_layers=10"
    [found] = Search(config, [*pinned[1:], *pattern, "mesh.pipeline=2", "pipeline.virtual_stages=1"], 2, H200).best(1)
    assert found.config.pipeline.layout == (6, 4) and "pipeline.layout=[6,4]" in found.overrides


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(80, 8, {1, 2, 5, 10}), (12, 4, {1, 3}), (61, 8, {1, 2, 4}), (8, 1, {1})],
)
def test_of_virtual_stages_of_one_size_the_fewest_are_tried(layers, stages, expected):
    """Those that hold all layers with at most a tenth of the layer slots empty: more of them send more often.

    61 layers leave three of 64 virtual stages empty, which no layout has.
    """
    model = {"num_layers": layers, "hidden_size": 64, "num_heads": 4, "vocab_size": 512}
    config = Config.model_validate({"model": model, "batch": {"global_size": 8, "sequence_length": 16}})
    tried = Variations(config, {}, stages, 8).schedules({"mesh.pipeline": stages})
    assert {settings["pipeline.virtual_stages"] for settings in tried} == expected


@pytest.mark.parametrize(("stages", "expected"), [(1, [2, 4, 6, None]), (2, [1, 2, 3, None]), (8, [None])])
def test_quarters_of_a_stages_layers_are_recomputed(stages, expected):
    model = {"num_layers": 8, "hidden_size": 64, "num_heads": 4, "vocab_size": 512}
    config = Config.model_validate({"model": model, "batch": {"global_size": 8, "sequence_length": 16}})
    tried = Variations(config, {"remat.policy": "full"}, 8, 8).remats({"mesh.pipeline": stages})
    assert [settings["remat.layers"] for settings in tried] == expected


@pytest.mark.parametrize(("length", "expected"), [(16, {1}), (2048, {1}), (4096, {1, 2}), (16384, {1, 2, 4, 8})])
def test_a_device_of_context_has_at_least_2048_tokens_and_short_sequences_are_whole(length, expected):
    model = {"num_layers": 8, "hidden_size": 64, "num_heads": 8, "vocab_size": 512}
    config = Config.model_validate({"model": model, "batch": {"global_size": 8, "sequence_length": length}})
    assert {mesh["context"] for mesh in Variations(config, {}, 8, 8).meshes()} == expected


def test_no_other_layout_of_equal_layers_is_faster(config):
    search = Search(config, ["model.num_layers=7", "mesh.pipeline=2", "mesh.data=1"], 2, H200)
    layouts = [None, *([first, 7 - first] for first in range(1, 7))]
    found = [search.evaluate({"batch.num_microbatches": 4, "pipeline.layout": layout}) for layout in layouts]
    default, *times = [each.time.total for each in found if each]
    assert default == min(times) == times[2] == times[3] and len(times) == 6


def test_layouts_of_dense_and_moe_layers_differ_in_their_slots(config):
    """Three dense layers before 29 MoE layers: fewer slots of one kind need more of the other."""
    mixed = ["model.num_layers=32", "model.num_experts=8", "model.first_dense_layers=3", "batch.num_microbatches=8"]
    layouts = layouts_to_try(load_config(config, mixed).model, 8)
    assert len(layouts) > 1 and all(sum(layout) == 32 for layout in layouts)
    found = [load_config(config, [*mixed, "mesh.pipeline=8", f"pipeline.layout={list(layout)}"]) for layout in layouts]
    slots = [Counter(kind.has_experts for kind in slot_kinds(each, 8)) for each in found]
    assert slots[0].total() == min(own.total() for own in slots)
    assert not any(one <= other for one, other in itertools.permutations(slots, 2))


def test_the_overrides_give_the_candidate_again(config, best):
    for found in best[:2]:
        again = explained(config, found.overrides, 4, H200)
        assert again.plan.sizes == found.plan.sizes
        assert again.time == found.time and again.memory == found.memory


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
    assert main([str(config), "--gpus", "2", "mesh.pipeline=2", "--tokens", "1e12", "--markdown"]) == 0
    printed, told = capsys.readouterr()
    assert re.fullmatch(r"[\d,]+ candidates?\n(after \d+ s: [\d,]+ candidates\n)*", told)  # on a pipe now and then
    assert "| pipeline 2, " in printed
    assert "bubble" in printed and "The fastest: mesh.data=" in printed and "usual" not in printed
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("|")]
    speed = float(rows[2][rows[0].index("tokens/s a GPU")].replace(",", ""))  # of the fastest
    [(days, hours)] = re.findall(r"([\d,.]+) days, ([\d,.]+) GPU-hours", printed)
    days, hours = (float(number.replace(",", "")) for number in (days, hours))
    assert hours == pytest.approx(1e12 / speed / 3600, rel=1e-3)
    assert days == pytest.approx(hours / 24 / 2, rel=1e-3)  # on two GPUs


def test_one_mesh_is_explained(config, capsys):
    assert main([str(config), "--gpus", "8", "--explain", "tensor=2,fsdp=-1", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "communication over tensor" in printed
    mesh = ["mesh.fsdp=4", "mesh.tensor=2"]  # of 8 sequences: two microbatches at most
    one, two = (explained(config, [*mesh, f"batch.num_microbatches={n}"], 8, H200) for n in (1, 2))
    assert two.gib < one.gib <= H200.memory_gib and one.time.total < two.time.total
    assert "| fsdp 4 × tensor 2 | – | 1 | none |" in printed
    assert "Largest microbatch that fits: 2 sequences" in printed and "twice the length" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "12"], "--gpus=12 is not a whole number of hosts of 8: use 8 or 16."),
        (["--gpus", "8", "--device", "x100"], "--device=x100 is not known: did you mean h100? The devices are h200, "),
        (
            ["--gpus", "8", "mesh.tensor=3"],
            "mesh.tensor=3 rules out every mesh of 8 GPUs: mesh.tensor=3 does",
        ),
        (
            ["--gpus", "64", "mesh.tensor=64"],
            "mesh.tensor=64 rules out every mesh of 64 GPUs: mesh.tensor=64 does not divide model.num_heads",
        ),
        (
            ["--gpus", "1", "model.num_layers=80", "batch.global_size=1"],
            "no mesh of 1 H200 holds this: the closest needs",
        ),
        (
            [
                *("--gpus", "2", "model.num_layers=16", "mesh.tensor=2", "mesh.pipeline=1"),
                *("remat={policy: none, group: 1}", "batch={global_size: 32, num_microbatches: 1}"),
            ],
            "remat.policy=none rules out every mesh of 2 H200s that holds this: the closest needs",
        ),
        (
            ["--gpus", "2", "--fewest", "mesh.tensor=3"],
            "--gpus=2 is too few: mesh.tensor=3 rules out every mesh of 2 GPUs: mesh.tensor=3 does",
        ),
        (["--gpus", "8", "--explain", "width=2"], "width is no axis of a mesh: the axes are pipeline, data"),
        (["--gpus", "1", "--device", "a100", "--fp8"], "--fp8 needs a GPU with FP8"),
        (
            ["--gpus", "1", "--device", "a100", "--explain", "tensor=1", "precision.fp8.recipe=current"],
            "precision.fp8.recipe=current (the command line: precision.fp8.recipe=current) needs a GPU with FP8",
        ),
        (["--gpus", "8", "--top", "0"], "--top=0 is not above 0: give more."),
        (["--gpus", "8", "--compile", "-1"], "--compile=-1 is below 0: give 0 or more."),
        (["--gpus", "8", "--tokens", "many"], "many is not a number of tokens: write 15T or 15e12"),
        (["--gpus", "8", "--margin", "100%"], "100% is no percentage from 0 to below 100: write 8%"),
        ([], "--gpus is missing"),
        (["--gpus", "0"], "--gpus is missing or below 1"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(config, capsys, arguments, sentence):
    with pytest.raises(SystemExit) as stopped:
        main([str(config), *arguments])
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def test_a_table_is_aligned_and_marks_what_is_near_the_limit(config, capsys):
    arguments = [str(config), "--gpus", "2", "mesh.pipeline=1", "mesh.context=1", "--usual", "--top", "3"]
    assert main([*arguments, "--margin", "90", "%"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.startswith("mesh"))
    rows = lines[lines.index(head) + 1 : lines.index(head) + 5]
    end = head.index("GiB") + len("GiB")
    figures = [row[:end].split()[-1] for row in rows]
    assert all(row[end] == " " for row in rows) and rows[3].startswith("usual: tensor 2")
    near = [0.1 * H200.memory_gib < float(each.rstrip("~")) for each in figures]
    assert [each.endswith("~") for each in figures] == near and any(near)
    assert f"Limit: {H200.memory_gib} GiB" in lines[lines.index(rows[3]) + 1]
    column = head.index("ms a step") + len("ms a step")
    fastest, usual = (float(row[:column].split()[-1].replace(",", "")) for row in (rows[0], rows[3]))
    [more] = [line.split()[4:7] for line in lines if line.startswith("The usual recipe takes ")]
    assert more[1:] == ["more", "time."] and float(more[0].rstrip("%")) == pytest.approx(
        100 * (usual / fastest - 1), abs=1
    )


def test_the_usual_recipe_has_a_sequence_in_a_microbatch_and_recomputes_what_does_not_fit(config):
    """Eight sequences on one replica"""
    least, most = (
        explained(config, ["mesh.tensor=2", "batch.num_microbatches=8", f"remat.policy={policy}"], 2, H200).gib
        for policy in ("full", "none")
    )
    for memory, policy in ((most, "none"), ((least + most) / 2, "full")):
        usual = Search(config, [], 2, replace(H200, memory_gib=memory)).usual()
        assert (usual.config.batch.num_microbatches, usual.config.remat.policy) == (8, policy)
        assert usual.plan.sizes == check_mesh(load_config(config, ["mesh.tensor=2"]), 2)
        assert usual.settings.keys() == {*VARIED} - {"mesh.experts_over"}


def test_all_is_recomputed_where_nothing_else_fits(config):
    pinned = ["mesh.tensor=2", "mesh.pipeline=1", "mesh.context=1", "batch.num_microbatches=8"]
    least = explained(config, [*pinned, "remat.policy=full"], 2, H200)
    [found] = Search(config, pinned, 2, replace(H200, memory_gib=least.gib)).best(1)
    assert found.config.remat.policy == "full" and found.gib <= least.gib


def test_a_config_that_the_usual_recipe_does_not_fit_gets_the_reason(config, capsys):
    pinned = ["mesh.pipeline=1", "mesh.context=1", "model.num_heads=1", "model.num_kv_heads=1"]
    assert main([str(config), "--gpus", "2", *pinned, "--usual", "--top", "1"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "usual recipe" in line]
    assert "mesh.tensor=2 does not divide model.num_heads=1" in line and "set mesh.tensor to 1" in line


def test_only_changed_keys_are_named(config):
    search = Search(config, ["mesh.context=1"], 2, H200)
    [found] = search.best(1)
    changed, base = search.changed(found), load_config(config)
    assert set(changed) < set(found.overrides)
    assert all(str(value(base, each.split("=")[0])) != each.split("=")[1] for each in changed)
    again, whole = load_config(config, ["mesh.context=1", *changed]), load_config(config, found.overrides)
    assert check_mesh(again, 2) == check_mesh(whole, 2) and again.remat == whole.remat and again.batch == whole.batch


@pytest.mark.parametrize("context", [1, 2, 8])
def test_microbatches_have_up_to_128k_tokens_of_a_device(context):
    """Of 64 sequences of 64K, without those that are too long for a device: each has one at least."""
    model = {"num_layers": 4, "hidden_size": 64, "num_heads": 8, "vocab_size": 256}
    config = Config.model_validate({"model": model, "batch": {"global_size": 64, "sequence_length": 2**16}})
    fixed = {"mesh.context": context, **dict.fromkeys(("mesh.tensor", "mesh.pipeline", "mesh.expert", "mesh.fsdp"), 1)}
    found = {
        64 // int(str(each["batch.num_microbatches"]))
        for each in Variations(config, fixed, context, 8).first_pass("none")
    }
    assert found == {2**n for n in range(7) if 2**n * 2**16 / context <= 2**17}


@pytest.mark.parametrize(("batch", "expected"), [(32, {1, 2, 4, 8}), (12, {1, 2, 4})])
def test_each_device_has_whole_sequences_of_each_microbatch(batch, expected):
    experts = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 64}
    model = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 256, **experts}
    config = Config.model_validate({"model": model, "batch": {"global_size": batch, "sequence_length": 4096}})
    counts = Counter()
    for settings in Variations(config, {}, 8, 8).first_pass("none"):
        shards = math.prod(int(str(settings[f"mesh.{axis}"])) for axis in ("data", "fsdp", "expert"))
        microbatches = int(str(settings["batch.num_microbatches"]))
        assert config.batch.global_size % (shards * microbatches) == 0, settings
        counts[shards, microbatches] += 1
    assert {shards for shards, _ in counts} == expected and max(m for _, m in counts) == batch
