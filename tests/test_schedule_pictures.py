"""Pictures of pipeline schedules as text and as SVG, and the command that makes them."""

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from megajax.step.pipeline.schedules import make_schedule
from megajax.step.pipeline.simulator import Costs, sends
from megajax.tools.schedule import READABLE_BOX, SENDING, WIDEST_PLOT, _label, draw, main, svg


@pytest.mark.smoke
def test_the_drawing_of_a_small_schedule():
    assert draw(make_schedule("zero_bubble", 2, 2, 2)).splitlines() == [
        "tick       0  1  2  3  4  5  6  7",
        "stage 0 F 0a 1a 0b 1b  .  .  .  .",
        "        B  .  .  .  . 0b 1b 0a 1a",
        "        W  .  .  .  . 0b 1b 0a 1a",
        "stage 1 F  . 0a 1a 0b 1b  .  .  .",
        "        B  .  .  . 0b 1b 0a 1a  .",
        "        W  .  .  .  . 1b 0a 1a 0b",
        "",
        "F: forward, B: gradients of inputs, W: gradients of weights",
        "number: microbatch; a to b: virtual stage 0 to 1; dot: no such operation",
    ]


@pytest.mark.parametrize(("stages", "label"), [(1, "3"), (2, "3b"), (26, "3z"), (27, "3.26")])
def test_virtual_stages_have_letters_as_far_as_they_reach(stages, label):
    schedule: Any = SimpleNamespace(virtual_stages=stages)
    assert _label(schedule, 3, stages - 1) == label


def test_a_drawing_wider_than_the_terminal_is_broken_into_blocks():
    schedule = make_schedule("1f1b", 4, 32)
    whole, broken = draw(schedule).split("\n\n"), draw(schedule, width=80).split("\n\n")
    assert len(whole) == 2 and whole[-1] == broken[-1]
    assert all(len(line) <= 80 for block in broken for line in block.splitlines())
    left = len("stage 0 F")
    by_row = zip(*(block.splitlines() for block in broken[:-1]), strict=True)
    joined = [lines[0][:left] + "".join(line[left:] for line in lines) for lines in by_row]
    assert joined == whole[0].splitlines()


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 1.5, 0.0), Costs(1.0, 2.0, 0.5, send=0.25)])
@pytest.mark.parametrize(("kind", "size"), [("gpipe", (2, 3, 1)), ("1f1b", (4, 8, 2)), ("zero_bubble", (3, 6, 2))])
def test_the_svg_has_each_operation_once_and_no_two_boxes_overlap(kind, size, costs):
    P, M, R = size
    schedule = make_schedule(kind, P, M, R)
    picture = ElementTree.fromstring(svg(schedule, costs))
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.get("class")]
    named = Counter(box.findtext(f"{SVG}title", "").rpartition(", tick")[0] for box in boxes)
    operations = ("forward", "backward", "weight") if kind == "zero_bubble" else ("forward", "backward")
    assert named == Counter(
        f"{operation}, microbatch {m}, virtual stage {r}, stage {s}"
        for operation, m, r, s in itertools.product(operations, range(M), range(R), range(P))
    )
    sending = [box for box in picture.iter(f"{SVG}rect") if box.get("fill") == SENDING]
    sending.sort(key=lambda box: float(box.get("y", "")))  # the legend first
    # The others are at the ends of the ticks that send, up to the line of the next one.
    lines = sorted(float(line.get("x1", "")) for line in picture.iter(f"{SVG}line") if line.get("stroke-dasharray"))
    ends = [line for line, sent in zip(lines[1:], sends(schedule), strict=True) if sent and costs.send]
    drawn = sorted(float(box.get("x", "")) + float(box.get("width", "")) for box in sending[1:])
    assert drawn == pytest.approx(ends, abs=0.03) and len(sending) == len(ends) + (costs.send > 0)
    by_row: dict[str, list[tuple[float, float]]] = {}
    for box in boxes:
        x, width = float(box.get("x", "")), float(box.get("width", ""))
        by_row.setdefault(box.get("y", ""), []).append((x, x + width))
    assert len(by_row) == P
    for spans in by_row.values():
        spans.sort()
        assert all(end <= start + 0.03 for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= float(picture.get("width", ""))
    backward = costs.backward + (0 if kind == "zero_bubble" else costs.weight)
    whole = {"forward": costs.forward, "backward": backward, "weight": costs.weight}
    named_costs = ", ".join(f"{name} {whole[name]:g} ms" for name in operations)
    assert f"costs: {named_costs}" in svg(schedule, costs, "ms")
    widths = {name: {float(box.get("width", "")) for box in boxes if box.get("class") == name} for name in operations}
    (unit,) = widths["forward"]
    for name in operations:
        assert list(widths[name]) == [pytest.approx(unit * whole[name] / whole["forward"], abs=0.05)]


def test_the_command_prints_a_drawing_and_writes_the_picture(tmp_path):
    command = [sys.executable, "-m", "megajax.tools.schedule"]
    arguments = "--stages 4 --microbatches 8 --schedule 1f1b --virtual-stages 2".split()
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert draw(make_schedule("1f1b", 4, 8, 2)) in done.stdout
    assert "ticks      26\n" in done.stdout
    assert "bubble     15.8% of the time\n" in done.stdout  # 3/2 of 9 and a half
    assert "in flight  5.5 4.5 3.5 2.5 " in done.stdout
    assert "slots      11 for activations, 0 deferred, 1 for the head\n" in done.stdout
    assert done.stdout.endswith("Picture: 1f1b_p4_m8_r2.svg\n")
    ElementTree.parse(tmp_path / "1f1b_p4_m8_r2.svg")


def test_the_command_draws_one_operation_a_tick_or_lockstep(tmp_path, capsys):
    sizes = ["--stages", "2", "--microbatches", "3", "--svg", str(tmp_path / "picture.svg")]
    assert main(sizes) == 0
    drawn = capsys.readouterr().out
    assert draw(make_schedule("1f1b", 2, 3, parts_per_backward=2)) in drawn and "slots      2 for activations" in drawn
    assert drawn.startswith("1f1b: 2 stages, 3 microbatches, 1 virtual stage, one operation a tick\n")
    assert main([*sizes, "--lockstep"]) == 0
    drawn = capsys.readouterr().out
    assert draw(make_schedule("1f1b", 2, 3)) in drawn and "slots      3 for activations" in drawn


def test_the_schedule_of_a_config_is_drawn_and_options_replace_its_numbers(tmp_path, capsys):
    run = ["quickstart", "mesh.pipeline=2", "batch.num_microbatches=4", "remat.policy=none"]
    svg = ["--svg", str(tmp_path / "a.svg")]
    for more, title in (
        ([], "1f1b: 2 stages, 4 microbatches, 1 virtual stage, one operation a tick\n"),
        (["remat.policy=full"], "1f1b: 2 stages, 4 microbatches, 1 virtual stage\n"),
        (["pipeline.schedule=gpipe", "--stages", "3"], "gpipe: 3 stages, 4 microbatches, 1 virtual stage\n"),
        (["pipeline.virtual_stages=2"], "1f1b: 2 stages, 4 microbatches, 2 virtual stages\n"),
    ):
        assert main([*run, *more, *svg]) == 0
        assert capsys.readouterr().out.startswith(title)
    with pytest.raises(SystemExit):
        main(["quickstart", *svg])
    assert "mesh.pipeline=1" in capsys.readouterr().err


def test_the_command_takes_costs_and_a_file(tmp_path, capsys):
    path = tmp_path / "picture.svg"
    costs = "--forward 1 --backward 2 --weight 0.5 --send 0.1".split()
    assert main(["--stages", "2", "--microbatches", "2", "--schedule", "zero_bubble", *costs, "--svg", str(path)]) == 0
    assert f"Picture: {path}\n" in capsys.readouterr().out
    assert path.read_text() == svg(make_schedule("zero_bubble", 2, 2), Costs(1.0, 2.0, 0.5, 0.1))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--stages 0", "stages=0 is below 1: give 1 or more."),
        ("--schedule dualpipe", "schedule=dualpipe is not known"),
        (
            "--stages 4 --microbatches 6 --virtual-stages 2",
            "with virtual_stages=2, microbatches=6 must be a multiple of stages=4",
        ),
        ("--stages four", "argument --stages: invalid int value: 'four'"),
        ("--send -1", "send=-1 is not a cost"),
        ("--forward nan", "forward=nan is not a cost"),
        ("--colour red", "--colour is not an option"),
        ("--svg nowhere/a.svg", "--svg=nowhere/a.svg cannot be written (No such file or directory)"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        main(arguments.split())
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"megajax: error: {sentence}") and error.endswith(".\n") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_schedule_too_long_for_legible_boxes_is_shown_by_one_period():
    """16 virtual stages on each of 8, 128 microbatches: in a period every stage runs each of its own 8 times."""
    schedule = make_schedule("1f1b", 8, 128, 16)
    picture = svg(schedule, Costs())
    root = ElementTree.fromstring(picture)
    drawn = [node for node in root.iter() if node.get("class") in ("forward", "backward")]
    assert len(drawn) == 2 * 8 * 8 * 16 and min(float(node.get("width", 0)) for node in drawn) >= READABLE_BOX
    assert float(root.get("width", "0")) <= WIDEST_PLOT + 200
    ticks = {int(node.findtext(f"{SVG}title", "").rpartition("tick ")[2]) for node in drawn}
    lines = sorted(float(node.get("x1", "")) for node in root.iter(f"{SVG}line") if node.get("stroke-dasharray"))
    for node in drawn:  # between the lines of its tick
        tick = int(node.findtext(f"{SVG}title", "").rpartition("tick ")[2]) - min(ticks)
        x, width = float(node.get("x", "")), float(node.get("width", ""))
        assert lines[tick] <= x + 0.03 and x + width <= lines[tick + 1] + 0.03
    assert f"{schedule.ticks} ticks" in picture
    assert f"shown: ticks {min(ticks)} to {max(ticks)}, one period" in picture
    assert "one period" not in svg(make_schedule("1f1b", 4, 8, 2), Costs())


def test_a_period_of_one_operation_a_tick_has_a_forward_and_a_whole_backward_operation_for_each_stage():
    """As many of them as there are stages; a backward operation has two parts."""
    parts = {"forward": 1, "backward": 2}
    schedule = make_schedule("1f1b", 4, 1000, parts_per_backward=parts["backward"])
    picture = ElementTree.fromstring(svg(schedule, Costs()))
    drawn = Counter(
        (node.get("class"), node.findtext(f"{SVG}title", "").partition(", tick")[0].rpartition(" ")[2])
        for node in picture.iter()
        if node.get("class") in parts
    )
    assert drawn == {(kind, str(stage)): 4 * count for kind, count in parts.items() for stage in range(4)}
