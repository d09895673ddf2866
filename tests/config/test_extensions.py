"""`run.extensions`: imported before a config is checked, by every command, in every process; not from inside a run."""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import pytest

from megajax import average, commands, evaluate, generate, launch, train
from megajax.checkpoint.weights import run_config
from megajax.config import load_config
from megajax.config.extensions import import_extensions
from megajax.data import index, inspect
from megajax.errors import ConfigError
from megajax.tools import bench
from megajax.tools.profile import __main__ as profile
from megajax.training.run_record import record_start

BASE = """\
run: {steps: 2}
model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 32}
batch: {global_size: 2, sequence_length: 8}
data: {kind: synthetic}
"""
MISSING = "run.extensions=[no_such_blocks]"
REGISTERING = """\
from megajax.model import register_block
from megajax.model.attention import Attention
from megajax.model.mlp import MLP
register_block("{0}", Attention, MLP)
"""


@pytest.fixture(autouse=True)
def place(base_config, monkeypatch):
    """An empty directory, with the modules and the path as before afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if "ext_" in name:
            del sys.modules[name]


@pytest.mark.parametrize("entry", ["ext_module", "folder/ext_file.py"])
def test_it_is_imported_before_the_check_and_recorded_with_its_file(entry):
    path = Path(entry).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(REGISTERING.format(path.stem))
    pattern = f"model.block_pattern=[{path.stem}]"
    with pytest.raises(ConfigError, match=f"'{path.stem}', which is not a kind of block: .*run.extensions"):
        load_config("x.yaml", [pattern])
    config = load_config("x.yaml", [pattern, f"run.extensions=[{entry}]", "run.dir=run"])
    recorded = str(path.absolute()) if "/" in entry else entry
    assert config.run.extensions == (recorded,) and sys.modules[path.stem].__file__ == str(path.absolute())

    Path("run").mkdir()
    lines = []
    record_start(Path("run"), config, 0, True, lines.append)
    assert run_config(Path("run"), "RUN") == config and lines == []
    copy = Path("run/extensions") / path.name
    assert copy.read_text() == path.read_text()
    record_start(Path("run"), config, 0, False, lines.append)
    assert lines == []
    path.write_text(path.read_text() + "# changed\n")
    record_start(Path("run"), config, 0, False, lines.append)
    assert lines == [f"changed since the last start: {recorded} of run.extensions"]
    assert copy.read_text().endswith("# changed\n")


FAULTS = {  # the file's text: what the sentence says
    "import no_such_library": "imports no_such_library, and there is none: install it",
    "1 / 0": "ends in ZeroDivisionError: division by zero: correct it",
    "def f(": "ends in SyntaxError",
    "raise SystemExit": "ends in SystemExit",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_file_that_cannot_be_imported_is_a_sentence_that_names_it(text):
    Path("ext_wrong.py").write_text(text)
    with pytest.raises(ConfigError) as found:
        load_config("x.yaml", ["run.extensions=[ext_wrong.py]"])
    assert "run.extensions has ext_wrong.py (the command line: " in str(found.value) and FAULTS[text] in str(
        found.value
    )
    assert "ext_wrong" not in sys.modules


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            "[no_such_blocks]",
            "there is no module no_such_blocks on Python's path: start in its directory, .*PYTHONPATH",
        ),
        ("[gone.py]", "there is no file .*gone.py: correct the path"),
        ("[json.py]", "json is another module's name .*: rename the file"),
        ("[sys.py]", "sys is another module's name .*: rename the file"),  # which has no file
        ("no_such_blocks", "run.extensions=no_such_blocks is not a list .*: write .no_such_blocks."),
        ("[3]", "run.extensions.0=3 is not text .*: put it in quotes"),
    ],
)
def test_one_that_does_not_exist_is_a_sentence(value, sentence):
    for name in ("json.py", "sys.py"):
        Path(name).write_text("")
    with pytest.raises(ConfigError, match=sentence):
        load_config("x.yaml", [f"run.extensions={value}"])


def test_a_module_without_a_file_may_be_one(monkeypatch):
    """Such as one that a program has made in memory."""
    monkeypatch.setitem(sys.modules, "in_memory", module_from_spec(ModuleSpec("in_memory", None)))
    assert import_extensions(["in_memory"]) == ["in_memory"]


@pytest.mark.parametrize("entry", ["run/ext_inside.py", "link/ext_inside.py", "ext_inside", "ext_space.ext_inside"])
def test_code_inside_a_run_is_not_imported(entry, capsys):
    """A run's directory may come from someone else: what it names and what lies in it starts nothing by itself."""
    run = Path("run")
    Path(run, "ext_space").mkdir(parents=True)  # a package without __init__.py
    Path("link").symlink_to(run)
    sys.path.append(str(run.absolute()))
    for file in (run / "ext_inside.py", run / "ext_space/ext_inside.py"):
        file.write_text("raise SystemExit('executed')")
    (run / "config.yaml").write_text(BASE.replace("run: {", f"run: {{extensions: [{entry}], "))
    with pytest.raises(ConfigError, match="inside the run's directory, where code is not trusted: move it elsewhere"):
        run_config(run, "RUN")
    with pytest.raises(SystemExit) as stopped:  # it reads the config by itself
        commands.main(["inspect", "run"])
    assert stopped.value.code == 2 and "inside the run's directory" in capsys.readouterr().err
    assert not any("ext_inside" in name for name in sys.modules)


COMMANDS = {
    "train": lambda: train.main(["x.yaml", MISSING]),
    "launch": lambda: launch.main(["x.yaml", MISSING]),
    "preflight": lambda: commands.main(["preflight", "x.yaml", MISSING]),
    "plan": lambda: commands.main(["plan", "x.yaml", MISSING, "--gpus", "8"]),
    "verify": lambda: commands.main(["verify", "x.yaml", MISSING, "--mesh", "data=2"]),
    "bench": lambda: bench.main(["x.yaml", MISSING]),
    "profile": lambda: profile.main(["x.yaml", MISSING]),
    "inspect": lambda: inspect.main(["x.yaml", MISSING]),
    "index": lambda: index.main(["x.yaml", MISSING]),
    "hf plan": lambda: commands.main(["hf", "plan", "x.yaml", "folder", MISSING, "--devices", "1"]),
    "generate": lambda: generate.main(["run", "--prompt", "a"]),
    "evaluate": lambda: evaluate.main(["run", "--data", "x.txt"]),
    "average": lambda: average.main(["run", "--last", "1", "--ema", "--out", "out"]),
    "hf export": lambda: commands.main(["hf", "export", "run", "folder"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_imports_it_first(command, capsys, monkeypatch):
    """A missing one ends each with status 2 and the sentence that names it, and nothing is written."""
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    Path("x.txt").write_text("text")
    Path("run/checkpoints/2").mkdir(parents=True)
    Path("run/config.yaml").write_text(BASE.replace("run: {", "run: {extensions: [no_such_blocks], "))
    Path("run/checkpoints/2/_CHECKPOINT_METADATA").write_text("{}")
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        COMMANDS[command]()
    found = capsys.readouterr().err
    assert stopped.value.code == 2, found
    assert found.startswith("megajax: error: run.extensions has no_such_blocks (") and "there is no module" in found
    assert sorted(Path().rglob("*")) == before


def test_it_may_import_jax_but_not_start_it():
    """In a fresh process: variables and flags are set after the import and still count."""
    Path("ext_jax.py").write_text("import jax.numpy as jnp\nclass Thing: pass\n")
    Path("ext_starts.py").write_text("import jax.numpy as jnp\nx = jnp.zeros(3)\n")
    program = """
import os, pickle, subprocess, sys
from megajax.config import load_config
from megajax.runtime import keep_compiled, prepare_environment
config = load_config("x.yaml", ["run.extensions=[ext_jax.py]"])
assert "jax" in sys.modules
prepare_environment(config)
keep_compiled(load_config("x.yaml", ["run.compilation_cache=none"]))
assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
keep_compiled(config)
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=3"
import jax
assert jax.config.jax_compilation_cache_dir == os.path.abspath("runs/run/compilation_cache")
assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.1
try:
    load_config("x.yaml", ["run.extensions=[ext_starts.py]"])
except ValueError as error:
    assert "makes jax arrays, so jax starts before its flags are set" in str(error), error
else:
    raise AssertionError
assert jax.device_count() == 3
"""
    environment = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
