"""`megajax plot`: pictures show the values of metrics.jsonl, without nulls, and are deterministic."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from megajax.tools import plot

RECORDS = [
    {"step": 1, "loss": 4.0, "tokens": 100, "time": 7200.0, "learning_rate": 0.1, "grad_norm": 2.0},
    {"step": 2, "loss": None, "tokens": 200, "time": 9000.0, "learning_rate": 0.2, "grad_norm": None},
    {"step": 2, "eval_loss": None, "time": 9000.0},
    {"step": 3, "loss": 2.0, "tokens": 300, "time": 10800.0, "learning_rate": 0.3, "grad_norm": 1.0},
    {"step": 3, "eval_loss": 2.5, "time": 12600.0},
]
X = {"step": ([1, 3], [3]), "tokens": ([100, 300], [300]), "hours": ([0, 1], [1.5])}


@pytest.fixture
def make_run(tmp_path):
    """(name, records) → a run directory with these metrics."""

    def make(name: str = "run", records: list[dict] = RECORDS) -> Path:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return tmp_path / name

    return make


@pytest.fixture
def error_of(capsys):
    """(arguments...) → the error's sentence."""

    def error_of(*arguments: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            plot.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert (stopped.value.code, printed.out, len(printed.err.splitlines())) == (2, "", 1), printed.err
        assert printed.err.startswith("megajax: error: ") and printed.err.endswith(".\n")
        return printed.err

    return error_of


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def points(axes) -> list[list[list[float]]]:
    return [line.get_xydata().tolist() for line in axes.lines]


@pytest.mark.parametrize("x", X)
def test_panels_show_what_was_logged_over_the_chosen_axis(x):
    figure = plot.draw({"run": RECORDS}, x=x, baseline=5.0)
    losses, rates, norms = figure.axes
    assert norms.get_xlabel().split()[0] == x
    train, evaluation = X[x]
    assert points(losses)[:2] == [
        [list(p) for p in zip(train, [4, 2], strict=True)],
        [list(p) for p in zip(evaluation, [2.5], strict=True)],
    ]
    assert [y for _, y in points(losses)[2]] == [5, 5]
    assert legend(losses) == ["training", "evaluation", "unigram entropy"]
    assert [y for _, y in points(rates)[0]] == [0.1, 0.2, 0.3]
    assert points(norms) == [[list(p) for p in zip(train, [2, 1], strict=True)]]


def test_a_run_writes_png_and_svg_into_its_directory_the_same_each_time(make_run, capsys):
    run = make_run()
    written = []
    for _ in range(2):
        assert plot.main([str(run), "--baseline", "6"]) == 0
        written.append([(run / name).read_bytes() for name in ("loss.png", "loss.svg")])
    assert written[0] == written[1] and written[0][0].startswith(b"\x89PNG")
    words = "".join(ElementTree.fromstring(written[0][1]).itertext())
    assert "unigram entropy" in words and "gradient norm" in words
    sentence = "run: training loss 2.000 at step 3, evaluation loss 2.500 at step 3; unigram entropy 6.000."
    assert sentence in capsys.readouterr().out


def test_a_run_has_one_colour_in_all_panels_and_its_own_name(make_run, tmp_path, monkeypatch):
    with_experts = [record | {"expert_load_max": 1.5} for record in RECORDS]
    runs = [make_run("a/run"), make_run("b/run", with_experts), make_run("b/other")]
    assert plot.names_of(runs) == ["a/run", "b/run", "other"]
    figure = plot.draw(dict(zip("abc", map(plot.read_records, runs), strict=True)))
    losses, difference, loads, rates, _ = figure.axes
    assert legend(losses) == [f"{name}: {kind}" for name in "abc" for kind in ("training", "evaluation")]
    assert [line.get_color() for line in losses.lines] == ["C0", "C0", "C1", "C1", "C2", "C2"]
    assert [line.get_color() for line in rates.lines] == ["C0", "C1", "C2"]
    assert points(loads)[1] == [[r["step"], 1.5] for r in with_experts]
    monkeypatch.chdir(tmp_path)
    assert plot.main(["a/run", "b/run", "a/run/", "--output", "both.png"]) == 0
    assert Path("both.png").exists() and Path("both.svg").exists()


def test_curves_that_coincide_have_their_differences_beneath():
    def run(factor):
        return [{"step": step, "loss": factor * 10.0} for step in (1, 2, 3)]

    losses, difference = plot.draw({"one": run(1), "two": run(1.001), "three": run(0.998)}).axes
    assert [line.get_color() for line in difference.lines] == ["C1", "C2"]
    np.testing.assert_allclose(points(difference), [[[s, d] for s in (1, 2, 3)] for d in (1e-3, 2e-3)])
    scales = [plot.draw({"one": run(1), "two": run(factor)}).axes[1].get_yscale() for factor in (1.001, 1)]
    assert scales == ["log", "linear"]  # of zeros there is no logarithm
    for other in (run(1.1), run(1)[:1], [{"step": 4, "loss": 10.0}]):  # one point is no curve
        assert len(plot.draw({"one": run(1), "two": other}).axes) == 1
    spike = [*run(1.001)[:2], {"step": 3, "loss": 12.0}]  # the others coincide
    np.testing.assert_allclose(points(plot.draw({"one": run(1), "two": spike}).axes[1])[0][2], [3, 0.2])
    below = [{"step": 1, "loss": 9.8}, {"step": 2, "loss": 10.0}, {"step": 3, "loss": 9.9}]
    _, difference = plot.draw({"one": run(1), "two": below}, smooth=3).axes  # with the sign
    np.testing.assert_allclose(points(difference), [[[1, -0.01], [2, -0.01], [3, -0.005]]])


def test_a_metric_has_a_panel_and_one_that_cannot_be_drawn_is_refused(make_run, error_of, capsys):
    logged = [{"step": 1, "loss": 4.0, "accuracy": 0.5, "expert_load": [1.0, 2.0]}, {"step": 1, "eval_accuracy": 0.25}]
    losses, *panels = plot.draw({"run": logged}, metrics=["eval_accuracy", "accuracy"]).axes
    assert [(panel.get_ylabel(), *points(panel)) for panel in panels] == [
        ("eval_accuracy", [[1, 0.25]]),
        ("accuracy", [[1, 0.5]]),
    ]
    assert [panel.lines[0].get_marker() for panel in panels] == ["o", "None"]  # an evaluation is a dot
    run = make_run(records=logged)
    assert plot.main([str(run), "--metric", "accuracy", "--metric", "eval_accuracy"]) == 0
    capsys.readouterr()
    known = "accuracy, eval_accuracy, loss, step."
    assert f"--metric=acuracy is in no line of these runs: choose among {known}" in error_of(run, "--metric", "acuracy")
    assert f"--metric=expert_load has several numbers at each step: choose among {known}" in error_of(
        run, "--metric", "expert_load"
    )


def test_smoothing_is_a_mean_over_logged_steps_without_a_bias_at_the_start():
    values = np.array([4.0, 2.0, 6.0])
    assert plot.smoothed(values, 3).tolist() == [3, 4, 4]
    assert plot.smoothed(values, 2).tolist() == [3, 4, 6]  # of a step and the next
    np.testing.assert_allclose(plot.smoothed(values, 0.5), [4, (2 * 2 + 4) / 3, (6 * 4 + 2 * 2 + 4) / 7])
    raw, smooth = plot.draw({"run": [{"step": i, "loss": v} for i, v in enumerate(values)]}, smooth=3).axes[0].lines
    assert raw.get_ydata().tolist() == values.tolist() and smooth.get_ydata().tolist() == [3, 4, 4]


def test_a_damaged_line_is_left_out_and_named(make_run, capsys):
    """Such as one torn by a kill, after which the resumed run went on."""
    run, torn = make_run(), '{"step": 3, "lo'
    good = (run / "metrics.jsonl").read_text()
    for first, last in (("[1]", torn), (torn, "[1]")):
        (run / "metrics.jsonl").write_text(f"{first}\n{good}{last}\n")
        with pytest.warns(match="2 in all.*line 1"):
            assert plot.read_records(run) == RECORDS
    assert plot.main([str(run)]) == 0
    printed = capsys.readouterr()
    assert "training loss 2.000 at step 3" in printed.out
    assert re.search(r"^megajax: warning: .*2 in all.* \S+/metrics\.jsonl, line 1 is ", printed.err)


def test_a_last_line_that_is_still_written_is_left_out(make_run):
    run = make_run()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert plot.read_records(run) == RECORDS


def test_what_cannot_be_drawn_is_refused_in_a_sentence(make_run, error_of, tmp_path):
    run, no_time = make_run(), make_run("no_time", [{"step": 1, "loss": 1.0}])
    file = run / "metrics.jsonl"
    assert "nowhere has no metrics.jsonl: give the directory of a run." in error_of("nowhere")
    empty = make_run("empty", [])
    assert "empty/metrics.jsonl has no logged loss: wait for its first log line; if it has" in error_of(empty)
    (empty / "metrics.jsonl").rename(empty / "config.yaml")
    assert f"{empty} has no metrics.jsonl: wait for its first" in (error := error_of(empty))
    assert f"{empty / 'console.log'} says why." in error
    assert "lines of the metrics of no_time have no time: use --x=step" in error_of(no_time, "--x", "hours")
    assert "cannot be written" in error_of(run, "--output", file / "loss.png")
    for smooth in ("-1", "2.5", "nan", "inf"):
        assert f"--smooth={smooth} is neither" in error_of(run, "--smooth", smooth)
    assert "--baseline=nan is not a loss" in error_of(run, "--baseline", "nan")
    far = make_run("far", [{"step": step, "loss": loss} for step, loss in enumerate([-1e308, 1e308])])
    assert "far/loss cannot be drawn" in error_of(far)
    assert re.search("RUN.*python -m megajax.tools.plot --help", error_of())
    names = {"run", "no_time", "empty", "far", "metrics.jsonl", "config.yaml"}
    assert {path.name for path in tmp_path.rglob("*")} == names
