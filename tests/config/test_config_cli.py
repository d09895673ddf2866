"""The command line: its output on stdout and stderr, and the exit status."""

import sys
from pathlib import Path

import pytest
import yaml

from megajax.config import Config, load_config
from megajax.config.cli import parse_command_line
from megajax.config.difference import between
from megajax.config.load import keys
from megajax.console import user_errors
from megajax.errors import InputError

pytestmark = pytest.mark.usefixtures("base_config")

BASE = """\
model: {num_layers: 4, hidden_size: 64, num_heads: 8, vocab_size: 1000}
batch: {global_size: 8, sequence_length: 32}
data: {kind: synthetic}
"""
USAGE = "python -m megajax.train CONFIG.yaml [section.key=value ...] [--print-config] [--diff [OTHER.yaml]]"
USAGE += " [--help [SECTION]]"
HELP = "python -m megajax.train --help lists the arguments."


def parse(*argv: str) -> Config:
    with user_errors():
        return parse_command_line(argv)
    raise AssertionError("unreachable")


def test_config_and_overrides_give_a_config():
    assert parse("x.yaml", "run.steps=5", "mesh.fsdp=-1") == load_config("x.yaml", ["run.steps=5", "mesh.fsdp=-1"])


@pytest.mark.smoke
@pytest.mark.parametrize("argv", ["x.yaml --print-config run.steps=5", "--print-config x.yaml run.steps=5"])
def test_print_config_prints_what_runs_again_to_the_same_result(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv.split())
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    Path("printed.yaml").write_text(shown)
    assert load_config("printed.yaml") == load_config("x.yaml", ["run.steps=5"])
    assert load_config("printed.yaml").to_yaml() == shown


def printed(argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `argv` prints before it ends with status 0."""
    with pytest.raises(SystemExit) as stop:
        parse(*argv.split())
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", ["--help", "x.yaml --help", "--help x.yaml", "--help x.yml", "-h", "--help run.steps=3"]
)
def test_help_shows_usage_and_sections(argv, capsys):
    shown = printed(argv, capsys)
    assert USAGE in shown and "--help SECTION shows its keys" in shown
    for section, field in Config.model_fields.items():
        assert f"  {section:14} {field.annotation.__doc__}\n" in shown


def test_help_of_a_section_or_key_shows_its_keys_and_help_all_shows_every_key(capsys):
    line = "  logging.profile_steps  Number of steps in the trace. [int, default: 3]\n"
    everything = printed("--help all", capsys)
    assert all(f"  {key}  {field.description} [" in everything for key, field in keys())
    logging = printed("--help logging", capsys)
    assert line in logging and "  run.steps  " not in logging and "  model." not in logging
    assert printed("--help logging.profile_steps", capsys).endswith(line)
    assert "  model.router.jitter  " in printed("--help model.router", capsys)


def test_diff_prints_the_shortest_config_that_loads_to_the_same(capsys):
    assert yaml.safe_load(printed("x.yaml --diff", capsys)) == yaml.safe_load(BASE)
    # run.dir follows from run.name, and the schedule's last two keys from run.steps and its kind.
    overrides = ["run.name=a", "run.steps=50", "schedule.kind=wsd", "model.position=learned"]
    difference = printed(f"--diff x.yaml {' '.join(overrides)}", capsys)
    assert printed(f"x.yaml {' '.join(overrides)} --print-config --diff", capsys) == difference
    Path("short.yaml").write_text(difference)
    assert load_config("short.yaml") == load_config("x.yaml", overrides)
    values = yaml.safe_load(difference)
    assert values["run"] == {"name": "a", "steps": 50} and values["schedule"] == {"kind": "wsd"}
    assert values["model"]["position"] == "learned" and "max_positions" not in values["model"]


def test_diff_of_two_configs_shows_both_values(capsys):
    Path("y.yaml").write_text(BASE.replace("num_layers: 4", "num_layers: 6"))
    shown = [line.split() for line in printed("x.yaml run.seed=7 --diff y.yaml", capsys).splitlines()]
    assert shown == [
        ["key", "x.yaml", "y.yaml"],
        ["run.seed", "7", "1234"],
        ["model.num_layers", "4", "6"],
    ]
    assert printed("x.yaml --diff x.yaml", capsys) == "x.yaml and x.yaml resolve to the same config.\n"
    one, other = (
        config.model_copy(update={"run": config.run.model_copy(update={"hook_settings": settings})})
        for config, settings in ((parse("x.yaml"), {"norm": {}}), (parse("x.yaml"), {"norm": {"every": 2}}))
    )
    _, row = between(one, other, "a", "b").splitlines()  # other keys: different as a whole
    assert row.split() == ["run.hook_settings.norm", "{}", "{every:", "2}"]


def test_overrides_may_come_before_the_config():
    assert parse("run.steps=5", "x.yaml", "mesh.fsdp=-1") == load_config("x.yaml", ["run.steps=5", "mesh.fsdp=-1"])


ERRORS = {
    "": f"no config is given (the command line): write {USAGE}.",
    "run.steps=5": f"no config is given (the command line): write {USAGE}.",
    "x.yaml --whatever": f"--whatever is not an option; {HELP}",
    "x.yaml --steps": f"--steps is not an option: write run.steps=VALUE; {HELP}",
    "x.yaml --lr mesh.data=2": f"--lr is not an option: write schedule.learning_rate=VALUE; {HELP}",
    "x.yaml --lr=3e-4": f"--lr is not an option: write schedule.learning_rate=3e-4; {HELP}",
    "x.yaml --mesh.tensor 2": f"--mesh.tensor is not an option: write mesh.tensor=2; {HELP}",
    "--help modle": "modle is not a section of the config (the command line): did you mean the section model?",
    "x.yaml --diff z.yaml": (
        "config file z.yaml does not exist: give the path of a YAML file, or the name of one in configs/, such as "
        "llama3_8b."
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("argv", ERRORS)
def test_a_mistake_is_one_sentence_on_stderr_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv.split())
    shown = capsys.readouterr()
    assert stop.value.code == 2 and shown.out == ""
    assert shown.err == f"megajax: error: {ERRORS[argv]}\n"


def test_other_user_errors_end_the_same_way_and_our_own_are_not_hidden(capsys):
    with pytest.raises(SystemExit) as stop, user_errors():
        raise InputError("file.bin is missing: make it.")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "megajax: error: file.bin is missing: make it.\n"
    with pytest.raises(ZeroDivisionError), user_errors():
        print(1 / 0, file=sys.stderr)


def test_a_warning_is_one_line_on_stderr(capsys):
    parse("x.yaml", "remat.layers=2")
    expected = (
        "megajax: warning: remat.layers=2 has no effect with remat.policy=none"
        " (the command line: remat.layers=2): remove it.\n"
    )
    assert capsys.readouterr().err == expected
