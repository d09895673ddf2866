"""README and docs are correct: links lead somewhere, commands run, YAML loads, the key reference is up to date."""

import importlib.util
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from megajax import commands as command_line
from megajax import load_weights
from megajax.config import RematPolicy, load_config
from megajax.config.load import keys
from megajax.console import COMMANDS
from megajax.errors import InputError
from megajax.layout.kinds import is_gated
from megajax.ops.mlp_activation import FUNCTIONS
from megajax.optim.schedule import make_schedule
from megajax.options.activations import ACTIVATIONS
from megajax.options.registered import HOOKS
from megajax.options.remat import POLICIES
from megajax.options.schedules import SCHEDULES
from megajax.sources import SOURCES, find_source

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
MINIMAL = """
model: {num_layers: 4, hidden_size: 64, num_heads: 4, vocab_size: 257}
batch: {global_size: 8, sequence_length: 64}
data: {train: data/my_text_document}
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def commands(page: Path) -> list[str]:
    """Command lines of the page's bash blocks, comments cut off, continued lines joined."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A directory with the files of the README's reader: configs/, data/my.jsonl and the README's my.yaml."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "data").mkdir()
    text = "".join(json.dumps({"text": f"Document {i} has a few words. " * 20}) + "\n" for i in range(100))
    (tmp_path / "data/my.jsonl").write_text(text)
    (tmp_path / "my.yaml").write_text(
        next(block for block in blocks(ROOT / "README.md", "yaml") if "name: my" in block)
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def quoted(text: str) -> list[str]:
    """The words of the README's one command that contains `text`."""
    (command,) = [line for line in commands(ROOT / "README.md") if text in line]
    return shlex.split(command)


def run(words: list[str]) -> None:
    """Run `megajax COMMAND ARGUMENTS` in this process."""
    assert words[0] == "megajax", words
    try:
        status = command_line.main(words[1:])
    except SystemExit as stop:  # --help and --print-config
        status = stop.code
    assert not status, words


@pytest.mark.smoke
def test_readme_lists_every_command():
    paragraph = re.search(
        r"The command `megajax` is in the environment: .*?`megajax --help`", PAGES[0].read_text(), re.S
    )
    assert paragraph and set(re.findall(r"`(?:megajax )?([a-z-]+)`", paragraph[0])) - {"megajax", "--help"} == set(
        COMMANDS
    )


def test_key_reference_is_up_to_date():
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "dev/config_reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    page = reference.PAGE.read_text()
    assert reference.updated(page) == page, "run python dev/config_reference.py"
    assert re.findall(r"^\| `([\w.]+)`", page, re.M) == [key for key, _ in keys()]


@pytest.mark.smoke
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


@pytest.mark.smoke
def test_files_that_the_architecture_names_exist():
    """In its table of Megatron-LM's files the right column is exact; elsewhere a path may begin within a folder."""
    page, package = (ROOT / "docs/architecture.md").read_text(), ROOT / "megajax"
    counterparts = page.partition("| Megatron-LM | here |")[2].partition("\n\n")[0]
    paths = r"`([\w/]+(?:\.py|/))`"
    rows = [row.split("|")[2] for row in counterparts.strip().splitlines()[1:]]
    exact = [path for row in rows for path in re.findall(paths, row)]
    assert len(rows) > 30 and len(exact) > 50
    assert not [path for path in exact if not (package / path).exists()]
    others = re.findall(paths, page.replace(counterparts, ""))
    assert not [path for path in others if not (any(package.rglob(path)) or (ROOT / path).exists())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_in_the_docs_loads(page, workplace):
    (workplace / "minimal.yaml").write_text(MINIMAL)
    for number, block in enumerate(blocks(page, "yaml")):
        include = "" if block.startswith("include:") else "include: ../minimal.yaml\n"
        path = workplace / "examples" / f"{number}.yaml"
        path.parent.mkdir(exist_ok=True)
        (path.parent / "models").exists() or (path.parent / "models").symlink_to(ROOT / "configs/models")
        path.write_text(include + block)
        load_config(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configs_and_overrides_of_quoted_commands_load(page, workplace):
    for script in ROOT.glob("docs/examples/*.sh"):
        (workplace / script.name).symlink_to(script)
    for command in commands(page):
        if "from-megatron" in command:
            run(shlex.split(command))  # writes the config of a command below
        words = [word for word in shlex.split(command) if not word.startswith("--")]
        training = re.search(r"(?:^|&& |-m )megajax[ .]train\b(.*)", shlex.join(words))
        if training is None:
            continue
        arguments = shlex.split(training[1])
        if arguments:
            load_config(arguments[0], arguments[1:])


@pytest.mark.smoke
def test_help_and_preprocess_and_print_config_run_as_quoted(workplace, capsys):
    run(quoted("megajax preprocess"))
    assert "100 documents" in capsys.readouterr().out
    run(["megajax", "train", "--help"])
    assert "mesh.tensor" in capsys.readouterr().out
    run(quoted("--print-config"))
    (workplace / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_config("printed.yaml") == load_config("my.yaml")


def test_readme_library_example_trains(workplace, capsys):
    run(quoted("megajax preprocess"))
    config = (workplace / "my.yaml").read_text()
    small = {"num_layers": 1, "hidden_size": 32, "global_size": 8, "sequence_length": 32}  # as a test should be
    for key, size in small.items():
        config, count = re.subn(rf"\b{key}: \d+", f"{key}: {size}", config)
        assert count == 1, key
    (workplace / "my.yaml").write_text(config)
    (example,) = blocks(ROOT / "README.md", "python")
    exec(example, {})
    assert "step 20/20" in capsys.readouterr().out
    assert (workplace / "runs/library/metrics.jsonl").exists()


@pytest.mark.long
def test_the_extensions_of_the_docs_train(workplace):
    page = ROOT / "docs/extensions.md"
    names = ("my_blocks", "my_objectives", "my_remat", "my_activation")
    names += ("my_schedule", "my_optimizer", "my_hooks", "my_data", "my_source")
    sources = dict(zip(names, blocks(page, "python"), strict=True))  # my_optimizer: test_registered_optimizers.py
    for name, source in sources.items():
        (workplace / f"{name}.py").write_text(source)
    command, focal, remat, hook = blocks(page, "sh")  # not bash: a process can register the block once only
    small = ["data.kind=synthetic", "model.num_layers=2", "model.hidden_size=32", "mesh.data=1", "mesh.tensor=2"]
    small += ["run.steps=2", "batch.sequence_length=16", "mesh.fsdp=4", "batch.global_size=4"]
    run([*shlex.split(command), *small])
    lines = (workplace / "runs/my/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["loss"] == pytest.approx(math.log(257), rel=0.02)  # before any update
    shape = load_weights(workplace / "runs/my")["blocks.power.mlp.up"].shape
    assert shape == (1, 32, 128)  # one of two layers; the default width of swiglu is 4 times the model's
    hooked = ["run.extensions=[my_objectives.py,my_hooks.py]", *shlex.split(hook)[-2:], "run.steps=10"]  # in one run
    run([*shlex.split(focal), *small, "model.num_layers=1", "run.name=focal", *hooked])
    lines = (workplace / "runs/focal/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["loss"] == pytest.approx((256 / 257) ** 1.5 * math.log(257), rel=0.02)

    norms = {line["step"]: line["all_weights_norm"] for line in map(json.loads, lines) if "all_weights_norm" in line}
    assert [*norms] == [5, 10]
    squares = sum(np.sum(np.square(w, dtype=np.float64)) for w in load_weights(workplace / "runs/focal").values())
    assert norms[10] == pytest.approx(np.sqrt(squares), rel=1e-5)
    HOOKS.pop("weight_norm")

    np.savez("weights.npz", **load_weights(workplace / "runs/focal"))
    config = load_config("my.yaml", ["run.extensions=[my_source.py]"])
    with find_source("weights.npz", "path").open(config.model) as arrays:
        assert arrays["final_norm"].shape == (32,)
    assert SOURCES.pop(0).__name__ == "NumpyFile"

    config = load_config("my.yaml", [word for word in shlex.split(remat) if "=" in word])
    assert config.remat.chosen == POLICIES.pop("attention_outputs") == RematPolicy("attention_outputs", ("attention",))

    config = load_config("my.yaml", ["run.extensions=[my_activation.py]", "model.activation=reglu"])
    assert is_gated(config.model) and ACTIVATIONS.pop("reglu") and FUNCTIONS.pop("reglu")

    of_schedule = ["schedule.kind=steps_down", "schedule.warmup_steps=2", "schedule.decay_steps=10"]
    of_schedule.append("schedule.settings={falls: 2}")
    config = load_config("my.yaml", ["run.extensions=[my_schedule.py]", "schedule.learning_rate=0.8", *of_schedule])
    rate = make_schedule(config.schedule)
    assert [float(rate(step)) for step in (1, 2, 5, 6, 9, 10, 14)] == pytest.approx([0.4, 0.8, 0.8, 0.4, 0.4, 0.2, 0.2])
    SCHEDULES.pop("steps_down")


@pytest.mark.long
def test_the_custom_loop_trains_evaluates_and_restores(workplace, capsys):
    page = ROOT / "docs/custom_loop.md"
    (config,) = blocks(page, "yaml")
    (workplace / "loop.yaml").write_text(config.replace("num_layers: 2", "num_layers: 1"))
    names = {}
    exec("\n".join(blocks(page, "python")), names)
    losses = names["curve"]
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]
    preferred = names["preference_losses"]
    assert len(preferred) == 5 and preferred[-1] < 0.8 * preferred[0]
    assert len(names["rewards"]) == 20 and names["rewards"][-1] > names["rewards"][0] + 0.2
    assert names["evaluation_loss"] == pytest.approx(losses[-1], rel=0.2)
    assert f"restored step 20, evaluation loss {names['evaluation_loss']:.3f}" in capsys.readouterr().out
    assert (workplace / "runs/loop/checkpoints/20").is_dir() and int(names["state"].step) == 21
    again = names["Checkpoints"]("runs/loop", 2, None)  # as a second run of the script, which began anew
    with pytest.raises(
        InputError, match="step 20 cannot be saved in .*, which has step 20: restore that one and go on"
    ):
        names["saver"].save(again, 20, names["state"])
    again.close()
