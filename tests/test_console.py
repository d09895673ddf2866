"""What a user sees: lines for 80 columns, units that fit, colour on terminals only, and the version."""

import errno
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from itertools import cycle

import pytest

import megajax
from megajax import commands
from megajax.config import load_config
from megajax.config.load import keys as list_keys
from megajax.config.options import OPTIONS
from megajax.console import (
    COMMANDS,
    CRASH,
    DONE,
    MISTAKE,
    command,
    described,
    fold,
    memory_size,
    outcome,
    size,
    user_errors,
)
from megajax.errors import InputError, UserError, reading
from megajax.files import replace_text
from megajax.training.logs import console_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("count", "in_files", "in_memory"),
    [
        (999, "999 B", "999 B"),
        (1023, "1.02 kB", "1023 B"),
        (12_600_000, "12.6 MB", "12 MiB"),
        (2.5 * 2**30, "2.68 GB", "2.5 GiB"),
        (999_999, "1 MB", "977 KiB"),
        (3e15, "3000 TB", "2793968 GiB"),
    ],
)
def test_bytes_have_the_unit_that_fits(count, in_files, in_memory):
    assert (size(count), memory_size(count)) == (in_files, in_memory)


@pytest.mark.parametrize("steps", [60, 2000, 1_000_000])
@pytest.mark.parametrize("mfu", [None, 0.593])
def test_a_step_is_one_line_of_80_columns(steps, mfu):
    values = {"loss": 12.34567, "grad_norm": 123.456, "learning_rate": 2.34e-4, "mfu": mfu}
    values |= {"tokens_per_second_per_device": 14_234.5}
    line = console_line(steps // 2, steps, values, 30 * 3600)
    assert len(line) <= 80 and "\n" not in line
    for part in ("loss 12.3457", "norm 123.5", "lr 2.3e-04", "14.2k tok/s/dev", "30h left"):
        assert part in line
    assert ("MFU 59%" in line) == (mfu is not None)


# Minutes, hours and days from two of them on
LEFT = {0.4: "0s", 59: "59s", 119: "119s", 120: "2m", 7199: "120m", 7200: "2h", 172_799: "48h", 172_800: "2d"}


@pytest.mark.parametrize("seconds", LEFT)
def test_the_time_left_has_the_longest_unit_of_which_there_are_two(seconds):
    values = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "mfu": None, "tokens_per_second_per_device": 1.0}
    assert f" {LEFT[seconds]} left" in console_line(5, 10, values, seconds)
    assert console_line(5, 10, values, None) == "step  5/10  loss 1.0000  norm 1.00  lr 1.0e-03  1 tok/s/dev"


def test_a_summary_is_folded_with_an_indent_and_coloured_on_a_terminal_only(monkeypatch):
    text = f"kernels    {' '.join(['attention'] * 20)}"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert fold(text, io.StringIO()) == text
    first, *others = fold(text, Terminal()).splitlines()
    assert first.startswith("\x1b[1mkernels") and others
    assert all(line.startswith(11 * " " + "attention") and len(line) <= 80 for line in others)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in fold(text, Terminal())
    assert " ".join(fold(text, Terminal()).split()) == " ".join(text.split())


def test_commands_for_the_user_are_quoted_and_called_as_this_one_is(monkeypatch):
    words = ["generate", "runs/it's mine", "--prompt", "TEXT"]
    for called, first in (("/x/bin/megajax", ["megajax", "generate"]), ("x.py", ["python", "-m", "megajax.generate"])):
        monkeypatch.setattr(sys, "argv", [called])
        assert shlex.split(command(*words)) == [*first, *words[1:]]


def test_native_lines_are_left_out_and_python_s_own_lines_and_the_terminal_stay():
    code = """
        import os, sys
        from megajax.console import hide_native_lines
        hide_native_lines(b"[Gloo] Rank")
        os.write(1, b"[Gloo] Rank 0 is connected\\nnative\\n")
        os.system("echo child")
        print("[Gloo] Rank is Python's é", flush=True)
        import time; time.sleep(0.3); os._exit(0 if sys.stdout.fileno() != 1 else 1)
    """
    written = os.environ | {"PYTHONIOENCODING": "ascii:replace"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, env=written
    )
    assert sorted(done.stdout.splitlines()) == ["[Gloo] Rank is Python's ?", "child", "native"]


def mistake_of(capsys, name, *arguments):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(COMMANDS[name][0]).main(list(arguments))
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_the_option_that_is_nearest_to_an_unknown_one(command, capsys):
    words = ("config", "--hepl") if command == "hf" else ("--hepl",)
    assert "--hepl is not an option" in (error := mistake_of(capsys, command, *words))
    assert "did you mean --help?" in error


TAKE_KEYS = {"train", "launch", "preflight", "plan", "compile", "verify", "bench", "profile", "inspect"}
TAKE_KEYS |= {"explain-weight", "schedule"}
TAKE_A_MESH = {"generate", "chat", "evaluate"}


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "from-megatron"])  # which takes them
@pytest.mark.parametrize("equals", [" ", "="])
def test_every_command_answers_megatrons_option_with_its_own(command, equals, capsys):
    typed = f"--tensor-model-parallel-size{equals}8".split()
    error = mistake_of(capsys, command, *(["config"] if command == "hf" else []), *typed)
    key = "is a key of a run's config"
    answers = dict.fromkeys(TAKE_KEYS, "write mesh.tensor=8") | dict.fromkeys(TAKE_A_MESH, "write --mesh tensor=8")
    answer = answers.get(command, f"mesh.tensor {key}")
    assert f"--tensor-model-parallel-size is not an option: {answer}; " in error


def test_every_option_for_which_there_are_other_names_is_one_of_a_command(capsys):
    helps = ["hf plan --help", "data.merge --help", *(f"{command} --help" for command in COMMANDS)]
    shown = ""
    for name, *words in map(str.split, helps):
        module = COMMANDS[name][0] if name in COMMANDS else f"megajax.{name}"
        with pytest.raises(SystemExit):
            (imported := importlib.import_module(module)).main(words)
        shown += (page := capsys.readouterr().out)
        assert not page.split("\n\n")[1].startswith(("positional arguments:", "options:")), f"{name} --help has no text"
        about = (imported.__doc__ or "").strip()
        if " ".join(about.split()) in " ".join(page.split()):
            assert about in page or "\n\n" not in about, f"{name} --help has the paragraphs of its text"
    assert not [option for option in OPTIONS if not re.search(rf"{option}\b(?!-)", shown)]


@pytest.mark.parametrize(
    ("command", "typed", "answer"),
    [
        ("launch", "--nproc-per-node 4 -- a.yaml", "--nproc-per-node is not an option: did you mean --processes?"),
        ("generate", "runs/a --max_new_tokens 4", "did you mean --tokens?"),
        ("plan", "llama3_8b --gpus 8 --bf16", "--bf16 is not an option: use precision.compute=bfloat16"),
        ("plan", "llama3_8b --gpus 8 --tp 8", "write mesh.tensor=8"),
        ("plan", "llama3_8b --gpus 8 --sequence-parallel", "sequence parallelism is always on with mesh.tensor"),
        ("plan", "llama3_8b --num-gpus 8", "did you mean --gpus?"),
        ("plan", "llama3_8b --devices 8", "did you mean --gpus?"),
        ("hf", "plan folder --gpus 8", "did you mean --devices?"),
        ("generate", "runs/a --prompt a --load-in-4bit", "--dtype is the format"),
        ("generate", "runs/a --prompt a --do_sample", "--temperature 0 takes the likeliest token"),
        ("generate", "runs/a --prompt a --device-map auto", "--mesh divides the model"),
        ("train", "--cfg a.yaml", "write the name of the config alone"),
        ("plan", "llama3_8b --gpus 8 --explain tp=2", "--explain=tp=2: tp is no axis of a mesh: did you mean tensor?"),
        (
            "generate",
            "runs/a --prompt a --mesh fsdp=2,warp=2",
            "warp is no axis of a mesh: the axes are pipeline, data",
        ),
        ("generate", "runs/a --prompt a --mesh fsdp=2,fsdp=2", "has fsdp twice"),
        ("generate", "runs/a --prompt a --mesh fsdp=0", "fsdp=0 is no axis with a size: write tensor=2,fsdp=2"),
        ("preprocess", "--input a --tokenizer-model b", "did you mean --tokenizer?"),
        ("generate", "runs/a --promt Once", "--promt is not an option: did you mean --prompt?"),
        ("plan", "llama3_8b --gpu 8", "did you mean --gpus?"),
        ("plan", "llama3_8b --gpus h100", "write --device h100, and --gpus with their number"),
        (
            "plan",
            "llama3_8b --gpus 8 --device H100-SXM",
            "did you mean h100? The devices are h200, h100, a100, l40s, b200.",
        ),
        ("plan", "llama3_8b --gpus 8 --device tpu", "--device=tpu is not known: use h200, h100, a100, l40s, b200."),
        ("verify", "llama3_8b --mesh.tensor=2", "--mesh.tensor is not an option: write mesh.tensor=2;"),
        (
            "hf",
            "export a b --dtype bf16",
            "--dtype=bf16 is not a choice: did you mean bfloat16? The choices are float32",
        ),
        ("hf", "export a b --quantization fp8", "--quantization=fp8 is not a choice: did you mean fp8_block?"),
        ("hf", "export a b --quantization awq", "--quantization=awq is not a choice: other tools quantise"),
        ("hf", "exprt a b", "COMMAND=exprt is not a choice: did you mean export?"),
        ("hf", "merge a b", "COMMAND=merge is not a choice: write megajax hf export"),
        ("hf", "download org/name", "COMMAND=download is not a choice: nothing is downloaded"),
        ("generate", "runs/a --prompt a --batch-size 4", "--batch-size is not an option: leave it out"),
        (
            "generate",
            "runs/a --prompt a --repetition_penalty 1.1",
            "by --temperature, --top-k, --top-p and --min-p",
        ),
        ("generate", "runs/a --prompt a --apply-chat-template", "did you mean --chat?"),
        ("evaluate", "runs/a --tasks hellaswag", "python -m megajax.inference.lm_eval runs lm-eval's tasks"),
    ],
)
def test_a_mistyped_option_or_choice_is_answered_with_the_right_one(command, typed, answer, capsys):
    assert answer in mistake_of(capsys, command, *typed.split())


OF_SEVERAL_HOSTS = {
    "torchrun": "nnodes node-rank master-addr master-port rdzv-endpoint rdzv-backend rdzv-id",
    "accelerate launch": "num_machines machine_rank main_process_ip main_process_port",
    "deepspeed": "num_nodes node_rank hostfile master_addr master_port",
}


@pytest.mark.parametrize("launcher", OF_SEVERAL_HOSTS)
def test_an_option_of_another_launcher_for_several_hosts_is_answered(launcher, capsys):
    for name in OF_SEVERAL_HOSTS[launcher].split():
        assert "scripts/slurm/train.sbatch" in mistake_of(capsys, "launch", f"--{name}=4", "--", "a.yaml"), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_version(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(COMMANDS[command][0]).main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"megajax {megajax.__version__}\n"


def test_the_command_has_the_version(capsys):
    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megajax {megajax.__version__}\n"


LONG = "x" * 300  # more letters than a file's name may have
READERS_OF_PATHS = {
    "status": [LONG],
    "plot": [LONG],
    "inspect": [LONG],
    "preprocess": ["--input", LONG, "--output-prefix", "o", "--tokenizer", "byte"],
    "evaluate": [LONG, "--data", LONG],
    "train": [LONG],
    "checkpoints": [LONG],
    "hf": ["import", LONG, "run"],
}


def error_of(name: str, arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        commands.main([name, *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", READERS_OF_PATHS)
def test_a_name_that_no_file_can_have_is_a_sentence(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = error_of(name, READERS_OF_PATHS[name], capsys)
    assert error.startswith("megajax: error:") and error.count("\n") == 1 and LONG[:150] in error


def test_a_traceback_is_printed_on_request(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAJAX_TRACEBACK", "0")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("[1\n")
    assert "Traceback" not in error_of("plot", [str(run)], capsys)
    for arguments in ([str(run), "--traceback"], [str(run)]):  # the option sets the variable
        error = error_of("plot", arguments, capsys)
        lines = [line for line in error.splitlines() if not line.startswith("megajax: warning:")]
        assert lines[0].startswith("Traceback") and lines[-1].startswith("megajax: error:")


def test_an_unforeseen_error_of_a_file_is_a_sentence_with_its_cause(capsys, monkeypatch):
    monkeypatch.setenv("MEGAJAX_TRACEBACK", "1")
    with pytest.raises(SystemExit), user_errors(), reading("a.file", "get another"):
        {}["key"]
    error = capsys.readouterr().err
    assert "direct cause" in error and error.splitlines()[-1].endswith(
        "a.file is damaged or not of this format (KeyError: 'key'): get another."
    )
    with pytest.raises(InputError, match="^own$"), reading("a.file"):
        raise InputError("own")
    with pytest.raises(InputError, match="a.file is damaged"), reading("a.file"):  # a library's opinion of the file
        raise AssertionError
    with pytest.raises(NameError), reading("a.file"):  # a mistake of ours
        eval("unknown", {"__name__": "megajax.module"})


def test_a_record_of_an_error_has_its_text_or_else_its_name():
    assert described(RuntimeError("no memory")) == ("no memory", CRASH)
    assert described(RuntimeError()) == ("RuntimeError", CRASH)
    assert described(InputError("correct it")) == ("correct it", MISTAKE)
    assert described(BrokenPipeError()) == ("nobody reads the output.", DONE)


CURES = {
    "ENOSPC EDQUOT EFBIG": "free disk space",
    "EACCES EPERM EROFS": "that you may write to",
    "ENAMETOOLONG": "shorten the name",
    "ELOOP": "remove a link",
    "EISDIR ENOTDIR": "correct the path",
    "EEXIST": "a directory is made there",
}


@pytest.mark.parametrize(("name", "cure"), [(name, cure) for names, cure in CURES.items() for name in names.split()])
def test_an_error_of_the_file_system_that_the_user_can_mend_is_a_sentence(name, cure):
    number = getattr(errno, name)
    sentence, status = outcome(OSError(number, os.strerror(number), "a.txt"))
    assert status == MISTAKE and sentence.startswith("a.txt c") and os.strerror(number) in sentence and cure in sentence


def test_an_error_of_a_renaming_names_its_target(tmp_path):
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(OSError) as found:
        replace_text(tmp_path / "a.txt", "")
    assert (said := outcome(found.value)) is not None and said[0].startswith(f"{tmp_path}/a.txt cannot be opened")


@pytest.mark.parametrize("name", "ENOSPC EDQUOT EFBIG EROFS".split())
def test_an_error_of_writing_while_a_file_is_read_is_not_the_files(name):
    error = OSError(getattr(errno, name), "no", "a copy")
    with pytest.raises(OSError) as found, reading("a.file"):
        raise error
    assert found.value is error


def test_a_platform_that_jax_does_not_know_is_a_mistake_and_no_crash():
    program = "from megajax.console import user_errors; import jax\nwith user_errors():\n    jax.devices()"
    environment = os.environ | {"JAX_PLATFORMS": "nope"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "JAX_PLATFORMS=nope has a name that jax does not know: ['cpu'" in done.stderr


def test_a_sentence_cannot_steer_a_terminal_or_fill_it(capsys, monkeypatch):
    monkeypatch.delenv("MEGAJAX_TRACEBACK", raising=False)
    with pytest.raises(SystemExit), user_errors():
        raise InputError(f"a\x1b[2J{'b' * 10**6}: cure.")
    error = capsys.readouterr().err
    assert "a\\x1b[2J" in error and error.endswith(": cure.\n") and 201 * "b" not in error


@pytest.mark.parametrize("word", ["--" + "a" * 5000, "a" * 5000, "run.steps=" + "[" * 5000, "include.a", "a\0b"])
def test_a_long_or_odd_argument_is_shown_in_part(word, capsys):
    error = error_of("train", ["llama3_8b", word], capsys)
    assert error.startswith("megajax: error:") and len(error) < 1000
    assert len(error_of("train", [word], capsys)) < 1000


LONG_VALUES = ["x" * 999, "x " * 500, "9" * 5000, f"[{'x' * 999}]", f"{{{'x' * 999}: 1}}", f"{{a: {'x' * 999}}}"]
REPEATED = re.compile(r"(.)\1{200}|(x ){101}")  # more than 200 characters of a value


def test_no_message_about_a_config_has_more_than_200_characters_of_a_value(tmp_path):
    """Each key of each section with a value that it does not have, or has; they take turns."""
    config = "model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 257}\ndata: {kind: synthetic}\n"
    (path := tmp_path / "a.yaml").write_text(config + "batch: {global_size: 1, sequence_length: 8}\nrun: {steps: 1}\n")
    keys = [key for key, _ in list_keys() if ".N." not in key]
    assert len(keys) > 150
    refused = 0
    for key, value in zip(keys, cycle(LONG_VALUES), strict=False):
        with warnings.catch_warnings(action="ignore"):
            try:
                load_config(path, [f"{key}={value}"])
            except UserError as error:
                refused += 1
                assert not REPEATED.search(str(error)), key
                assert " is not valid (" not in str(error), "these words, and the cure, are pydantic's"
    assert refused > 100


@pytest.mark.parametrize("name", COMMANDS)
def test_no_message_about_arguments_has_more_than_200_characters_of_one(name, capsys):
    word = "x" * 5000
    for arguments in ([f"--{word}"], ["hf", word] if name == "hf" else [word], [word, word, "a.b=c"]):
        error = mistake_of(capsys, name, *arguments)
        assert not REPEATED.search(error), arguments[0][:5]
