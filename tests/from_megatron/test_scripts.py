"""Scripts of all kinds: what the shell says, what is refused, and that nothing in a script is executed."""

import ast
import json
import os
import re
from pathlib import Path

import pytest
import yaml

import megajax.tools.from_megatron
from megajax import commands
from megajax.console import TRACEBACK
from megajax.errors import InputError
from megajax.tools.from_megatron.__main__ import read, translate
from megajax.tools.from_megatron.launch_line import from_script

PACKAGE = Path(megajax.tools.from_megatron.__file__).parent
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --train-iters 10 --lr 1e-3 --vocab-size 512 --mock-data"
)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "NNODES", "SLURM_NNODES", "X"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def words(place: Path, script: str, *arguments: str) -> list[str]:
    (place / "train.sh").write_text(script)
    return from_script(place / "train.sh", list(arguments)).words


def settings(line: str, world: int = 1) -> tuple[dict, list[str]]:
    text, warned = translate(read(line.split())[0], world)
    return yaml.safe_load(text), warned


def sentence(capsys, *arguments: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        commands.main(["from-megatron", *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    lines = [line for line in printed.err.splitlines() if "warning:" not in line]
    assert lines[0].startswith("megajax: error: ") and all(line.startswith("  ") for line in lines[1:]), printed.err
    return "\n".join(lines)


# The expected words are those that bash gives.
@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("A='x y'\np.py --micro-batch-size $A \"$A\" '$A'", [], ["x", "y", "x y", "$A"]),
        ("p.py --micro-batch-size x$'a b'c \"$'a b'\" $''", [], ["xa bc", "$'a b'", ""]),
        ("A=$'it\\'s' B=2\np.py --micro-batch-size $B", [], ["2"]),
        (
            "A=(a 'b c' d)\nA+=(e)\np.py --micro-batch-size ${A[1]} ${#A[@]} \"${A[@]}\"",
            [],
            "b|c|4|a|b c|d|e".split("|"),
        ),
        ('A=(x yz)\np.py --micro-batch-size $A ${A} "$A" ${#A} ${#A[1]}', [], ["x", "x", "x", "1", "2"]),
        (
            "N=3\np.py --micro-batch-size $((N*8-2**3)) $(( (N + 1) % 3 )) $((-7/2)) $((-7 % 4))",
            [],
            ["16", "1", "-3", "-3"],
        ),
        ("p.py --micro-batch-size ${X:-$((2*3))} ${X:+no} ${X-'a b'} ${X:=q}$X", [], ["6", "a", "b", "qq"]),
        ("p.py --micro-batch-size ${X-'a}b'}", [], ["a}b"]),
        (
            'p.py --micro-batch-size "for $\'5" "a \\\\\n b"',
            [],
            ["for $'5", "a \\\n b"],
        ),  # $' and an escaped \\ in quotes
        ("p.py --micro-batch-size \\\n  1 \\\n  2 # 3", [], ["1", "2"]),
        (
            "F=/a/b.tar.gz\np.py --micro-batch-size ${F##*/} ${F%.*} ${F%%.*} ${F/a/c} ${F:1:3}",
            [],
            "b.tar.gz /a/b.tar /a/b /c/b.tar.gz a/b".split(),
        ),
        (
            "if [ $1 -gt 2 ] && [[ $2 == b* ]]; then A=y; else A=n; fi\np.py --micro-batch-size $A $#",
            ["3", "bc"],
            ["y", "2"],
        ),
        (
            "if [[ $1 == a || $2 == c* ]]; then A=y; elif false; then A=z; else A=n; fi\np.py --micro-batch-size $A",
            ["3", "bc"],
            ["n"],
        ),
        (
            "for n in 1 2 3; do\n[ $n -ge 2 ] && A=$A$n\n[ $n -gt 2 ] && B=$B$n\n[ $n -le 2 ] && C=$C$n\n"
            "[ $n -lt 2 ] && D=$D$n\ndone\np.py --micro-batch-size $A $B $C $D",
            [],
            ["23", "3", "12", "1"],
        ),
        ('for i in 1 2; do B="$B-$i"; done\np.py --micro-batch-size $B', [], ["-1-2"]),
        (
            "while [ $# -gt 0 ]; do case $1 in --a) A=$2; shift 2;; *) shift;; esac; done\np.py --micro-batch-size $A",
            ["z", "--a", "4"],
            ["4"],
        ),
        ("f() { local k=$1; shift; p.py --micro-batch-size $k \"$@\"; }\nf 1 'a b'", [], ["1", "a b"]),
        ("f() { p.py --micro-batch-size ${0##*/} $1; }\nf 1", [], ["train.sh", "1"]),
        ("cat << \t 'EOF'\nx \"y\nEOF\np.py --micro-batch-size 1", [], ["1"]),
        (f"p.py --micro-batch-size {'${A:-' * 40}1{'}' * 40}", [], ["1"]),
        ("cat <<EOF > x\np.py --micro-batch-size 9 '\nEOF\np.py --micro-batch-size 1 > log 2>&1", [], ["1"]),
        (
            "A=1\nB=2\nsrun -n 2 bash -e <<EOF # a 'comment'\n# it's\nB=3\np.py --micro-batch-size $A $B "
            '\\$B "x y" "a\\"b"\nEOF\n',
            [],
            ["1", "2", "3", "x y", 'a"b'],
        ),  # the outer shell's values, but of what it escapes
        (
            "A=1\nsh <<O; bash <<- 'EOF'\nx\nO\n\tB=\"it's\"\n\tp.py --micro-batch-size $A \"$B\" 'b c'\n\tEOF\ncat x",
            [],
            ["1", "it's", "b c"],
        ),
        ("V='--micro-batch-size 1 a'\neval \"p.py $V\"", [], ["1", "a"]),
        ("A=a\0b\np.py --micro-batch-size $A\0", [], ["ab"]),  # bash leaves zero bytes out
        ("HOME=/here\np.py --micro-batch-size $HOME", [], ["/here"]),  # before the environment's
        (
            "A=0\n[ -d no ] && A=9\nif ! [ -f train.sh ]; then exit 1; fi\nif ! x; then exit 1; fi\n"
            "if [ ! -f no ]; then\necho no\nexit 1\nfi\n[ -d no ] || exit 1\n[[ ! -e no ]] && { echo; exit 1; }\n"
            "if [ -f no ]; then A=1; else exit 1; fi\nif [ -f no ]; then B=1; else B=2; fi\n"
            "p.py --micro-batch-size $A $B",
            [],
            ["1", "2"],
        ),  # as where the files are, if the script ends without them
        (
            "A=1\nwhile IFS= read -r line; do A=2; done < hosts\nwhile kill -0 $!; do sleep 1; done\n"
            "B=x\nwhile [ $B != xxx ]; do B=x$B; y; done\np.py --micro-batch-size $A $B",
            [],
            ["1", "xxx"],
        ),  # of a loop as long as a command succeeds nothing is known
        ("A=0\ntest 1 -gt 2 && A=1\n[ -n '' ] || B=2\n[ -z x ] || C=$?\np.py --micro-batch-size $A $B", [], ["0", "2"]),
        ("A=0\nuntil [ $A -ge 3 ]; do A=$((A + 1)); done\np.py --micro-batch-size $A", [], ["3"]),
        (
            "for n in a b c x; do case $n in a) A=$A$n1 ;& x) A=${A}2 ;;& b|a) A=${A}3 ;; *) A=${A}4; esac; done\n"
            "p.py --micro-batch-size $A",
            [],
            ["23" + "3" + "4" + "24"],
        ),  # ;& goes on with the next block, ;;& with the next pattern
        ("A=aB\nf() { p.py --micro-batch-size ${A^^} ${A,,} $@ $* ${@}; }\nf 1 2", [], "AB ab 1 2 1 2 1 2".split()),
        (
            'true\nA=$?\n[ -n "$$" ] && B=y\n[ -z "$!" ] && C=z\np.py --micro-batch-size $A $B $C &>> log',
            [],
            ["0", "y", "z"],
        ),
        ("x |& tee log &> log2\np.py --micro-batch-size 1 > >(tee log) 2> >(tee log2 >&2)", [], ["1"]),
        ("A=b\nB=A\nx || p.py --micro-batch-size ${!B}\nfalse || p.py --micro-batch-size ${!B}", [], ["b"]),
        ("A=0\nfalse &&\nA=1\ntrue || # or\n\nA=2\ntrue &&\nB=3\np.py --micro-batch-size $A $B", [], ["0", "3"]),
        ("A=1\n[[ $(hostname) == a ]] || A=2\np.py --micro-batch-size $A", [], ["1"]),  # a test that is not known
        ('A=()\nexport\n> log\n$B\np.py --micro-batch-size 1 $A "$A" &\nwait', [], ["1", ""]),  # lines of no words
    ],
)
def test_words_are_those_of_a_shell(place, script, arguments, expected):
    assert words(place, script, *arguments) == ["--micro-batch-size", *expected]


@pytest.mark.parametrize("builtin", ["declare", "export", "local", "readonly", "typeset"])  # those of bash
def test_a_declaration_sets_its_variables(place, builtin):
    script = f"f() {{\n{builtin} A=1 B='x y'\np.py --micro-batch-size $A \"$B\"\n}}\nf"
    assert words(place, script) == ["--micro-batch-size", "1", "x y"]


@pytest.mark.parametrize("folder", ["", "/bin/", "/usr/bin/"])
@pytest.mark.parametrize("shell", ["bash", "sh", "zsh"])
def test_a_shell_reads_its_text_and_its_here_document(place, shell, folder):
    for text in ("-c 'p.py --micro-batch-size 1'", "<<EOF\np.py --micro-batch-size 1\nEOF"):
        assert words(place, f"srun {folder}{shell} {text}") == ["--micro-batch-size", "1"]


def test_a_test_of_a_file_is_that_of_bash(place):
    """By the letters of POSIX's test: exists, regular file, directory, readable, larger than zero."""
    (place / "folder").mkdir()
    (place / "full").write_text("x")
    (place / "empty").touch()
    holds = {"folder": "edrs", "full": "efrs", "empty": "efr", "none": "", "": ""}
    tests = [f"[ -{letter} '{name}' ] && A=$A/{name[:2]}-{letter}" for name in holds for letter in "edfrs"]
    found = words(place, "\n".join(["A=", *tests, "p.py --micro-batch-size $A"]))
    expected = [f"/{name[:2]}-{letter}" for name, letters in holds.items() for letter in "edfrs" if letter in letters]
    assert found == ["--micro-batch-size", "".join(expected)]


@pytest.mark.parametrize(
    ("launcher", "world"),
    [
        ("torchrun --nproc-per-node 4 --nnodes=2 p.py", 8),
        ("torchrun --nproc_per_node=4 p.py", 4),
        ("deepspeed --num_nodes 3 --num_gpus=2 p.py", 6),
        ("mpirun -n 6 python p.py", 6),
        ("#SBATCH --ntasks=6\nsrun python p.py", 6),
        ("srun -N 2 --ntasks-per-node=8 python -u p.py", 16),
        ("mpirun -np 6 python p.py", 6),
        ("srun -n 4 --ntasks 2 -n 8 python p.py", 8),  # the last one counts
        ("#SBATCH --nodes=3\n#SBATCH --gpus-per-node 4\nsrun python p.py", 12),
        ("#SBATCH --ntasks-per-node=4 -N 3 # nodes\nsrun python p.py", 12),
        ("N=3\nsbatch -J x << EOF\n#!/bin/bash\n#SBATCH --ntasks-per-node=4 -N $N\nsrun python p.py\nEOF", 12),
        ("sbatch --nodes 3 --ntasks-per-node=4 <<'EOF'\nsrun python p.py\nEOF", 12),
        ("sbatch --nodes=3 --wrap 'srun python p.py' --ntasks-per-node=4", 12),
        ('N=3\nsbatch --ntasks-per-node=4 --wrap="srun -N $N --ntasks-per-node=4 python p.py"', 12),
        ("export WORLD_SIZE=$((3*5))\npython p.py", 15),
        ("torchrun --nproc_per_node $(nvidia-smi -L | wc -l) p.py", None),
        ("WORLD_SIZE=2\ntorchrun --nproc_per_node $GPUS --nnodes $WORLD_SIZE p.py", None),  # it counts nodes here
        ("torchrun --nproc_per_node 8 --nnodes $NODES --node_rank 0 p.py", None),
        ("#SBATCH --nodes=3\nsrun torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES p.py", 24),
    ],
)
def test_the_number_of_devices_is_that_of_the_launcher(place, launcher, world):
    (place / "train.sh").write_text(launcher.replace("p.py", f"p.py {SMALL}"))
    assert read(["train.sh"])[1] == world


@pytest.mark.parametrize("flag", ["micro-batch-size", "num-layers", "hidden-size", "yaml-cfg", "use-checkpoint-args"])
def test_a_line_with_a_flag_of_each_training_is_the_launch_line(place, flag):
    assert words(place, f"tool.py --save x\np.py --{flag}=1") == [f"--{flag}=1"]


@pytest.mark.parametrize("suffix", ["sh", "bash", "slurm", "sbatch", "yaml", "yml"])
def test_a_file_that_is_missing_is_named_by_its_suffix(suffix, capsys):
    words = ["8"] if suffix[0] != "y" else []  # an argument of the script
    assert f"run.{suffix} cannot be read, No such file" in sentence(capsys, f"run.{suffix}", *words)


def test_each_option_of_the_help_is_ours_before_a_line_of_megatrons_flags(capsys, monkeypatch):
    monkeypatch.setenv(TRACEBACK, "")  # which the option sets

    def printed(option: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            commands.main(["from-megatron", option, *SMALL.split()])
        assert stopped.value.code == 0
        return capsys.readouterr().out

    texts = {option: printed(option) for option in ("-h", "--help", "--version")}
    options = re.findall(r"^  (-.*?)(?:  |$)", texts["-h"], re.MULTILINE)
    assert options == ["-h, --help", "--version", "--traceback", "--write FILE", "--world N"]
    assert texts["--help"] == texts["-h"] and texts["--version"].startswith("megajax ")
    assert commands.main(["from-megatron", "--traceback", *SMALL.split(), "--world", "1"]) == 0
    assert os.environ[TRACEBACK] == "1"


def test_a_shell_without_a_text_has_no_launch_line(place, capsys):
    (place / "train.sh").write_text(f"python p.py {SMALL} bash -c")
    assert "2 words are not flags" in sentence(capsys, "train.sh")


def test_devices_are_those_of_a_launcher_around_two_shells(place):
    (place / "train.sh").write_text(f"srun -n 4 bash -c \"env A=1 bash -c 'python p.py {SMALL}'\"")
    assert read(["train.sh"])[1] == 4


def test_sourced_files_are_read_and_others_are_named(place):
    (place / "a.sh").write_text("A=5\nsource nothing.sh\nsource $(pwd)/b.sh\n")
    loop = "for ((i = 0; i < 2; i++)); do A=$i; done"
    unknown = "if [[ $(hostname) == a ]]; then A=6; fi"
    (place / "train.sh").write_text(f". ./a.sh\n{loop}\n{unknown}\ntorchrun --nproc-per-node 2 p.py {SMALL} --seed $A")
    with pytest.warns(UserWarning) as warned:
        given, world = read(["train.sh"])
    assert given["seed"] == 5 and world == 2
    texts = [str(each.message) for each in warned]
    assert len(texts) == 4 and "nothing.sh" in texts[0] and "a.sh, line 2" in texts[0] and "$(pwd)/b.sh" in texts[1]
    assert "the loop in train.sh, line 2, is not read" in texts[2]
    assert "the condition in train.sh, line 3, is not known" in texts[3]


def test_variables_and_arguments_without_a_value_are_named(place, capsys):
    (place / "train.sh").write_text(
        f"echo $! $? $$\ntorchrun --nproc-per-node 2 $HERE/p.py {SMALL} $NOT_SET --save $1 --seed 3"
    )
    said = sentence(capsys, "train.sh")
    assert "--save has no value" in said and "NOT_SET" not in said
    with pytest.warns(UserWarning) as warned:
        read(["train.sh", "out"])
    assert [str(each.message).split(" has")[0] for each in warned] == ["HERE", "NOT_SET"]


HOSTILE = {
    "substitution": (
        f"p.py {SMALL} --save $(touch executed)/x --save-interval 1",
        ("--save", "$(touch executed)", "line 1"),
    ),
    "backticks": (f"A=`touch executed`\np.py {SMALL} --seed $A", ("--seed", "`touch executed`", "line 1")),
    "eval of a substitution": (f'eval "$(touch executed)"\np.py {SMALL}', ("$(touch executed)", "line 1")),
    "eval of another command": ("eval 'touch executed; rm -rf .'", ("no launch line",)),
    "commands": ("touch executed\nexec touch executed\n", ("no launch line",)),
    "unclosed quote": (f"touch 'executed\n'\np.py {SMALL} --save 'x", ("quote ' is not closed", "line 3")),
    "unclosed quote in a here-document": (
        f"A=1\nbash <<EOF\np.py {SMALL} `x\nEOF\n",
        ("quote ` is not closed", "line 3"),
    ),
    "unclosed double quote": (f'p.py {SMALL}\nA="x', ('quote " is not closed', "line 2")),
    "unclosed brackets": (f"p.py {SMALL} --seed $((1+", ("is not closed", "line 1")),
    "unclosed if": (f"if true; then\np.py {SMALL}", ("line 1", "no fi")),
    "cyclic source": (f"source train.sh\np.py {SMALL}", ("sources itself", "line 1")),
    "endless loop": (f"while true; do touch executed; done\np.py {SMALL}", ("20,000 commands",)),
    "endless recursion": ("f() { f; }\nf", ("calls itself",)),
    "doubling": ("A=aaaaaaaaaaaaaaaa\n" + "A=$A$A\n" * 64 + f"p.py {SMALL}", ("1,048,576 characters",)),
    "deep substitutions": (f"p.py {SMALL} --seed {'${A:-' * 500}1{'}' * 500}", ("nested too deeply",)),
    "deep blocks": ("if true; then\n" * 500, ("blocks in each other",)),
    "huge power": (f"p.py {SMALL} --seed $((9**99999999))", ("no expression of integers",)),
    "code in arithmetic": (f"p.py {SMALL} --seed $((__import__('os').system('touch executed')))", ("no expression",)),
    "division by zero": (f"p.py {SMALL} --seed $((1/0))", ("divides by 0",)),
    "code in a pattern": (
        f"p.py {SMALL} --num-experts 4 --moe-layer-freq [print(1)]",
        ("neither a number nor a list",),
    ),
    "huge pattern": (
        f"p.py {SMALL} --num-experts 4 --moe-layer-freq [0]*999*999*999",
        ("neither a number nor a list",),
    ),
    "required variable": (f"p.py {SMALL} --seed ${{SEED_OF_MINE:?}}", ("SEED_OF_MINE has no value",)),
    "too large": ("#" * 10_000_000, ("more than 1,048,576 bytes",)),
    "bytes": (b"\xff\xfe\x00\x00", ("cannot be read",)),
    "two lines": (f"p.py {SMALL}\np.py {SMALL} --seed 2", ("2 launch lines", "line 1 and", "line 2")),
    "unclosed array": (f"A=(1 2\np.py {SMALL}", ("the array A=( has no end", "line 1", "close it")),
    "function without a body": (f"f() p.py {SMALL}", ("the function from line 1 has no {", "complete it")),
    "function without a name": ("function", ("the function from line 1 has no {", "complete it")),
    "case of an operator": ("case ;; in x) a;; esac", ("the case from line 1 has no word", "complete it")),
    "text without an end": (f"p.py {SMALL} <<", ("the end of the script is not read here", "line 1")),
    "text with an operator as its end": (
        f"p.py {SMALL} << ;",
        ("; is not read here", "write the launch line by"),
    ),
    "nested eval": ('X=\'eval "$X"\'\neval "$X"', ("eval is nested too deeply", "line 2", "give the launch line")),
    "deep words": (f"p.py {SMALL} --seed {'${A:-' * 41}1{'}' * 41}", ("nested too deeply", "simplify the line")),
    "another script": ("bash inner.sh", ("inner.sh",)),
    "an exit before the line": (
        f"[ $# -lt 1 ] && exit 1\np.py {SMALL}",
        ("ends with exit", "train.sh, line 1", "give the arguments"),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_scripts_get_a_sentence_and_nothing_is_executed(place, name, capsys):
    script, parts = HOSTILE[name]
    (place / "train.sh").write_bytes(script if isinstance(script, bytes) else script.encode())
    before = sorted(place.iterdir())
    said = sentence(capsys, "train.sh", "--world", "1")
    assert all(part in said for part in parts), said
    assert sorted(place.iterdir()) == before


def test_a_script_sources_up_to_49_files(place, capsys):
    for i in range(50):
        (place / f"{i}.sh").write_text(f"A={i}\n")
    lines = [f"source {i}.sh\n" for i in range(50)]
    assert words(place, "bash -c true\n" * 50 + "".join(lines[:49]) + "p.py --micro-batch-size $A")[-1] == "48"
    (place / "train.sh").write_text("".join(lines) + f"p.py {SMALL}")
    assert "49.sh is one of more than 50 sourced files: write the launch line by" in sentence(capsys, "train.sh")


def test_the_package_has_nothing_that_executes():
    forbidden = {"subprocess", "os.system", "eval", "exec", "compile", "popen", "__import__", "pickle"}
    for file in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not {alias.name for alias in node.names} & forbidden, file
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in forbidden, file


OTHER_MODELS = {
    "pretrain_t5": "T5",
    "pretrain_bert": "BERT",
    "pretrain_ict": "a retriever",
    "pretrain_mamba": "Mamba",
    "pretrain_hybrid": "a hybrid of Mamba and attention",
    "pretrain_vlm": "a vision-language model",
    "pretrain_vision_classify": "a vision model",
    "run_multimodal": "a multimodal model",
    "pretrain_retro": "Retro",
    "train_rl": "reinforcement learning",
}


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        *((f"{program}.py --num-layers 2", (f"trains {model} ",)) for program, model in OTHER_MODELS.items()),
        (f"{SMALL} --hybrid-layer-pattern M*M*", ("--hybrid-layer-pattern M*M*", "a GPT")),
        (f"{SMALL} --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", ("--spec",)),
        (
            f"{SMALL} --fp32-residual-connection --qk-l2-norm",
            ("2 of the settings", "--fp32-residual-connection", "--qk-l2-norm"),
        ),
        (f"{SMALL} --fp8-format hybrid --fp8-recipe custom", ("--fp8-recipe custom", "a recipe of your own")),
        (f"{SMALL} --position-embedding-type mrope", ("rotary, learned or absent",)),
        (f"{SMALL} --use-checkpoint-args", ("--use-checkpoint-args", "write them into the line")),
        (f"{SMALL} --multi-latent-attention --position-embedding-type rope", ("latents are always normalised",)),
        (f"{SMALL} --optimizer adaptive_muon", ("adam, sgd, lion or muon",)),
        (
            f"{SMALL} --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
            ("weight decay is constant",),
        ),
        (
            f"{SMALL} --tensor-model-paralel-size 2",
            ("--tensor-model-paralel-size is not a flag", "did you mean --tensor-model-parallel-size?"),
        ),
        (
            f"{SMALL} --zzz 1 --num-layer 3",
            ("2 words are not flags", "--zzz", "--num-layer: did you mean --num-layers?"),
        ),
        (
            f"{SMALL} --recompute-granularity full --recompute-method uniform",
            ("full needs a method and a number of layers",),
        ),
        (f"{SMALL} --recompute-granularity full --recompute-num-layers 1", ("full needs a method",)),
        (f"{SMALL} --zzz 1 --num-layer 3 --zzz 2", ("2 words are not flags",)),
        (f"p.py --zzz 1 {SMALL}", ("--zzz is not a flag",)),
        (f"{SMALL} --seed one", ("--seed one is not an integer",)),
        (f"{SMALL} --min-lr one", ("--min-lr one is not a number",)),
        (f"{SMALL} --qk-clip --qk-clip-alpha 0.3", ("--qk-clip-alpha 0.3", "alpha is 0.5")),
        (f"{SMALL} --bf16 yes", ("yes is not a flag",)),
        (f"{SMALL} --tensor-model-parallel-size 3", ("the world size 1 is no multiple",)),
        (
            SMALL.replace("--vocab-size 512", "--vocab-size 0"),
            ("the line becomes a config that does not run: model.vocab_size=0 is too small (--vocab-size 0)",),
        ),
        (f"{SMALL} --global-batch-size 0", ("--global-batch-size 0 is below 1", "use 1 or more")),
        *(
            (f"{SMALL} --step-batch-size-schedule {each}", (f"{each} is no schedule such as", "correct it"))
            for each in (",", "0:16,inf:32", "64:2,1K:4", "64:2")
        ),  # of nothing, of no number, without a size for the first steps
        (f"{SMALL} --global-batch-size 3 --micro-batch-size 2", ("no multiple",)),
        (SMALL.replace("--vocab-size 512", ""), ("in the files of the tokenizer", "--vocab-size")),
        (
            SMALL.replace("--vocab-size 512", "--tokenizer-type HuggingFaceTokenizer"),
            ("in the files of --tokenizer-type HuggingFaceTokenizer", "--vocab-size"),
        ),
        (SMALL.replace("--lr 1e-3", ""), ("--lr is not set",)),
        (SMALL.replace("--mock-data", ""), ("no --data-path",)),
        (f"{SMALL} --lr-warmup-samples 5", ("does not go with --train-iters",)),
        (f"{SMALL} --pipeline-model-parallel-layout t*x", ("no layout",)),
        (
            f"{SMALL} --moe-router-load-balancing-type quantile_balancing --num-experts 4",
            ("aux_loss, seq_aux_loss or sinkhorn",),
        ),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(line, parts, capsys):
    said = sentence(capsys, "--world", "1", *line.split())
    assert all(part in said for part in parts), said


def test_a_value_that_is_megatrons_default_is_not_refused():
    found, _ = settings(f"{SMALL} --weight-decay-incr-style constant --dataloader-type single --lr-warmup-init 0.0")
    assert found["optimizer"]["weight_decay"] == 0.01


def test_the_comment_of_a_value_is_its_flag_or_megatrons_default():
    line = f"{SMALL} --num-experts 4 --moe-z-loss-coeff 0.001 --moe-aux-loss-coeff 0.1"
    line += " --make-vocab-size-divisible-by 64"  # which changes nothing
    text, _ = translate(read(line.split())[0], 1)
    comments = dict(re.findall(r"(\w+): .*  # (.*)", text))
    expected = {
        "num_layers": "--num-layers 2",
        "vocab_size": "--vocab-size 512",
        "z_loss": "--moe-z-loss-coeff 0.001",
        "global_loss": "--moe-aux-loss-coeff 0.1",
        "norm": "Megatron's default",
        "ffn_hidden_size": "Megatron's default for its activation",
    }
    assert {key: comments[key] for key in expected} == expected


def test_flags_without_a_counterpart_are_listed_by_class_and_reason():
    text, _ = translate(read(f"{SMALL} --sequence-parallel --manual-gc --rotary-base 500".split())[0], 1)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    always, none, beside = (
        comments.index(next(c for c in comments if c.startswith(f"# {title}")))
        for title in ("Always so here", "No effect here", "Without effect beside")
    )
    assert comments[always + 1].startswith("#   --sequence-parallel: sequence parallelism is always on")
    assert comments[none + 1].startswith("#   --manual-gc: settings of NCCL")
    assert comments[beside + 1] == "#   --rotary-base 500"  # learned positions


# A line, the key and its value by Megatron's rules, or the row of a formula that differs.
@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        ("--swiglu", "model.ffn_hidden_size", 128),  # int(4 * 64 * 2 / 3 / 64) * 64
        ("--disable-bias-linear", "model.activation", "gelu_exact"),
        ("--openai-gelu --disable-bias-linear", "model.activation", "gelu"),
        ("--make-vocab-size-divisible-by 100", "model.vocab_size", 600),
        ("--no-pad-vocab-size --vocab-size 511", "model.vocab_size", 511),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "remat.group", 2),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", "remat.layers", 1),
        ("--recompute-granularity selective --recompute-modules moe_act layernorm", "remat.policy", "save_matmuls"),
        ("--global-batch-size 8 --rampup-batch-size 2 2 9", "batch.schedule", "0: 2, 96: 4, 192: 6, 288: 8"),
        ("--step-batch-size-schedule 0:2,1K:8", "batch.schedule", "0: 2, 992: 8"),
        (
            "--global-batch-size 8 --rampup-batch-size 2 2 9 --lr-warmup-iters 2",
            "schedule.warmup_steps",
            5,
        ),  # 2 + 2 + 4 + 6 + 8 >= 16
        ("--moe-layer-freq 2 --num-experts 4", "model.block_pattern", ["moe", "dense"]),
        ("--moe-layer-freq [0]+[1] --num-experts 4", "model.first_dense_layers", 1),
        ("--num-experts 4 --moe-router-pre-softmax", "model.router.normalise", False),
        (
            "--num-experts 4 --moe-router-pre-softmax --moe-router-score-function sigmoid",
            "model.router.normalise",
            True,
        ),
        ("--qk-layernorm", "model.qk_norm", "layernorm"),
        ("", "objective.average", "microbatches"),
        ("--calculate-per-token-loss", "objective.average", "tokens"),
        (
            "--num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
            "model.router.score_function",
            "sigmoid",
        ),
        (
            "--num-experts 4 --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
            " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
            "model.router.loss_counts",
            "top_scores",
        ),
        (
            "--position-embedding-type yarn --rotary-scaling-factor 4 --mscale 0.5",
            "model.rope_scaling.attention_factor",
            1 + 0.05 * 1.386294361120,
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2",
            "model.router.sequence_loss",
            0.2,
        ),
        ("--train-iters 100 --exit-interval 20", "schedule.decay_steps", 100),
        ("--bf16 --main-grads-dtype bf16 --use-precision-aware-optimizer", "precision.accumulation", "bfloat16"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 3", "schedule.wsd_decay_style", "exponential"),
        ("--fp8-format e4m3 --first-last-layers-bf16 --num-layers 9", "precision.fp8.last_bf16_layers", 1),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "precision.fp8.recipe", "mxfp8"),
        ("--fp4-format e2m1", "precision.fp8.recipe", "nvfp4"),
        ("--window-size 7,0 --window-attn-skip-freq [1]+[0]", "model.layer_pattern", ["local", "global"]),
        ("--position-embedding-type rope --no-rope-freq [0]+[1]", "model.rope_pattern", ["rope", "none"]),
        ("--kv-channels 32", "model.head_dim", 32),
        ("--num-query-groups 2", "model.num_kv_heads", 4),  # --group-query-attention is missing
        ("--cpu-offloading-num-layers 1", "remat.policy", "offload"),
        ("--fine-grained-activation-offloading", "remat.policy", "offload"),
        ("--seed 7", "run.seed", 7),
        ("--wandb-exp-name a/b", "run.dir", "runs/a_b"),
    ],
)
def test_a_flag_becomes_the_value_of_megatrons_rule(flags, key, expected):
    found, _ = settings(f"{SMALL} {flags}")
    for part in key.split("."):
        found = found[part]
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


@pytest.mark.parametrize(("flag", "end"), [("", 511), ("--null-tokenizer-eod-id 7", 7)])
def test_the_end_of_a_document_is_a_token_of_the_null_tokenizer(flag, end):
    line = SMALL.replace("--mock-data", "--data-path x --split 1,0,0 --tokenizer-type NullTokenizer")
    found, _ = settings(f"{line} {flag}")
    assert (found["model"]["vocab_size"], found["data"]["tokenizer"]) == (512, f"null:{end}")


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        ("--tokenizer-model a/b", "--tokenizer-model a/b is no path: download it, and set data.tokenizer"),
        ("--vocab-file a/vocab.json --merge-file b/merges.txt", "copy both into a folder as vocab.json and merges.txt"),
    ],
)
def test_a_tokenizer_that_is_no_folder_is_a_warning_with_its_cure(flags, cure):
    line = SMALL.replace("--mock-data", f"--data-path x --tokenizer-type HuggingFaceTokenizer {flags}")
    found, warned = settings(line)
    assert "tokenizer" not in found["data"] and any(cure in text for text in warned)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--load x --save y --save-interval 5", ("x", "all", "y")),
        ("--load x --no-load-rng", ("x", "all", None)),
        ("--load x --ckpt-step 500", ("x/iter_0000500", "all", None)),
        ("--load x --no-load-optim", ("x", "position", None)),
        ("--load x --finetune --no-load-optim", ("x", "weights", None)),
        ("--pretrained-checkpoint z", ("z", "weights", None)),
        ("--load x --pretrained-checkpoint z", ("x", "all", None)),
        ("--load x --save x --save-interval 5", (None, None, "x")),
        ("--load there --save there --save-interval 5", ("there", "all", "there_megajax")),
    ],
)
def test_a_run_begins_where_megatrons_would(place, flags, expected):
    (place / "there").mkdir()
    (place / "there/latest_checkpointed_iteration.txt").write_text("7")
    found, warned = settings(f"{SMALL} {flags}")
    checkpoint = found.get("checkpoint", {})
    assert (checkpoint.get("init_from"), checkpoint.get("init_state"), found["run"].get("dir")) == expected
    assert "resume_step" not in checkpoint
    assert any("checkpoint.init_state=all" in text for text in warned) == (expected[0] is None)


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ("--attention-dropout 0.1", "attention-dropout"),
        ("--optimizer sgd", "sgd-decay"),
        ("--fp16", "fp16-gradients"),
        ("--lr-warmup-init 1e-7 --lr-warmup-samples 0", "warmup-init"),
        ("--lr-warmup-fraction 0.25", "sample-rates"),
        ("--num-experts 4 --moe-expert-capacity-factor 2", "capacity"),
        ("--num-experts 4", "router-bias"),
        ("--softmax-type learnable", "router-bias"),
        ("--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-topk 1", "sinkhorn-balance"),
        ("--mtp-num-layers 1 --eod-mask-loss --calculate-per-token-loss", "mtp-mask"),
        ("--lr-decay-style inverse-square-root", "inverse-sqrt"),
        ("--load x --no-load-optim", "no-load-optim"),
    ],
)
def test_a_formula_that_differs_is_a_warning_with_its_row(flags, row):
    assert row in differing(flags, 1)


def differing(flags: str, world: int) -> set[str]:
    """The rows of docs/migration.md in the warnings."""
    return set(re.findall(r"docs/migration.md, row (\S+)\)", "\n".join(settings(f"{SMALL} {flags}", world)[1])))


@pytest.mark.parametrize(
    ("flags", "world", "rows"),
    [
        ("--moe-router-load-balancing-type global_aux_loss", 1, {"global-aux-loss"}),
        ("--moe-router-load-balancing-type aux_loss", 1, set()),
        ("--moe-router-load-balancing-type aux_loss --global-batch-size 2", 2, {"aux-loss"}),
        ("--moe-router-load-balancing-type seq_aux_loss --global-batch-size 2", 2, set()),
        ("--context-parallel-size 2", 2, set()),
        ("--context-parallel-size 2 --eod-mask-loss", 2, {"loss-mean"}),
        ("--context-parallel-size 2 --eod-mask-loss --calculate-per-token-loss", 2, {"masked-router-losses"}),
    ],
)
def test_a_formula_of_several_replicas_or_ranks_differs_only_there(flags, world, rows):
    line = f"--attention-dropout 0 --disable-bias-linear --num-experts 4 --moe-aux-loss-coeff 0.1 {flags}"
    assert differing(line, world) == rows


@pytest.mark.parametrize(("warmup", "decay", "differs"), [(5, 10, False), (5, 11, False), (5, 9, True), (0, 10, True)])
def test_an_inverse_root_differs_without_warm_up_and_with_a_minimum_before_the_last_step(warmup, decay, differs):
    schedule = f"--lr-decay-style inverse-square-root --lr-warmup-iters {warmup} --lr-decay-iters {decay}"
    assert any("row inverse-sqrt)" in text for text in settings(f"{SMALL} {schedule}")[1]) == differs


@pytest.mark.parametrize("length", ["decay-samples 9", "warmup-samples 3", "wsd-decay-samples 5"])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_a_length_within_a_step_differs_where_the_style_has_it(style, length):
    differs = length[0] != "d" or style not in ("constant", "inverse-square-root")
    differs = style == "WSD" if length.startswith("wsd") else differs
    line = f"{SMALL.replace('--train-iters 10', '--train-samples 16')} --global-batch-size 2"
    line += f" --lr-wsd-decay-samples 4 --lr-{length}"
    assert any("row sample-rates)" in text for text in settings(f"{line} --lr-decay-style {style}")[1]) == differs


def test_expert_and_tensor_sizes_become_axes():
    line = f"{SMALL} --num-experts 8 --disable-bias-linear --global-batch-size 16 --tensor-model-parallel-size 2"
    mesh, _ = settings(f"{line} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1", 8)
    assert (mesh["mesh"]["expert"], mesh["mesh"]["experts_over"]) == (2, ["expert", "tensor"])
    mesh, _ = settings(f"{line} --expert-model-parallel-size 4", 8)
    assert mesh["mesh"]["expert"] == 4 and "experts_over" not in mesh["mesh"]
    mesh, _ = settings(f"{line} --expert-model-parallel-size 4 --context-parallel-size 4 --seq-length 32", 8)
    assert mesh["mesh"]["experts_over"] == ["expert", "context"]


def test_pipeline_layouts_are_layers_of_virtual_stages():
    line = f"{SMALL} --global-batch-size 8 --pipeline-model-parallel-size 2"
    found, _ = settings(
        f"{line} --num-layers 10 --pipeline-model-parallel-layout Et*2|(tt|)*2,tttt|L".replace("tttt|L", "ttttL"), 2
    )
    assert found["pipeline"] == {"virtual_stages": 2, "layout": [2, 2, 2, 4]}
    found, _ = settings(f"{line} --num-layers 7 --decoder-first-pipeline-num-layers 3", 2)
    assert found["pipeline"] == {"layout": [3, 4]}
    for first in ("", "--decoder-first-pipeline-num-layers 4"):
        found, _ = settings(f"{line} --num-layers 7 --decoder-last-pipeline-num-layers 3 {first}", 2)
        assert found["pipeline"] == {"layout": [4, 3]}
    ends = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    found, _ = settings(f"{line} --num-layers 6 {ends} --num-layers-per-virtual-pipeline-stage 2", 2)
    assert found["pipeline"] == {"virtual_stages": 2, "layout": [1, 2, 2, 1]}


def test_yaml_of_megatrons_tests_and_of_its_config(place, monkeypatch):
    monkeypatch.setenv("SEED_HERE", "3")
    flags = {word: True for word in ("--mock-data", "--swiglu")} | {"--bf16": False, "--seed": "${SEED_HERE}"}
    items = SMALL.replace(" --mock-data", "").split()
    flags |= dict(zip(items[::2], map(str, items[1::2]), strict=True))
    (place / "model_config.yaml").write_text(json.dumps({"ENV_VARS": {"A": 1}, "MODEL_ARGS": flags}))
    found = yaml.safe_load(translate(read(["model_config.yaml"])[0], 1)[0])
    assert found["run"]["seed"] == 3 and found["model"]["activation"] == "swiglu"
    assert found["precision"]["compute"] == "float32"
    (place / "gpt.yaml").write_text(
        "language_model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, activation_func: swiglu,"
        " num_query_groups: 2, num_moe_experts: 4, layernorm_epsilon: 1.e-6, add_bias_linear: False,"
        " gated_linear_unit: True, init_method: null}\nmodel_parallel: {bf16: True}\nseq_length: 32\nmock_data: True\n"
        "max_position_embeddings: 32\nmicro_batch_size: 1\ntrain_iters: 4\nlr: 1e-3\nvocab_size: 512\n"
    )
    (place / "train.sh").write_text(
        "torchrun --nproc_per_node 1 pretrain_gpt.py --yaml-cfg gpt.yaml --seed 5 --save-interval 2 --save gpt.yaml"
    )
    given, world = read(["train.sh"])
    (place / "train.sh").write_text((place / "train.sh").read_text().replace("--yaml-cfg ", "--yaml-cfg="))
    assert read(["train.sh"])[0].given == given.given
    found = yaml.safe_load(translate(given, world)[0])
    assert found["model"]["num_kv_heads"] == 2 and found["model"]["num_experts"] == 4
    assert found["model"]["norm_epsilon"] == 1e-6 and found["run"]["seed"] == 5 and found["run"]["dir"] == "gpt.yaml"
    (place / "gpt.yaml").write_text((place / "gpt.yaml").read_text().replace("swiglu", "gelu"))
    assert yaml.safe_load(translate(read(["gpt.yaml"])[0], 1)[0])["model"]["activation"] == "gelu_exact"
    (place / "gpt.yaml").write_text("language_model: {num_leyers: 2}\n")
    with pytest.raises(InputError, match="num_leyers"):
        read(["gpt.yaml"])
    (place / "gpt.yaml").write_text("a: &a [1, 2]\nb: [*a, *a]\n")
    with pytest.raises(InputError, match="alias"):
        read(["gpt.yaml"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ("gpt.yaml cannot be read, No such file", "correct the path")),
        ("a: [1", ("gpt.yaml is not valid YAML (while parsing a flow sequence", "correct it")),
        ("a: 2024-13-45", ("gpt.yaml is not valid YAML (month must be in 1..12)", "correct it")),
        ("- 1", ("gpt.yaml has no arguments", "give a YAML file with names and values")),
        ("bf16: 1", ("bf16: 1 is neither true nor false (gpt.yaml)", "correct it")),
        ("num_layers: two", ("num_layers: two is no int (gpt.yaml)", "correct it")),
    ],
)
def test_a_yaml_file_that_cannot_be_read_is_a_sentence(place, text, parts, capsys):
    if text is not None:
        (place / "gpt.yaml").write_text(text)
    said = sentence(capsys, "gpt.yaml", "--world", "1")
    assert all(part in said for part in parts), said


def test_the_command_writes_a_new_file(place, capsys):
    line = f"--world 2 {SMALL} --write run.yaml".split()
    assert commands.main(["from-megatron", *line]) == 0
    assert commands.main(["from-megatron", "--world=2", *SMALL.split(), "--write=again.yaml"]) == 0
    assert (place / "run.yaml").read_text() == (place / "again.yaml").read_text()
    assert "wrote run.yaml" in capsys.readouterr().out
    assert yaml.safe_load((place / "run.yaml").read_text())["mesh"]["data"] == 2
    assert "exists" in sentence(capsys, *line)
    assert "--world" in sentence(capsys, *SMALL.split())
    for world in ("0", "x", "²", "100000000"):
        said = sentence(capsys, "--world", world, *SMALL.split())
        assert f"argument --world: {world} is no number of devices: use 1 to 99999999" in said
    assert "SCRIPT_OR_ARGS" in sentence(capsys)


@pytest.mark.parametrize(("split", "evaluates"), [("", True), ("98,2,0", True), ("98,0,2", False), ("1", False)])
def test_there_are_evaluations_if_the_split_has_a_share_for_them(split, evaluates):
    line = SMALL.replace("--mock-data", "--data-path x --tokenizer-type NullTokenizer --eval-iters 7")
    found, _ = settings(f"{line} --split {split}" if split else line)
    assert found["run"]["eval_steps"] == (7 if evaluates else 0)
