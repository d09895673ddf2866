"""One mesh in detail, its picture, and the config file of a plan."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.svg import text_width
from megajax.tools.plan import explain, picture
from megajax.tools.plan.__main__ import main
from megajax.tools.plan.explain import mesh_overrides
from megajax.tools.plan.picture import COLORS, LEFT, RIGHT, WIDTH, of_phases, phases_of
from megajax.tools.plan.rates import rates_of
from megajax.tools.plan.report import mesh_text, more_time
from megajax.tools.plan.search import explained
from megajax.tools.plan.work import Traffic

H200 = rates_of("h200")


@pytest.fixture(scope="module")
def config(eight_layers):
    return eight_layers(16)


def test_communication_is_shown_by_axis_and_link(config, capsys):
    assert main([str(config), "--gpus", "16", "--explain", "fsdp=4,tensor=2", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "| data 2 × fsdp 4 × tensor 2 | data |" in printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.endswith(tuple("0123456789"))}
    assert rows["data"][1:3] == ["between", "hosts"] and rows["tensor"][1:4] == ["within", "a", "host"]
    # Of each part of eight layers four collectives of a stream of 8 × 4096 × 4096 numbers, half of it over two GPUs; of
    # embedding and head four.
    assert float(rows["tensor"][4]) == pytest.approx((8 * 2 + 1) * 4 * 8192 * 4096 * 2 / 2 / 1e9, abs=0.005)
    assert float(rows["tensor"][6]) < float(rows["tensor"][5])


def test_the_parts_of_time_and_memory_add_up_to_the_whole(config, capsys):
    assert main([str(config), "--gpus", "16", "--explain", "pipeline=2,fsdp=4,tensor=2", "--markdown"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split("|") for line in printed.splitlines() if line.startswith(("| mesh ", "| pipeline "))]
    whole = dict(zip(*([cell.strip().replace(",", "") for cell in row] for row in rows), strict=True))
    times, memory = (
        [float(n.replace(",", "")) for n in re.findall(rf"^  \D.*? ([\d,.]+) {unit}(?: +[\d.]+%)?$", printed, re.M)]
        for unit in ("ms", "GiB")
    )
    assert whole["mesh"] == "pipeline 2 × fsdp 4 × tensor 2 1f1b"
    # Each figure is rounded.
    assert sum(times) == pytest.approx(float(whole["ms a step"]), abs=0.5 + 0.05 * len(times))
    assert sum(memory) == pytest.approx(float(whole["GiB"].rstrip("~")), abs=0.05 * (1 + len(memory)))


def test_the_largest_microbatch_and_longer_sequences_are_other_meshes_of_the_same_gpus(config, capsys):
    mesh, pinned = ["mesh.fsdp=2", "mesh.tensor=8"], "batch.num_microbatches=8"
    assert main([str(config), "--gpus", "16", "--explain", "fsdp=2,tensor=8", "--device", "h200", pinned]) == 0
    printed = capsys.readouterr().out
    # 16 sequences on 2 devices: 8 microbatches of one to one of eight
    sizes = {n: explained(config, [*mesh, f"batch.num_microbatches={8 // n}"], 16, H200).gib for n in (1, 2, 4, 8)}
    largest = max(n for n, gib in sizes.items() if gib <= H200.memory_gib)
    assert f"Largest microbatch that fits: {largest} sequences on a GPU" in printed and largest > 4
    # Eight sequences of twice the length: two microbatches less do not fit 2 devices, so four of one sequence each
    twice = ["batch.sequence_length=8192", "batch.global_size=8", "batch.num_microbatches=4"]
    now, other = (explained(config, [*mesh, *each], 16, H200) for each in ([pinned], twice))
    assert other.gib != now.gib and f": {more_time(other, now)}, {other.gib:.1f} GiB" in printed


def test_a_pipelines_backward_pass_is_drawn_with_recomputation_and_copies(config, monkeypatch):
    drawn = []
    monkeypatch.setattr(picture.schedules, "svg", lambda _, costs, unit: drawn.append((costs, unit)))
    found = explained(
        config, ["mesh.pipeline=2", "mesh.fsdp=4", "batch.num_microbatches=4", "remat.policy=full"], 8, H200
    )
    picture.of_pipeline(found)
    [(costs, unit)], time = drawn, found.time
    layers = time.matmuls + time.attention + time.elementwise + sum(t.exposed for t in time.activations.values())
    again = time.recomputed.total + time.loops
    M = found.config.batch.num_microbatches
    seconds = ((1 - time.forward) * layers + again) / M
    assert unit == "ms" and costs.backward + costs.weight == pytest.approx(1e3 * seconds, abs=0.11)
    assert 1e3 * again / M > 1


def test_a_picture_has_the_phases_and_the_collectives_of_each_axis(config):
    overrides = ["mesh.fsdp=2", "mesh.tensor=2", "batch.num_microbatches=2", "remat.policy=full"]
    found = explained(config, [*overrides, "kernels.scan_unroll=1"], 8, H200)
    phases = list(phases_of(found))
    assert sum(phase.seconds for phase in phases) == pytest.approx(found.time.total) and found.time.loops
    assert [phase.name for phase in phases] == [*["forward", "head", "backward"] * 2, "casts", "update", "waiting"]
    first, _, first_back, second, _, second_back, *_ = (phase.traffic.get("data", Traffic()).sent for phase in phases)
    assert first > 0 < second_back and first_back == 0 == second  # gathered once a step, and reduced once
    drawing = ElementTree.fromstring(of_phases(found))
    boxes = [box for box in drawing.iter() if box.tag.endswith("rect")]
    legend = {box.get("fill"): after.text or "" for box, after in pairwise(drawing) if box.get("width") == "14"}
    end = 0.0  # of an entry: a square, and the text beside it
    for box, after in ((box, after) for box, after in pairwise(drawing) if box.get("width") == "14"):
        (x, y), (left, base) = ([float(node.get(name, "")) for name in "xy"] for node in (box, after))
        assert end < x < x + 14 < left and y < base <= y + 14
        end = left + text_width(after.text or "")
    words = {name: name for name in ("forward", "head", "backward", "casts", "update", "waiting")}
    words |= {"hidden": "beside computation", "exposed": "nothing hides"}
    assert {COLORS[name] for name in words} == legend.keys()
    assert all(word in legend[COLORS[name]] for name, word in words.items()), legend
    rows = {float(box.get("y", 0)) + float(box.get("height", 0)) for box in boxes if len(box)}
    axes = {axis for phase in phases for axis, traffic in phase.traffic.items() if traffic.seconds}
    assert len(rows) == 1 + len(axes)
    [ms] = [node for node in drawing.iter() if node.text == "ms"]  # of the axis of time: below the rows
    assert max(rows) < float(ms.get("y", 0)) - 8 < float(drawing.get("height", 0)) - 20
    widths = {
        color: sum(float(box.get("width", 0)) for box in boxes if box.get("fill") == color) for color in COLORS.values()
    }
    scale = (WIDTH - LEFT - RIGHT) / found.time.total
    exposed = sum(each.exposed for each in found.time.traffic.values())
    recomputed = sum(each.exposed for each in found.time.recomputed.traffic.values())
    texts = [node.text or "" for node in ElementTree.fromstring(of_phases(found)).iter() if node.tag.endswith("text")]
    assert f"a step of {1e3 * found.time.total:,.1f} ms, 2 microbatches, estimated" in texts
    assert any(mesh_text(found) in each for each in texts)
    assert f"{1e3 * found.time.total:,.0f}" in texts  # the end of the axis of time
    # The hints add up to the step's traffic without recomputation; those of the hidden and the exposed part are equal.
    hidden, exposed_hints = (
        [box[0].text or "" for box in boxes if box.get("fill") == COLORS[part] and len(box)]
        for part in ("hidden", "exposed")
    )
    assert set(hidden) <= set(exposed_hints)
    hints = "\n".join(exposed_hints)
    for axis in ("data", "fsdp", "tensor"):
        figures = re.findall(rf"^{axis}, \w+: ([\d.]+) ms, ([\d.]+) ms exposed, ([\d.]+) GB$", hints, re.M)
        ms, ms_exposed, gb = (sum(map(float, each)) for each in zip(*figures, strict=True))
        whole, again = found.time.traffic[axis], found.time.recomputed.traffic.get(axis, Traffic())
        assert ms == pytest.approx(1e3 * (whole.seconds - again.seconds), abs=0.3)  # of six figures
        assert ms_exposed == pytest.approx(1e3 * (whole.exposed - again.exposed), abs=0.3)
        assert gb == pytest.approx((whole.sent - again.sent) / 1e9, abs=0.002)
    # Computation and what nothing hides follow each other without an overlap, from the axis' start to its end.
    at = float(LEFT)
    parts = [box for box in boxes if len(box) and box.get("fill") != COLORS["hidden"]]
    for left, width in sorted((float(box.get("x", 0)), float(box.get("width", 0))) for box in parts):
        assert left == pytest.approx(at, abs=0.1)
        at = left + width
    assert at == pytest.approx(WIDTH - RIGHT, abs=0.1)
    # 14 pixels of each colour are the legend; what is recomputed is a part of the backward pass.
    assert widths[COLORS["exposed"]] - 14 == pytest.approx(scale * (exposed - recomputed), abs=0.2)
    assert widths[COLORS["head"]] - 14 == pytest.approx(scale * found.time.head, abs=0.2)


def test_the_picture_of_a_pipeline_has_its_stages(config, tmp_path, capsys):
    picture = tmp_path / "step.svg"
    arguments = ["--explain", "pipeline=4", "batch.num_microbatches=16", "pipeline.schedule=zero_bubble"]
    assert main([str(config), "--gpus", "4", *arguments, f"--picture={picture}"]) == 0
    printed = capsys.readouterr().out
    assert f"Picture: {picture}" in printed
    texts = [
        node.text or "" for node in ElementTree.fromstring(picture.read_text()).iter() if node.tag.endswith("text")
    ]
    assert "zero_bubble: 4 stages, 16 microbatches, 1 virtual stage" in texts and "stage 3" in texts
    # By the table, of 16 microbatches: a third of the matmuls for each operation, the backward pass's two thirds of the
    # rest, and copies.
    ms = {name: float(n) for name, n in re.findall(r"^  (\D*?) +([\d.]+) ms +[\d.]+%$", printed, re.M)}
    third, rest = ms["matmuls"] / 16 / 3, (ms["attention"] + ms["elementwise"]) / 16 / 3
    copies = ms["copies of saved activations"] / 16
    # The gathers and reductions of embedding and head are once a step.
    once = 1e3 * (2 + 4) * 2 * 32000 * 4096 * 3 / 4 / H200.nccl_bytes
    head = (ms["head and loss"] + ms["communication over pipeline"] - once) / 16
    [figures] = (each for each in texts if "costs: " in each)
    drawn = {name: float(n) for name, n in re.findall(r"(forward|backward|weight) ([\d.]+) ms", figures)}
    backward = third + 2 * rest + copies
    assert drawn == pytest.approx({"forward": third + rest + head, "backward": backward, "weight": third}, abs=0.06)


def test_the_written_file_is_the_config_with_the_settings_of_the_first_row(config, tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    own = [
        "batch={global_size: 8}",
        "mesh.pipeline=2",
        "model.layer_pattern=[local,global]",
        "model.sliding_window=512",
    ]
    assert main([str(config), "--gpus", "2", *own, f"--write={file}"]) == 0
    printed = capsys.readouterr().out.splitlines()
    settings = next(line for line in printed if line.startswith("The fastest: ")).split()[2:]
    assert load_config(file) == load_config(config, [*own, *settings])
    assert load_config(file).mesh.pipeline == 2 and printed[-1] == f"Written: {file}, for megajax train"
    found = explained(file, [], 2, H200)
    figures = f"2 H200s, {1e3 * found.time.total:,.0f} ms a step, {found.gib:.1f} GiB a GPU (estimates)"
    assert figures in file.read_text().splitlines()[0]
    with pytest.raises(SystemExit):
        main([str(config), "--gpus", "2", *own, f"--write={file}"])
    assert f"--write={file} exists" in capsys.readouterr().err


def test_the_written_file_of_the_fewest_gpus_is_for_them_and_says_so(config, tmp_path, capsys):
    """Two billion parameters of 16 bytes fit one GPU."""
    file = tmp_path / "plan.yaml"
    assert main([str(config), "--gpus", "4", "--fewest", f"--write={file}"]) == 0
    assert "1 H200\n" in capsys.readouterr().out and ": 1 H200, " in file.read_text().splitlines()[0]
    assert check_mesh(load_config(file), 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--explain", "tensor=2,fsdp=2"], "mesh.fsdp=2 x mesh.tensor=2 does not divide 6 devices"),
        (["--explain", "tensor=2,tensor=4"], "--explain=tensor=2,tensor=4 has tensor twice"),
        *(
            ([*one, option, *number], f"{option} has no effect with {one[0]}")
            for one in (["--explain", "tensor=2"], ["--fewest"])
            for option, *number in (["--compile", "1"], ["--fp8"], ["--usual"])
        ),
        (["--explain", "tensor=2", "--fewest"], "--fewest has no effect with --explain"),
        (["--compile", "3", "--top", "2"], "--compile=3 is more than the rows, --top=2: compile fewer"),
        (["--hosts-of", "0"], "--hosts-of=0 is not above 0"),
        (["--explain", "tensor=2", "--hosts-of", "4"], "--gpus=6 is not a whole number of hosts of 4: use 4 or 8."),
        (["--picture", "step.svg"], "--picture=step.svg is for one mesh: add --explain."),
        (["--write", "nowhere/plan.yaml"], "--write=nowhere/plan.yaml cannot be written (No such file"),
    ],
)
def test_arguments_that_contradict_each_other_are_sentences(config, capsys, arguments, sentence):
    with pytest.raises(SystemExit) as stopped:
        main([str(config), "--gpus", "6", *arguments])
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def refusal(capsys, *arguments: object) -> str:
    """The sentence with which the planner refuses the arguments."""
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("megajax: error: ")


@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ("tensor=3", []),
        ("pipeline=3", []),
        ("context=16", []),
        ("data=16", []),
        ("data=8", ["batch.global_size=12"]),
        ("pipeline=4", ["batch.num_microbatches=2"]),
    ],
)
def test_a_search_with_an_impossible_axis_gives_the_reason_of_explain(config, capsys, mesh, others):
    alone = refusal(capsys, config, "--gpus", 8, "--explain", mesh, *others)
    searched = refusal(capsys, config, "--gpus", 8, f"mesh.{mesh}", *others)
    assert searched.startswith(f"mesh.{mesh} rules out every mesh of 8 GPUs: ")
    problem = re.split(r" \(the command line|: use", searched.partition(" GPUs: ")[2])[0]
    assert problem in alone


@pytest.mark.parametrize("written", ["command line", "file"])
@pytest.mark.parametrize("number", [1, 2, 3, 16])
@pytest.mark.parametrize("mesh", ["pipeline=4", "data=8", "pipeline=2,fsdp=4"])
def test_microbatches_that_the_mesh_cannot_have_are_named_with_those_that_it_can(
    eight_layers, capsys, mesh, number, written
):
    """The first number of the sentence is legal with the mesh."""
    file, key = eight_layers(16), f"batch.num_microbatches={number}"
    if written == "file":
        file.write_text(file.read_text().replace("batch: {", f"batch: {{num_microbatches: {number}, "))
    arguments = [file, "--gpus", 8, "--explain", mesh, *([key] if written == "command line" else [])]
    overrides = [*mesh_overrides(mesh), key]
    try:
        explained(file, overrides, 8, H200)
    except ConfigError:
        sentence = refusal(capsys, *arguments)
        assert key in sentence and (written == "command line" or f"{file}, line 5" in sentence)
        usable = re.search(r"(?:use|batch.num_microbatches to) (\d+)", sentence)
        assert usable, sentence
        explained(file, [*mesh_overrides(mesh), f"batch.num_microbatches={usable[1]}"], 8, H200)
    else:
        assert main([*map(str, arguments)]) == 0


def test_a_missing_config_is_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.yaml"), "--gpus", "8"])
    assert "none.yaml does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sequences", "mesh", "memory", "one"),
    [(256, "data=4", 128.6, "batch.num_microbatches=4"), (4, "data=2,fsdp=2", 12, "mesh.fsdp=4 mesh.data=1")],
)
def test_a_mesh_that_does_not_fit_says_so_first_with_changes_that_do(
    eight_layers, tmp_path, capsys, sequences, mesh, memory, one
):
    """Each change, with the config's other settings, fits by the planner's own estimate, and its figures are those."""
    config, pinned, file = eight_layers(sequences), ["batch.num_microbatches=1"], tmp_path / "rates.json"
    file.write_text(f'{{"memory_gib": {memory}}}')
    assert main([str(config), "--gpus", "4", f"--rates={file}", "--explain", mesh, *pinned]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    settings = [*pinned, *mesh_overrides(mesh)]
    before = explained(config, settings, 4, H200)
    assert before.gib > memory and first.startswith(f"Does not fit: {before.gib:.1f} GiB")
    changes = [line.split() for line in others[: others.index("")]]
    assert len(changes) == 3 and one in [" ".join(change) for _, _, _, _, *change in changes]
    for milliseconds, _, gib, _, *change in changes:
        found = explained(config, [*settings, *change], 4, H200)
        assert found.gib <= memory and gib == f"{found.gib:.1f}"
        assert milliseconds == f"{1e3 * found.time.total:,.1f}"
    assert [float(row[0].replace(",", "")) for row in changes] == sorted(float(r[0].replace(",", "")) for r in changes)


@pytest.mark.long
def test_more_gpus_are_named_if_fewer_than_three_changes_of_the_mesh_fit(eight_layers, capsys, monkeypatch):
    config, pinned, tried = eight_layers(8), ["model.num_layers=250", "batch.num_microbatches=1"], set[str]()

    def noted(path, overrides, *more):
        tried.update(overrides)
        return explained(path, overrides, *more)

    monkeypatch.setattr(explain, "explained", noted)
    assert main([str(config), "--gpus", "8", "--device", "h200", "--explain", "fsdp=8", *pinned]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("Does not fit")
    changes = [line.split() for line in others[: others.index("")]]
    with_more = [row for row in changes if any(each.startswith("--gpus=") for each in row)]
    assert len(changes) == 3 and with_more

    def gpus_of(change: list[str]) -> int:
        return next((int(each.removeprefix("--gpus=")) for each in change if each.startswith("--gpus=")), 8)

    numbers = [gpus_of(row) for row in changes]
    assert numbers == sorted(numbers)
    for _, _, gib, _, *change in with_more:
        gpus = gpus_of(change)
        rest = [each for each in change if not each.startswith("--gpus=")]
        found = explained(config, ["mesh.fsdp=8", *pinned, *rest], gpus, H200)
        assert found.gib <= H200.memory_gib and gib == f"{found.gib:.1f}"
    assert {"remat.policy=full", "optimizer.offload=1"} <= tried
    for override in tried:  # one that cannot be read would be left out in silence
        if not override.startswith("mesh.pipeline="):  # which needs more microbatches
            load_config(config, [override])


def test_a_mesh_is_explained_and_written_without_data_batch_or_microbatches(tmp_path, capsys):
    """The written file has the number of microbatches of the table, with which it can be trained."""
    config, file = tmp_path / "model.yaml", tmp_path / "plan.yaml"
    config.write_text("model: {num_layers: 8, hidden_size: 1024, num_heads: 8, vocab_size: 32000}")
    assert main([str(config), "--gpus", "4", "--explain", "pipeline=4", f"--write={file}", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "batch.global_size is not set: 16 is assumed" in printed
    head, _, row = (line.split(" | ") for line in printed.splitlines() if line.startswith("| "))
    written = load_config(file)
    assert row[0] == "| pipeline 4, 1f1b" and row[head.index("microbatches")] == str(written.batch.num_microbatches)
    assert check_mesh(written, 4)["pipeline"] == 4
