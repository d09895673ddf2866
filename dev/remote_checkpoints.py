"""Checkpoints in a bucket, tried against a server on this machine: kills while they are saved, damage, other meshes.

    pip install 'megajax[gcs]'
    fake-gcs-server -scheme http -backend memory -host 127.0.0.1 -port 9023 -external-url http://127.0.0.1:9023 &
    python dev/remote_checkpoints.py --server http://127.0.0.1:9023

or

    pip install 'megajax[s3]' 'moto[server]'
    moto_server -H 127.0.0.1 -p 9023 &
    python dev/remote_checkpoints.py --scheme s3 --server http://127.0.0.1:9023

Prints a table of what was done and seen; the first difference from a run with local checkpoints is an error.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from lab import Lab, numbers_of, resumed_in, saved_in

from megajax import load_weights

STEPS, INTERVAL, KEPT = 40, 2, 16
SETTINGS = (
    *(f"run.steps={STEPS}", f"run.checkpoint_interval={INTERVAL}", f"checkpoint.keep_every={KEPT}"),
    *("model.dropout=0.1", "batch.num_microbatches=2", "data.split='8,2,0'"),
)
BUCKET = "trial"
CLOSED = "http://127.0.0.1:9"  # no server listens there
OTHER_MESH = ("mesh.data=1", "mesh.tensor=1", "mesh.fsdp=4")


class Bucket:
    """A bucket of `gs://` on the server, seen without megajax, gcsfs or tensorstore."""

    scheme, server_setting, headers = "gs", "TENSORSTORE_GCS_HTTP_URL", {"Content-Type": "application/json"}

    def __init__(self, server: str):
        self.server = server
        os.environ |= {"STORAGE_EMULATOR_HOST": server, "TENSORSTORE_GCS_HTTP_URL": server}
        os.environ |= {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "GOOGLE_CLOUD_PROJECT": "trial"}
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # asks Google for the kind of the bucket
        self._call("/storage/v1/b?project=trial", json.dumps({"name": BUCKET}).encode())

    def _call(self, path: str, data: bytes | None = None, method: str | None = None) -> bytes:
        request = urllib.request.Request(self.server + path, data, self.headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def url(self, folder: str, bucket: str = BUCKET) -> str:
        """The setting of `checkpoint.dir` for a folder."""
        return f"checkpoint.dir={self.scheme}://{bucket}/{folder}"

    def names(self, folder: str) -> list[str]:
        """The objects of a folder, by their names in it."""
        listed = json.loads(self._call(f"/storage/v1/b/{BUCKET}/o?prefix={folder}/"))
        return [item["name"].removeprefix(f"{folder}/") for item in listed.get("items", [])]

    def steps(self, folder: str) -> tuple[set[int], set[int]]:
        """The steps with a complete checkpoint, and those with a part of one."""
        parts = [name.split("/") for name in self.names(folder) if name[0].isdigit()]
        complete = {int(step) for step, *rest in parts if rest == ["commit_success.txt"]}
        return complete, {int(step) for step, *_ in parts} - complete

    def flip_a_bit(self, folder: str, name: str) -> None:
        path = f"{folder}/{name}"
        data = bytearray(self.read(path))
        data[len(data) // 2] ^= 1
        self.write(path, bytes(data))

    def read(self, name: str) -> bytes:
        return self._call(f"/storage/v1/b/{BUCKET}/o/{name.replace('/', '%2F')}?alt=media")

    def write(self, name: str, data: bytes) -> None:
        path = name.replace("/", "%2F")
        self._call(f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={path}", data)


class S3Bucket(Bucket):
    """The same of `s3://`; the server must not verify signatures."""

    scheme, server_setting = "s3", "AWS_ENDPOINT_URL"
    headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=trial/20260101/us-east-1/s3/aws4_request"}
    headers |= {"Content-Type": "application/octet-stream"}

    def __init__(self, server: str):
        self.server = server
        os.environ |= {"AWS_ENDPOINT_URL": server, "AWS_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "trial", "AWS_SECRET_ACCESS_KEY": "trial"}
        self._call(f"/{BUCKET}", method="PUT")

    def names(self, folder: str) -> list[str]:
        listed = ElementTree.fromstring(self._call(f"/{BUCKET}?list-type=2&prefix={folder}/"))
        assert listed.findtext("{*}IsTruncated") == "false"
        return [str(key.text).removeprefix(f"{folder}/") for key in listed.iterfind("{*}Contents/{*}Key")]

    def read(self, name: str) -> bytes:
        return self._call(f"/{BUCKET}/{name}")

    def write(self, name: str, data: bytes) -> None:
        self._call(f"/{BUCKET}/{name}", data, "PUT")


class Trials:
    """The trials, which share a lab, a bucket and the weights of the run with local checkpoints."""

    def __init__(self, lab: Lab, bucket: Bucket):
        self.lab, self.bucket = lab, bucket
        self.numbers = lab.quiet()
        self.weights = load_weights(lab.root / "quiet0")

    def finish(self, run_dir: Path, *overrides: str, processes: int = 1) -> str:
        """Train to the end; all logged numbers and all weights must be those of the quiet run, bit for bit."""
        output = self.lab.end(self.lab.start(run_dir, *overrides, processes=processes))
        expected = self.lab.quiet(processes=processes)
        assert numbers_of(run_dir) == expected, "the numbers differ"
        if processes == 1:
            self.compare(load_weights(run_dir))
        return output

    def compare(self, weights: dict[str, np.ndarray]) -> None:
        assert weights.keys() == self.weights.keys()
        assert all(np.array_equal(weights[name], array) for name, array in self.weights.items()), "the weights differ"

    def kills(self, count: int, processes: int = 1) -> str:
        """SIGKILL while a save has written a part of its objects, again and again."""
        name, saved, partial = f"killed{processes}", 0, 0
        run_dir, elsewhere = self.lab.root / name, self.bucket.url(name)
        for _ in range(count):
            runs = self.lab.start(run_dir, elsewhere, processes=processes)
            runs[0].read_until(lambda run=runs[0]: "\nstep" in run.output)
            runs[0].read_until(self._is_writing(name))
            for run in runs:
                run.process.kill()
            for run in runs:
                run.finish()
            saved = max(saved, saved_in(runs[0].output))
            complete, rest = self.bucket.steps(name)
            partial += bool(rest)
            assert max(complete, default=0) >= saved, f"step {saved} was reported saved, the bucket has {complete}"
        output = self.finish(run_dir, elsewhere, processes=processes)
        assert resumed_in(output) >= saved
        complete, rest = self.bucket.steps(name)
        assert not rest and complete == {*range(KEPT, STEPS, KEPT), STEPS - INTERVAL, STEPS}, (complete, rest)
        return f"{count} kills, {partial} with a part of a checkpoint in the bucket; kept {sorted(complete)}"

    def _is_writing(self, name: str) -> Callable[[], bool]:
        """Whether the bucket has a part of a checkpoint, in most cases asked only after a random time."""
        first = time.monotonic() + self.lab.random.choice([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
        return lambda: time.monotonic() > first and bool(self.bucket.steps(name)[1])

    def damage(self) -> str:
        """A flipped bit in the newest of several checkpoints."""
        run_dir, name = self.lab.root / "damaged", "damaged"
        elsewhere = self.bucket.url(name)
        [run] = self.lab.start(run_dir, elsewhere)
        run.read_until(lambda: saved_in(run.output) >= 8)
        run.kill()
        newest = max(self.bucket.steps(name)[0])
        data = next(n for n in self.bucket.names(name) if n.startswith(f"{newest}/state/ocdbt.process_0/d/"))
        self.bucket.flip_a_bit(name, data)
        shown = self.command("megajax.checkpoint.inspect", str(run_dir), "--verify", status=1)
        assert f"DAMAGED: {data.removeprefix(f'{newest}/')} has other bits" in shown, shown
        output = self.finish(run_dir, elsewhere)
        assert "has other bits than when it was saved): the run resumes from an older one" in output, output
        assert self.bucket.steps(f"{name}/set_aside/1")[0] == {newest}
        assert "verified" in self.command("megajax.checkpoint.inspect", str(run_dir), "--verify")
        return f"step {newest} named, set aside in the bucket; resumed from step {newest - INTERVAL}"

    def other_mesh(self) -> str:
        """Back to an older checkpoint, on another mesh."""
        run_dir, elsewhere = self.lab.root / "killed1", self.bucket.url("killed1")
        back = ("checkpoint.resume_step=16", *OTHER_MESH)
        output = self.lab.end(self.lab.start(run_dir, elsewhere, *back))
        assert resumed_in(output) == 16, output
        ours = numbers_of(run_dir)
        difference = max(abs(ours[key][0] / value[0] - 1) for key, value in self.numbers.items())
        assert difference < 1e-4, difference
        assert STEPS in self.bucket.steps("killed1/set_aside/1")[0]
        return f"largest relative difference of a loss {difference:.1e}"

    def readers(self) -> str:
        """Everything that reads checkpoints of a run."""
        run_dir, folder = self.lab.root / "damaged", self.lab.root / "folder"
        self.command("megajax.hf", "export", str(run_dir), str(folder))
        assert list(folder.glob("*.safetensors"))
        begun = self.lab.root / "begun"
        self.lab.end(self.lab.start(begun, f"checkpoint.init_from={run_dir}/checkpoints/{STEPS}", "run.steps=1"))
        return "hf export, init_from, load_weights, inspect --verify"

    def local_tier(self) -> str:
        """SIGKILL between durable checkpoints, with `checkpoint.local_dir`."""
        run_dir = self.lab.root / "tiers"
        settings = (self.bucket.url("tiers"), f"checkpoint.local_dir={self.lab.root}/memory")
        settings = (*settings, "checkpoint.local_interval=1", "run.checkpoint_interval=10")
        [run] = self.lab.start(run_dir, *settings)
        run.read_to_step(16)
        run.kill()
        output = self.finish(run_dir, *settings)
        [step] = re.findall(r"resuming from the local checkpoint of step (\d+)", output)
        assert int(step) > 10 >= saved_in(run.output)
        return f"resumed from the local checkpoint of step {step}"

    def sentences(self) -> list[tuple[str, str]]:
        """Mistakes, and the last line that they give."""
        missing = self.mistake("missing", self.bucket.url("run", "nowhere"))
        silent = self.mistake("silent", self.bucket.url("silent"), CLOSED)
        taken = self.mistake("second", self.bucket.url("tiers"))
        scheme = self.mistake("scheme", "checkpoint.dir=az://bucket/run")
        return [("no such bucket", missing), ("no connection", silent), ("another run's", taken), ("az", scheme)]

    def mistake(self, name: str, setting: str, server: str | None = None) -> str:
        server = server or self.bucket.server
        environment = {self.bucket.server_setting: server}
        [run] = self.lab.start(self.lab.root / name, setting, environment=environment)
        assert run.finish() == 2, run.output
        return run.output.strip().splitlines()[-1]

    def command(self, module: str, *arguments: str, status: int = 0) -> str:
        done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=300)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="URL of a server with the interface of the store")
    parser.add_argument("--scheme", choices=("gs", "s3"), default="gs")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bucket = {"gs": Bucket, "s3": S3Bucket}[options.scheme](options.server)
    with tempfile.TemporaryDirectory() as root:
        lab = Lab(Path(root), random.Random(options.seed), SETTINGS)
        try:
            trials = Trials(lab, bucket)
            table: list[tuple[str, Callable[[], str]]] = [
                ("SIGKILL during saves, one process", lambda: trials.kills(options.kills)),
                ("SIGKILL during saves, two processes", lambda: trials.kills(options.kills // 4, processes=2)),
                ("a flipped bit in the newest", trials.damage),
                ("back to step 16 on another mesh", trials.other_mesh),
                ("readers", trials.readers),
                ("a local tier besides", trials.local_tier),
            ]
            for name, trial in table:
                print(f"| {name} | {trial()} |", flush=True)
            for name, sentence in trials.sentences():
                print(f"| {name} | `{sentence}` |", flush=True)
        finally:
            lab.close()


if __name__ == "__main__":
    main()
