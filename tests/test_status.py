"""`megajax status`: a line for each run, from its directory."""

import json
import os
import shlex
import time
from pathlib import Path

import pytest

from megajax.files import LOCK
from megajax.restart_sign import RestartSign, restarting_since
from megajax.status import line, lines, main


@pytest.fixture
def make(tmp_path):
    """(name, steps logged, seconds since the lock's last sign or None, steps not saved) → a run of 100 steps."""

    def make(name, steps, sign=None, unsaved=1):
        run = tmp_path / name
        run.mkdir()
        (run / "config.yaml").write_text("run: {steps: 100}")
        now = time.time()
        lines = [
            {
                "step": step,
                "time": now - 120,
                "loss": 9.0 / step,
                "step_seconds": 0.5,
                "tokens_per_second_per_device": 4096.0,
            }
            for step in range(1, steps + 1)
        ]
        lines.append({"step": steps, "time": now - 7200, "checkpoint_step": steps - unsaved, "checkpoint_seconds": 1.0})
        lines.append({"step": steps, "time": now - 120, "eval_loss": 3.5})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')
        if sign is not None:
            (run / "lock").touch()
            os.utime(run / "lock", (now - sign, now - sign))
        return str(run)

    return make


def test_a_line_says_where_each_run_is(make, capsys):
    runs = [make("a", 30, 5), make("b", 20, 600), make("c", 100, unsaved=0), make("d", 10), make("e", 100, unsaved=20)]
    assert main(runs) == 0
    a, *_ = shown = capsys.readouterr().out.splitlines()
    # The last one has made its last step, but the disk was full: the same command goes on.
    assert [line.split()[1] for line in shown] == ["running", "silent", "done", "ended", "ended"]
    for part in ("step 30/100", "loss 0.3000", "evaluation loss 3.5000", "0.5 s/step", "4,096 tok/s/dev"):
        assert part in a
    assert "saved step 29 2 h ago" in a and a.endswith("logged 2 min ago")


def test_the_last_lines_of_a_long_file_are_read(make):
    """The first of them may be cut, and one may be damaged."""
    run = make("a", 30)
    metrics = Path(run, "metrics.jsonl")
    first, *others = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([first[:-2] + " " * 2**21 + "}\n", *others[:9], "damaged\n", *others[9:]]))
    [shown], *_ = lines([Path(run)])
    assert "step 30/100" in shown and "loss 0.3000" in shown and "saved step 29" in shown


AGES = {
    0: "0 s",
    59: "59 s",
    60: "1 min",
    100: "2 min",
    3600: "1 h",
    5500: "2 h",
    86400: "1 d",
    200000: "2 d",
    -3: "0 s",
}


@pytest.mark.parametrize("seconds", AGES)
def test_times_are_rounded_to_their_largest_unit(seconds):
    found = {"state": "running", "step": 1, "steps": 2, "age": seconds, "saved_step": 1, "saved_time": 1e9 - seconds}
    assert (
        line("a", found, 1e9)
        == f"a  running     step 1/2  saved step 1 {AGES[seconds]} ago  logged {AGES[seconds]} ago"
    )


def test_a_run_whose_launcher_starts_it_again_is_restarting_until_a_process_has_the_lock(make, capsys):
    run, now = make("a", 30, 20), time.time()
    for age in (5, 30, 600):
        (sign := Path(run, "restarting")).touch()
        os.utime(sign, (now - age, now - age))
        assert main([run]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["restarting", "running", "running"]
    (Path(run, "lock")).unlink()
    assert main([run]) == 0
    assert capsys.readouterr().out.split()[1] == "ended"  # the launcher was killed too


def test_a_sign_counts_until_a_process_has_the_lock(tmp_path):
    assert restarting_since(tmp_path) is None
    sign, lock = tmp_path / "restarting", tmp_path / LOCK
    sign.touch()
    os.utime(sign, (5, 5))
    assert restarting_since(tmp_path) == 5
    lock.touch()
    for touched, expected in ((4, 5), (5, None), (6, None)):
        os.utime(lock, (touched, touched))
        assert restarting_since(tmp_path) == expected


@pytest.mark.parametrize("lock_at", [4, 6])
@pytest.mark.parametrize("sign_at", [None, 5])
def test_a_sign_is_renewed_only_while_it_counts(tmp_path, sign_at, lock_at):
    """Not before the first restart, and not while a process trains, of which status would say that it restarts."""
    for name, touched in (("restarting", sign_at), (LOCK, lock_at)):
        if touched is not None:
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (touched, touched))
    RestartSign(str(tmp_path)).renew()
    since = restarting_since(tmp_path)
    assert since is not None and since > 6 if sign_at == 5 and lock_at == 4 else since is None


def test_a_path_can_be_pasted_into_a_shell(make, capsys):
    run = make("my run", 3)
    assert main([run]) == 0
    assert shlex.split(capsys.readouterr().out)[0] == run


def test_follow_ends_with_the_last_run(make, capsys):
    run = make("a", 30, 59.8)
    assert main([run, "--follow", "--every", "0.3"]) == 0
    states = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert states == ["running", "silent"]


def test_follow_waits_for_runs_that_may_go_on(make, tmp_path):
    (tmp_path / "starting").mkdir()
    (tmp_path / "starting/lock").touch()
    again = Path(make("again", 30))
    (again / "restarting").touch()
    runs = {"starting": tmp_path / "starting", "restarting": again, "running": Path(make("running", 30, 5))}
    runs |= {
        "silent": Path(make("silent", 30, 600)),
        "ended": Path(make("ended", 30)),
        "done": Path(make("done", 100, unsaved=0)),
    }
    for state, run in runs.items():
        [line], goes_on, _ = lines([run])
        assert line.split()[1] == state and goes_on == (state in ("starting", "restarting", "running"))


def test_a_directory_of_no_run_is_named_after_the_lines_of_the_others(make, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), make("a", 30)])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and f"{tmp_path} has no config.yaml" in printed.err
    assert printed.out.split()[1] == "ended"


def test_a_run_that_compiles_its_first_step_is_starting(tmp_path, capsys):
    (tmp_path / "lock").touch()
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[1:] == ["starting", "step", "0/?"]
