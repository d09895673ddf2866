"""Hooks of one's own: in a file that the config names, or given to a Trainer."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from trainers import QuickTrainer

import megajax
from megajax.checkpoint import complete_steps
from megajax.console import BAD_NUMBERS, STOPPED
from megajax.errors import ConfigError, InputError, UserError
from megajax.options.registered import HOOKS
from megajax.schema.fields import Section
from megajax.training.hooks import RunView
from megajax.training.loop import Trainer

FILE = """\
import jax.numpy as jnp
from megajax import Hook
from megajax.config import register_hook

class HeadNorm(Hook):
    every = 2

    def on_step(self, run):
        run.log({"head_norm": jnp.linalg.norm(run.state.params["head"])})

register_hook("head_norm", HeadNorm)
"""


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def build(tmp_path, make_config):
    """(overrides..., hooks=(), kind=QuickTrainer, devices=1) → a Trainer with run.dir tmp_path/run."""

    def build(*overrides, hooks=(), kind=QuickTrainer, devices=1):
        config = make_config(f"run.dir={tmp_path / 'run'}", "data.split='8,2,0'", *overrides)
        return kind(config, jax.devices()[:devices], hooks=hooks)

    return build


@pytest.fixture
def extension(tmp_path):
    (tmp_path / "ext_head_norm.py").write_text(FILE)
    yield f"run.extensions=[{tmp_path / 'ext_head_norm.py'}]"
    HOOKS.pop("head_norm", None)
    sys.modules.pop("ext_head_norm", None)


def test_a_hook_in_one_file_adds_to_the_log_what_numpy_computes(build, extension, tmp_path):
    own = ("run.hooks=[head_norm]", extension, "mesh.fsdp=2", "run.log_interval=4", "run.eval_steps=0")
    trainer = build(*own, "run.steps=6", "run.checkpoint_interval=2", kind=Trainer, devices=2)
    assert trainer.run() == 0
    logged = {line["step"]: line for line in lines(tmp_path / "run") if "head_norm" in line}
    assert [*logged] == [2, 4, 6] and [step for step in logged if "loss" in logged[step]] == [4, 6]
    for step in complete_steps(tmp_path / "run"):
        head = megajax.load_weights(tmp_path / "run/checkpoints" / str(step))["head"]
        assert logged[step]["head_norm"] == pytest.approx(np.linalg.norm(np.float64(head)), rel=1e-6)
    assert trainer.config.run.hooks == ("head_norm",)


class Recorder(megajax.Hook):
    """Notes each call, with the steps that have been started; a clock jumps in evaluations."""

    def __init__(self):
        self.calls, self.losses, self.late = [], [], 0.0

    def on_start(self, run):
        self.calls.append(("start", run.step))

    def before_step(self, run, batch):
        assert batch["tokens"].shape == run.program.plan.batch_shape
        self.calls.append(("before", run.step + 1))

    def on_step(self, run):
        assert run.metrics["loss"].shape == ()
        self.calls.append(("step", run.step))

    def examine(self, run, step):
        assert step in (run.step, run.step - 1)  # one step late, or before a save

    def on_log(self, run, step, values):
        values["twice"] = np.float32(2 * values["loss"])
        self.calls.append(("log", step))

    def on_save(self, run, step):
        assert step in complete_steps(Path(run.config.run.dir))
        self.calls.append(("save", step))

    def on_evaluate(self, run, losses):
        self.losses.append((run.step, losses))
        self.late += 1000.0

    def on_end(self, run):
        run.log({"last_words": 7})
        self.calls.append(("end", run.step))


def test_each_method_is_called_when_it_says(build, tmp_path, monkeypatch):
    hook, clock = Recorder(), time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + hook.late)
    hook.every = 2
    every = ("run.log_interval=3", "run.checkpoint_interval=3", "run.eval_interval=4", "run.eval_steps=1")
    assert build("run.steps=5", *every, hooks=[hook]).run() == 0
    calls = [call for call in hook.calls if call[0] != "save"]
    assert calls == [
        *[("start", 0), ("before", 1), ("before", 2), ("log", 1), ("step", 2), ("before", 3), ("log", 3)],
        *[("before", 4), ("step", 4), ("before", 5), ("log", 5), ("end", 5)],
    ]
    saves = [call for call in hook.calls if call[0] == "save"]
    assert saves == [("save", 3), ("save", 5)] and hook.calls[-1] == ("end", 5)
    found = lines(tmp_path / "run")
    evaluations = [(line["step"], {"eval_loss": line["eval_loss"]}) for line in found if "eval_loss" in line]
    assert hook.losses == evaluations and [step for step, _ in evaluations] == [4, 5]
    assert [line["twice"] == 2 * line["loss"] for line in found if "loss" in line] == [True] * 3
    assert all(line["step_seconds"] < 100 for line in found if "loss" in line), "an evaluation is no part of a step"
    assert found[-1]["last_words"] == 7


class Counter(megajax.Hook):
    """Counts the steps since it was made, beside those that a checkpoint kept."""

    def __init__(self, name, kept=None):
        self.name, self.count, self.kept = name, 0, kept

    def on_step(self, run):
        self.count += 1

    def state_dict(self):
        return {"name": self.name, "count": self.count} if self.kept is None else self.kept

    def load_state_dict(self, state):
        self.name, self.count = state["name"], state["count"]


def test_what_a_hook_keeps_comes_back_with_the_checkpoint(build, tmp_path):
    """Of each of two hooks of one class; a third is new, and a class that keeps nothing has no entry."""
    steps = ("run.checkpoint_interval=2", "run.eval_steps=0")
    build("run.steps=4", *steps, hooks=[Counter("a"), Counter("b"), Recorder()]).run()
    description = json.loads((tmp_path / "run/checkpoints/4/description/metadata").read_text())
    assert description["hooks"] == {"Counter": [{"name": "a", "count": 4}, {"name": "b", "count": 4}]}
    hooks = [Counter("new"), Counter("newer"), Counter("newest")]
    build("run.steps=6", *steps, hooks=hooks).run()
    assert [(hook.name, hook.count) for hook in hooks] == [("a", 6), ("b", 6), ("newest", 2)]
    build("run.steps=8", *steps, hooks=[Recorder()]).run()
    assert "hooks" not in json.loads((tmp_path / "run/checkpoints/8/description/metadata").read_text())
    for kept in (object(), float("nan")):
        with pytest.raises(InputError, match=r"state_dict of the hook Counter gives .*, which JSON .*: give numbers"):
            build("run.steps=9", *steps, f"run.dir={tmp_path / 'other'}", hooks=[Counter("a", kept)]).run()


def test_the_first_of_two_ends_at_a_step_counts(make_config):
    run = RunView(SimpleNamespace(config=make_config()), lambda: 3, lambda: None, print, print)
    for end in (BAD_NUMBERS, STOPPED):
        run.end_with(end)
    assert run.end == BAD_NUMBERS


class Late(megajax.Hook):
    """Notes which steps the host has been made to wait for, at the start of each step."""

    def __init__(self):
        self.read, self.seen = [], []

    def before_step(self, run, batch):
        self.seen.append((run.step, [*self.read]))

    def on_step(self, run):
        step = run.step

        class Number:
            def __array__(self, dtype=None, copy=None):
                late.read.append(step)
                return np.float32(step)

        late = self
        run.log({"number": Number()})


def test_what_a_hook_logs_is_read_while_the_next_step_runs(build, tmp_path):
    """So the devices have a step to run while the host waits for the one before."""
    hook = Late()
    assert build("run.steps=4", "run.eval_steps=0", hooks=[hook]).run() == 0
    assert all(step - 1 in read and step not in read for step, read in hook.seen if step > 1)
    assert len(hook.seen) == 4 and all(a[0] < b[0] for a, b in pairwise(hook.seen))
    assert [line["number"] for line in lines(tmp_path / "run") if "number" in line] == [1, 2, 3, 4]


class Stopping(megajax.Hook):
    every = 3

    def __init__(self, **how):
        self.how, self.asked = how, []

    def before_step(self, run, batch):
        self.asked.append(run.asked_to_stop)

    def on_step(self, run):
        run.note("that is enough")
        run.stop(**self.how)


@pytest.mark.parametrize(
    ("how", "status", "line"), [({}, STOPPED, "stopped on request at step 4"), ({"done": True}, 0, "done: at step 4 ")]
)
def test_a_hook_stops_a_run_with_a_checkpoint(build, tmp_path, capsys, how, status, line):
    hook = Stopping(**how)
    trainer = build("run.steps=9", "run.eval_steps=0", hooks=[hook])
    assert trainer.run() == status and trainer.step == 4  # the step that was asked for ends, and one more
    assert hook.asked == [False, False, False, True]
    assert complete_steps(tmp_path / "run") == [4]
    printed = capsys.readouterr().out
    assert "that is enough" in printed and line in printed
    again = build("run.steps=9", "run.eval_steps=0", hooks=[Stopping(**how)])
    assert again.step == 4 and again.run() == status and again.step == 7  # a run that was stopped goes on


class Taken(megajax.Hook):
    def __init__(self, name: str = "loss"):
        self._name = name

    def on_step(self, run):
        run.log({self._name: 1.0})


class Misspelt(megajax.Hook):
    def on_steps(self, run):
        pass


@pytest.mark.smoke
def test_mistakes_are_sentences(build, make_config, extension):
    with pytest.raises(ConfigError, match="run.hooks.0=no_hook is not a .*: .*run.extensions"):
        make_config("run.hooks=[no_hook]")
    with pytest.raises(
        ConfigError, match=r"run.hooks=\[head_norm, head_norm\] names head_norm twice .*: name each once"
    ):
        make_config(extension, "run.hooks=[head_norm,head_norm]")
    make_config(extension, "run.hooks=[head_norm]")
    own = "run.hooks=[head_norm]", extension
    with pytest.raises(ConfigError, match="run.hook_settings.head_norm.evry is no setting of HeadNorm .*: it has none"):
        make_config(*own, "run.hook_settings.head_norm.evry=3")
    with pytest.raises(ConfigError, match="run.hook_settings.norm is not read: .* names no hook norm .*: add it"):
        make_config(*own, "run.hook_settings.norm.every=3")
    with pytest.raises(ConfigError, match="the hook head_norm exists already: choose another name"):
        megajax.config.register_hook("head_norm", Taken)
    with pytest.raises(InputError, match="the hook Recorder has every=0: set it to a number of 1 or more"):
        hook = Recorder()
        hook.every = 0
        build(hooks=[hook])
    for given, sentence in (
        ([lambda run: None], "is of the type function, not a Hook: derive its class from megajax.Hook"),
        (["head_norm"], "the hook head_norm is of the type str, not a Hook"),
        ([Taken], r"Taken.* is of the type type, not a Hook: give one that is made, Taken\("),
        (Taken(), r"hooks=.* is no list: give \[Taken\("),
        (
            [type("Few", (megajax.Hook,), {"on_step": lambda self: None})()],
            r"Few.on_step .* write on_step\(self, run\)",
        ),
        ([type("Few", (megajax.Hook,), {"on_log": lambda self, run, values: None})()], r"on_log\(self, run, step, v"),
        ([type("Text", (megajax.Hook,), {"every": "10"})()], "the hook Text has every='10': set it to a number"),
    ):
        with pytest.raises(UserError, match=sentence):
            build(hooks=given)
    needing = type("Needing", (megajax.Hook,), {"__init__": lambda self, path: None})
    for make in (needing, Taken(), type("Lacking", (megajax.Hook,), {"Settings": type("Settings", (Section,), {})})):
        megajax.config.register_hook("test_made", make)
        with pytest.raises(ConfigError, match="the hook test_made .* cannot be made: let it take"):
            build("run.hooks=[test_made]")
        del HOOKS["test_made"]

    class Refusing(megajax.Hook):
        def check(self, config):
            raise ConfigError(f"no {config.run.steps} steps")

    for name, given in (("[test_check]", []), ("[]", [Refusing()])):
        megajax.config.register_hook("test_check", Refusing)
        with pytest.raises(ConfigError, match="no 3 steps"):  # by the constructor, which compiles nothing
            build("run.steps=3", f"run.hooks={name}", hooks=given)
        del HOOKS["test_check"]
    with pytest.raises(InputError, match="the hook Misspelt has on_steps, which no run calls: use .*on_step,"):
        build(hooks=[Misspelt()])


@pytest.mark.parametrize("values", ["loss", None, {"": 1.0}, {3: 1.0}], ids=str)
def test_a_hook_that_logs_no_numbers_by_name_is_a_sentence(build, values):
    with pytest.raises(InputError, match=r"run.log\(.*\) has no numbers by name"):
        build().view.log(values)


@pytest.mark.parametrize("name", ["loss", "step", "time", "tokens"])
def test_a_hook_that_logs_a_name_that_the_line_has_ends_the_run(build, name):
    with pytest.raises(ValueError, match=f"logs {name} at step 1, which its line has already: give another name"):
        build("run.steps=2", hooks=[Taken(name)]).run()
