"""The files for clusters: linted, and in agreement with the trainer's exit statuses, variables and packages."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from string import Template

import pytest
import yaml

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.console import BAD_NUMBERS, INTERRUPTED, LOST, MISTAKE, STOPPED

ROOT = Path(__file__).parents[1]
SBATCH, DOCKERFILE = ROOT / "scripts/slurm/train.sbatch", ROOT / "Dockerfile"
JOB_SET = yaml.safe_load((ROOT / "scripts/kubernetes/train.yaml").read_text())
AGAIN, NOT_AGAIN = (STOPPED, LOST, 134, 137), (0, MISTAKE, BAD_NUMBERS, INTERRUPTED, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="the linters are Linux programs here")
@pytest.mark.parametrize(("linter", "path"), [("shellcheck", SBATCH), ("hadolint", DOCKERFILE)], ids=str)
def test_linters_find_nothing(linter, path):
    program = Path(sys.executable).with_name(linter)
    assert program.exists(), "install the tools: source scripts/environment.sh dev"
    linted = subprocess.run([program, path], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr


# Slurm


@pytest.fixture
def submit(tmp_path):
    """(status, SAVES=command that saves, **environment) → (exit status, the commands after the config was printed).

    The job before has saved step 90 of the run.
    """
    (tmp_path / "my run" / "checkpoints" / "90").mkdir(parents=True)
    printed = f"printf 'run:\\n  name: x\\n  dir: {tmp_path}/my run\\nmodel:\\n  dir: other\\n'"
    for name, does in {
        "srun": f'case "$*" in *--print-config) {printed}; exit 0;; esac; eval "$SAVES"',
        "scontrol": "",
    }.items():
        (tmp_path / name).write_text(
            f'#!/bin/sh\necho "{name} $* [$JAX_LOCAL_DEVICE_IDS]" >> "{tmp_path}/ran"\n{does}\n'
            f"exit ${{{name.upper()}:-0}}\n"
        )
        (tmp_path / name).chmod(0o755)

    def submit(status, SAVES=f"mkdir -p '{tmp_path}/my run/checkpoints/100'", **environment):  # noqa: N803
        (tmp_path / "ran").write_text("")
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SRUN": str(status), "SAVES": SAVES}
        command = ["bash", SBATCH, "c.yaml", "mesh.fsdp=-1"]
        done = subprocess.run(command, env=path | environment, capture_output=True, text=True, cwd=tmp_path)
        ran = (tmp_path / "ran").read_text().splitlines()
        assert " --print-config " in ran[0] and "--ntasks=1 " in ran[0]
        return done.returncode, ran[1:]

    return submit


@pytest.mark.parametrize("status", AGAIN + NOT_AGAIN)
def test_slurm_requeues_stops_and_lost_processes_only(submit, status):
    returned, ran = submit(status, SLURM_NTASKS_PER_NODE="8")
    assert returned == status
    train = "srun --gpu-bind=none --kill-on-bad-exit=0 .venv/bin/python -m megajax.train c.yaml mesh.fsdp=-1 []"
    assert ran == [train] + (["scontrol requeue 7 []"] if status in AGAIN else [])


def test_slurm_requeues_after_three_failures_in_a_row_without_a_newer_checkpoint(submit, tmp_path):
    def requeued(*ends, **settings):
        return [len(submit(status, SAVES=saves, **settings)[1]) == 2 for status, saves in ends]

    partial = f"mkdir -p '{tmp_path / 'my run' / 'checkpoints' / '100.orbax-checkpoint-tmp'}'"
    fails, saves = (4, partial), (137, f"mkdir '{tmp_path / 'my run' / 'checkpoints' / '100'}'")
    assert requeued(fails, fails, fails, fails) == [True, True, True, False]
    assert requeued(fails) == [True]  # the same job, submitted again
    # Progress resets the number, which stops on request do not change.
    assert requeued(fails, saves, fails, (75, ":"), (75, ":"), fails, fails) == [True] * 6 + [False]
    # In a bucket: the log names the last save.
    shutil.rmtree(tmp_path / "my run" / "checkpoints")
    (tmp_path / "my run" / "checkpoints").write_text("gs://bucket/run")
    metrics = tmp_path / "my run" / "metrics.jsonl"
    metrics.write_text('{"step": 90, "checkpoint_step": 90, "checkpoint_gb": 1.0}\n')
    line = '{"step": 100, "checkpoint_step": 100, "checkpoint_gb": 1.0}'
    saves = (4, f"echo '{line}' >> '{metrics}'")
    assert requeued((4, ":"), (4, ":"), (4, ":"), saves, (4, ":"), (4, ":"), (4, ":")) == [True] * 6 + [False]
    assert not list(tmp_path.glob("*.failures"))


def test_a_slurm_task_alone_on_its_node_gets_all_gpus_and_requeues_end(submit, tmp_path):
    _, ran = submit(4, SLURM_NTASKS_PER_NODE="1", SLURM_GPUS_ON_NODE="4", SLURM_RESTART_COUNT="5", MEGAJAX_REQUEUES="5")
    assert len(ran) == 1 and ran[0].endswith("[0,1,2,3]")
    _, ran = submit(0, MEGAJAX_IMAGE="image", MEGAJAX_MOUNTS="/data:/data:ro,/scratch")
    assert f"--container-mounts={tmp_path}:{tmp_path},/data:/data:ro,/scratch " in ran[0]
    assert "--container-image=image" in ran[0] and " python -m megajax.train" in ran[0]


def test_slurm_warns_with_a_signal_that_the_trainer_answers():
    directives = re.findall(r"^#SBATCH (.*)", SBATCH.read_text(), re.M)
    assert "--signal=USR1@300" in directives and "--requeue" in directives
    assert not any("gpus-per-task" in directive for directive in directives)  # each task must see all GPUs


# Kubernetes


@pytest.fixture
def job():
    (replicated,) = JOB_SET["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]


def test_a_job_set_fails_at_once_only_on_what_a_restart_would_repeat(job):
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    assert (rule["action"], codes["operator"]) == ("FailJob", "In")
    assert codes["values"] == [MISTAKE, BAD_NUMBERS, INTERRUPTED]
    assert codes["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    (policy,) = JOB_SET["spec"]["failurePolicy"]["rules"]
    assert (policy["action"], policy["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert JOB_SET["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_the_pods_of_a_job_set_find_each_other(job):
    (container,) = job["template"]["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    name, train = JOB_SET["metadata"]["name"], JOB_SET["spec"]["replicatedJobs"][0]["name"]
    port = next(each["containerPort"] for each in container["ports"] if each["name"] == "coordinator")
    assert variables["JAX_COORDINATOR_ADDRESS"] == f"{name}-{train}-0-0.{name}:{port}"
    assert variables["JAX_NUM_PROCESSES"] == str(job["parallelism"]) == str(job["completions"])
    assert "JAX_PROCESS_ID" in variables and job["completionMode"] == "Indexed"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert variables["JAX_LOCAL_DEVICE_IDS"] == ",".join(map(str, range(gpus)))
    assert container["command"] == ["python", "-m", "megajax.train"] and (ROOT / container["args"][0]).exists()
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_prometheus_can_read_the_port_that_the_trainer_opens(job):
    (container,) = job["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    config, *overrides = container["args"]
    logging = load_config(ROOT / config, overrides).logging
    assert (logging.prometheus_port, logging.prometheus_host) == (ports["metrics"], "0.0.0.0")


def test_the_pods_of_a_job_set_may_use_rdma(job):
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    resources = container["resources"]
    (rdma,) = [name for name in resources["limits"] if name.startswith("rdma/")]
    assert resources["limits"][rdma] == 1 and {"cpu", "memory"} <= resources["requests"].keys()
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["NCCL_IB_HCA"] and variables["NCCL_SOCKET_IFNAME"].startswith("^lo")
    shm = next(volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shared-memory")
    gibibytes = lambda text: int(text[:-2]) * {"Gi": 1, "Ti": 1024}[text[-2:]]  # noqa: E731
    assert gibibytes(shm["sizeLimit"]) + gibibytes(resources["requests"]["memory"]) <= gibibytes(
        resources["limits"]["memory"]
    )
    read_only = [mount for mount in container["volumeMounts"] if mount.get("readOnly")]
    assert [mount["mountPath"] for mount in read_only] == ["/data"]


KEYS = {  # of Kubernetes' objects, as far as the file uses them: a misspelt key would be ignored or refused there
    "pod": {*"restartPolicy terminationGracePeriodSeconds shareProcessNamespace hostNetwork dnsPolicy".split()}
    | {"containers", "volumes"},
    "container": {*"name image command args env ports resources securityContext volumeMounts".split()},
    "job": {*"parallelism completions completionMode backoffLimit podFailurePolicy template".split()},
    "jobset": {"network", "failurePolicy", "replicatedJobs"},
}


def test_the_manifest_has_only_keys_of_kubernetes(job):
    assert (JOB_SET["apiVersion"], JOB_SET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    pod = job["template"]["spec"]
    found = {"jobset": JOB_SET["spec"], "job": job, "pod": pod, "container": pod["containers"][0]}
    for name, keys in KEYS.items():
        assert found[name].keys() <= keys, name
    assert all(isinstance(variable.get("value", ""), str) for variable in pod["containers"][0]["env"])


# The image

IMAGES = re.findall(r"docker build .*", DOCKERFILE.read_text() + (ROOT / "docs/reliability.md").read_text())


def test_the_image_copies_files_that_exist_and_installs_extras_of_the_package():
    text = DOCKERFILE.read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    sent = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert sorted(copied) == sorted(sent) and all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"--constraint constraints.txt --editable \"\.\[(.*)\]\"", text)
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)", text, re.M))
    built = [dict(each) for each in (re.findall(r"--build-arg (\w+)=(\S+)", line) for line in IMAGES)]
    assert len(defaults) == 2 and {name for each in built for name in each} == defaults.keys()
    for arguments in ({}, *built):
        installed = Template(extras).substitute(defaults | arguments).split(",")
        assert set(installed) <= set(project["optional-dependencies"])
    (python,) = re.findall(r"^FROM python:(\d\.\d+)", text, re.M)
    assert project["requires-python"] == f">={python}"
    assert {project["readme"], *project["license-files"]} <= set(copied)


# The commands


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (JOB_SET["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["args"], 16),
        (re.search(r"sbatch scripts/slurm/train.sbatch (.*)", SBATCH.read_text())[1].split(), 16),
        *(
            (re.search(rf"{start}.* -m megajax.train (.*)", (ROOT / "README.md").read_text())[1].split(), gpus)
            for start, gpus in (
                ("srun --nodes=4 --ntasks-per-node=8", 32),
                ("mpirun -n 8", 8),
                ("JAX_COORDINATOR_ADDRESS", 16),
            )
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_shipped_commands_fit_their_gpus(words, gpus):
    config, *overrides = words
    check_mesh(load_config(ROOT / config, overrides), gpus)
