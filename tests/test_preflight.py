"""The measurements before a run: the report's verdict, the groups of devices, and what the collectives compute."""

import os
import re
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from megajax import cluster
from megajax.cluster import joining
from megajax.mesh import build_mesh
from megajax.tools.preflight import __main__ as command
from megajax.tools.preflight import measurements, network
from megajax.tools.preflight.measurements import DeviceGroup, Sample, collective, disk_rates, groups, report


def test_a_sample_far_below_its_equals_is_marked_and_others_are_not():
    samples = [Sample("matmul", f"host{i}", rate, "TFLOP/s") for i, rate in enumerate((700, 710, 690, 420))]
    samples += [Sample("disk write", "host0", 1, "GB/s"), Sample("disk write", "host1", 0.9, "GB/s")]
    table, outliers = report(samples, 0.8)
    assert outliers == ["matmul, host3: 420 TFLOP/s is 60% of the median 695"]
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["measured", "median", "lowest"]
    assert rows[1] == ["matmul", "4", "695", "TFLOP/s", "420", "TFLOP/s", "host3", "<--", "slow"]
    assert rows[2] == ["disk", "write", "2", "0.95", "GB/s", "0.9", "GB/s", "host1"]
    slower = [Sample("matmul", "a", 500, "TFLOP/s"), *samples]  # the slowest first
    shares = ["host3: 420 TFLOP/s is 61% of the median 690", "a: 500 TFLOP/s is 72% of the median 690"]
    assert report(slower, 0.8)[1] == [f"matmul, {share}" for share in shares]
    assert not report(samples, 0.6)[1]
    assert not report(samples[3:4], 0.8)[1]  # one has no equals
    slow_disk = Sample("disk write", "host2", 0.1, "GB/s")
    _, outliers = report([*samples, slow_disk], 0.8, virtual=True)
    assert [line.partition(":")[0] for line in outliers] == ["disk write, host2"]


def test_groups_cover_every_class_of_links():
    devices = [SimpleNamespace(id=i, process_index=i // 2) for i in range(12)]  # two processes a host
    found = [
        (group.kind, [device.id for device in group.devices])
        for group in groups(devices, ["a", "a", "b", "b", "c", "c"])
    ]
    assert found[:3] == [(f"within a host ({4})", list(range(start, start + 4))) for start in (0, 4, 8)]
    assert found[3:6] == [("pair within a host", pair) for pair in ([0, 1], [2, 3], [1, 2])]
    assert found[12:16] == [("between hosts (3)", [i, i + 4, i + 8]) for i in range(4)]
    assert found[16:] == [("pair of hosts", list(range(start, start + 8))) for start in (0, 4)]
    assert groups(devices[:1], ["a"]) == []


def test_the_lines_of_each_axis_of_the_mesh_are_measured():
    mesh = build_mesh({"fsdp": 2, "tensor": 4})
    found = [group for group in groups(jax.devices(), ["a"], mesh) if group.kind.startswith("mesh")]
    start = jax.devices()[0].id
    lines = [[device.id - start for device in group.devices] for group in found]
    assert lines == [[0, 4], [1, 5], [2, 6], [3, 7], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert [group.kind for group in found] == 4 * ["mesh.fsdp=2"] + 2 * ["mesh.tensor=4"]


@pytest.mark.parametrize("operation", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute"])
def test_a_collective_is_what_its_row_says(operation):
    n, devices = 4, jax.devices()[2:6]
    function, argument = collective(operation, devices, 8 * n)
    rows = np.repeat(np.arange(len(argument))[:, None], 8, axis=1)
    assert np.array_equal(argument, rows)
    parts = rows.reshape(n, -1, 8)  # by device
    expected = {
        "all-reduce": np.stack([parts.sum(0)] * n),
        "all-gather": np.stack([rows] * n),
        "reduce-scatter": parts.sum(0)[:, None],
        "permute": np.roll(parts, 1, axis=0),
        "all-to-all": parts.reshape(n, -1, 8).swapaxes(0, 1),
    }[operation]
    result = function(argument)
    assert np.array_equal(np.asarray(result).reshape(n, -1, 8), expected)
    size = 8 * 4 * (1 if operation == "reduce-scatter" else n)
    assert all(shard.data.nbytes == size for shard in result.addressable_shards)


def test_rates_count_the_bytes_that_a_device_sends():
    group = DeviceGroup("within a host (4)", "a", jax.devices()[:4])
    buffers = []

    def timed(_, argument):
        buffers.append(argument.addressable_shards[0].data.nbytes)
        return 0.5

    rates = [sample.rate for sample in measurements.link_rates([group], 2, timed)]
    assert buffers == [2 * 2**20, 2 * 2**20 / 4, 2 * 2**20]  # an all-gather makes the whole of them
    assert rates == pytest.approx([2 * 1.5 * 2**20 * 2e-9, 1.5 * 2**20 * 2e-9, 1.5 * 2**20 * 2e-9])
    assert measurements.matmul_rates("a", 100, lambda *_: 1e-3)[7].rate == pytest.approx(2 * 100**3 / 1e-3 / 1e12)


def test_the_disk_is_measured_and_left_clean(tmp_path, monkeypatch):
    """8 MiB by a clock that goes 5 seconds for writing and 1 for reading."""
    seconds, events = iter([0, 5, 6, 7]), []
    monkeypatch.setattr(
        measurements, "time", SimpleNamespace(perf_counter=lambda: events.append("clock") or next(seconds))
    )
    monkeypatch.setattr(os, "fsync", lambda _: events.append("on the disk"))
    write, read = disk_rates("a", tmp_path / "new", 8)
    assert [write.rate, read.rate] == pytest.approx([8 * 2**20 * 1e-9 / 5, 8 * 2**20 * 1e-9])
    assert events == ["clock", "on the disk", *["clock"] * 3]  # not only in the page cache
    assert not list(tmp_path.iterdir())


SMALL = ["--megabytes=1", "--matrix=32", "--disk-megabytes=1"]


def test_the_command_prints_a_table_and_a_slow_device_makes_its_status_1(tmp_path, monkeypatch, capsys):
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"run: {{dir: {tmp_path / 'run'}}}\nmodel: {{num_layers: 1, hidden_size: 8, num_heads: 2, vocab_size: 9}}\n"
        "mesh: {fsdp: -1}\nbatch: {global_size: 8, sequence_length: 4}\ndata: {kind: synthetic}\n"
    )
    highest = [*SMALL, "--threshold=1"]  # half of the devices are below the median
    assert command.main([str(config), "mesh.tensor=2", *highest]) == 0
    table = capsys.readouterr().out
    kinds = ("matmul", "within a host (8)", "pair within", "mesh.fsdp=4", "mesh.tensor=2", "disk write", "disk read")
    assert [kind for kind in kinds if kind not in table] == []
    # Virtual ones are not compared, and a disk has no equals.
    assert "not compared" in table and table.endswith("nothing is below 1 of its median\n") and "slow" not in table

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert command.main([*highest, f"--directory={tmp_path}"]) == 1
    lines = capsys.readouterr().out
    assert re.search(r"^matmul .* device \d+: .* TFLOP/s is \d+% of the median", lines, re.M)


@pytest.mark.parametrize(("rank", "measures"), [(0, True), (1, False), (2, True), (3, False)])
def test_the_disk_of_each_host_is_measured_once(rank, measures, monkeypatch):
    """Four processes, two on each host; this one is on the host of its rank."""
    hosts, measured = ["a", "a", "b", "b"], []
    here = SimpleNamespace(rank=rank, size=4, hosts=hosts, is_first=rank == 0, agree=lambda value, judge: value)
    monkeypatch.setattr(cluster, "current", lambda: here)
    monkeypatch.setattr(joining, "start_processes", lambda: None)
    monkeypatch.setattr(command.socket, "gethostname", lambda: hosts[rank])
    for name in ("matmul_rates", "link_rates", "groups"):
        monkeypatch.setattr(command, name, lambda *_: [])
    monkeypatch.setattr(command, "disk_rates", lambda host, *_: measured.append(host) or [])
    names = ("rates", "matrix", "megabytes", "disk_megabytes", "directory")
    command.preflight(None, Namespace(**dict.fromkeys(names)), None)
    assert measured == [hosts[rank]] * measures


@pytest.mark.parametrize(("hosts", "status"), [(["a", "a"], 0), (["a", "b"], 1)])
def test_sockets_are_a_problem_between_hosts_and_not_between_processes_of_one(hosts, status, monkeypatch, capsys):
    here = SimpleNamespace(rank=1, size=2, hosts=hosts, is_first=False, agree=lambda value, judge: judge([value] * 2))
    monkeypatch.setattr(cluster, "current", lambda: here)
    monkeypatch.setattr(joining, "start_processes", lambda: None)
    monkeypatch.setattr(command.socket, "gethostname", lambda: "a")
    for name in ("link_rates", "groups"):
        monkeypatch.setattr(command, name, lambda *_: [])
    monkeypatch.setattr(command, "matmul_rates", lambda *_: [measurements.Sample("matmul", "a", 1.0, "TFLOP/s")])
    monkeypatch.setattr(network, "chosen", lambda _: "Socket")
    options = Namespace(rates=None, matrix=1, megabytes=1, disk_megabytes=1, directory=None, threshold=0.8)
    assert command.preflight(None, options, None) == status
    assert ("NCCL uses TCP sockets" in capsys.readouterr().out) == bool(status)


def test_the_clock_takes_the_best_round(monkeypatch):
    times = iter([0, 10, 10, 15, 15, 30])  # 10, 5 and 15 s for CALLS calls
    monkeypatch.setattr(measurements.time, "perf_counter", lambda: next(times))
    assert measurements.seconds_per_call(lambda x: x, jax.numpy.zeros(1)) == 5 / measurements.CALLS


def test_less_than_four_fifths_of_the_median_is_slow_unless_another_share_is_given(monkeypatch):
    monkeypatch.setattr(command, "preflight", lambda config, options, log: options.threshold)
    assert (command.main([]), command.main(["--threshold=0.5"])) == (0.8, 0.5)


@pytest.mark.parametrize("option", ["--matrix", "--megabytes", "--disk-megabytes", "--threshold"])
def test_bad_options_are_sentences(capsys, option):
    with pytest.raises(SystemExit) as stopped:
        command.main([f"{option}=0"])
    assert stopped.value.code == 2 and f"{option}=0" in (said := capsys.readouterr().err) and "is not positive" in said


def test_a_directory_that_cannot_be_written_is_found_before_the_matmuls(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        command.main([f"--directory={tmp_path}/file/x", "--matrix=100000000"])  # more than any memory
    assert stopped.value.code == 2 and f"{tmp_path}/file/x cannot be opened" in capsys.readouterr().err


def test_tcp_between_hosts_is_a_problem_and_rdma_is_not(monkeypatch, tmp_path):
    # Lines of NCCL 2.28 on a host without InfiniBand, and of its form with it.
    lines = "vm:858:1025 [1] NCCL INFO NET/IB : No device found.\nvm:858:1025 [1] NCCL INFO Using network {}\n"
    (tmp_path / "log").write_text(lines.format("Socket"))
    assert network.chosen(tmp_path / "log") == "Socket"
    (tmp_path / "log").write_text(lines.format("IB"))
    assert network.chosen(tmp_path / "log") == "IB" and network.chosen(tmp_path / "none") == ""
    (tmp_path / "log").write_text(lines.format("IB") + lines.format("Socket"))  # the last one that it tried
    assert network.chosen(tmp_path / "log") == "Socket"
    line, (problem,) = network.report(["IB", "Socket", ""], hosts=2)
    assert line.endswith("IB, Socket") and "TCP" in problem and "NCCL_IB_HCA" in problem
    assert network.report(["IB", "IB"], hosts=2) == ("NCCL's network between hosts: IB", [])
    assert network.report(["Socket"], hosts=1) == network.report([""], hosts=2) == ("", [])


def test_nccl_writes_to_a_file_unless_the_user_reads_it_himself(monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    at_exit = []
    monkeypatch.setattr(network.atexit, "register", lambda *call, **options: at_exit.append(partial(*call, **options)))
    path = network.listen()
    assert os.environ["NCCL_DEBUG_FILE"] == str(path) and os.environ["NCCL_DEBUG"] == "INFO"
    assert network.listen() is None
    assert path is not None and path.parent.is_dir()
    path.touch()
    [clean_up] = at_exit
    clean_up()
    assert not path.parent.exists()
