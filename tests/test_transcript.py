"""dev/transcript.py finds its commands in the README and shortens their outputs."""

import shlex
from pathlib import Path

import transcript

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_readmes_commands_are_found_in_order():
    commands = transcript.readme_commands(README, 7)
    programs = [shlex.split(command.splitlines()[0])[:3] for command in commands]
    assert programs[0] == ["./scripts/quickstart.sh"] and "source" in programs[1]
    names = [words[1] for words in programs if words[0] == "megajax"]
    assert names == ["preprocess", "train", "train", "generate"]
    (training,) = [command for command in commands if command.endswith("run.steps=7")]
    assert commands.index(training) > commands.index(transcript.TEXT) and "--print-config" not in training
    (config,) = [command for command in commands if "num_layers" in command]
    assert config.startswith("cat > my.yaml <<'END'\n") and config.endswith("\nEND")


def test_long_rows_of_steps_and_long_outputs_lose_their_middle():
    steps = [f"step {n:3}/100  loss 1.0" for n in range(1, 10)]
    shortened = transcript.shorten("\n".join(["run", *steps, "step 9  evaluation loss 2.0"])).splitlines()
    assert shortened == ["run", *steps[:2], "[...]", *steps[-2:], "step 9  evaluation loss 2.0"]
    lines = [str(n) for n in range(100)]
    shortened = transcript.shorten("\n".join(lines)).splitlines()
    assert (shortened[0], shortened[-1]) == ("0", "99") and shortened.count("[...]") == 1
    assert len(shortened) == transcript.LONGEST + 1
