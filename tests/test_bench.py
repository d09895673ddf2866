"""Arguments of the benchmark: configs by path and by name, and mistakes."""

import pytest

from dev import gpu_rows
from megajax.tools import bench


def test_configs_are_found_by_path_and_by_name(tmp_path):
    named = bench.synthetic_config("llama3_8b_l8", ["run.steps=3"], str(tmp_path))
    assert (named.run.name, named.run.steps, named.data.kind) == ("llama3_8b_l8", 3, "synthetic")
    (tmp_path / "mine.yaml").write_text(named.to_yaml())
    assert bench.synthetic_config(str(tmp_path / "mine.yaml"), [], str(tmp_path)) == named
    assert bench.split_runs(["a", "b", "x=1", "y=2"]) == [["a"], ["b", "x=1", "y=2"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["llama3_8b_l9"], "config file llama3_8b_l9 does not exist: "),
        (["nowhere/x.yaml"], "config file nowhere/x.yaml does not exist: give the path of a YAML file"),
        (["run.steps=3", "llama3_1b"], "no config precedes the override run.steps=3 (the command line)"),
        (["llama3_1b", "model.num_layer=3"], "did you mean model.num_layers?"),
        ([], "python -m megajax.tools.bench --help lists the arguments."),
    ],
)
def test_mistakes_are_a_sentence_before_anything_runs(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.startswith("megajax: error: ") and sentence in printed.err


def test_a_config_whose_process_is_killed_is_named_with_the_signal(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stop.py").write_text("import os, sys\nif '--one' in sys.argv:\n    os.kill(os.getpid(), 9)\n")
    assert bench.main(["quickstart", "run.extensions=[stop.py]"]) == 1
    table, errors = capfd.readouterr()
    assert "quickstart run.extensions=[stop.py]: the process was ended by SIGKILL; " in errors
    assert "| quickstart run.extensions=[stop.py] | failed |" in table


def test_the_rows_for_four_gpus_are_legal_and_have_names_of_their_own():
    rows = gpu_rows.read_rows(tiny=False)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert bool(row.config) + bool(row.train) + bool(row.peer) == 1, row
        if not row.peer:
            assert 0 < gpu_rows.prediction(row)["gib"] < gpu_rows.rates_of("h100").memory_gib, row
