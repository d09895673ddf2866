"""The processes of a run in the environment: what cannot be meant is a sentence at once."""

import pytest

from megajax.cluster.environment import LAST_PORT, Processes, processes
from megajax.errors import ConfigError

EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
PORTS = ("0", "-1", "99999", str(LAST_PORT + 1), "text", "", "1 ", "٣", "9" * 5000, "1e3", "0x10")


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port[:9])
@pytest.mark.parametrize("name", ["JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"])
def test_a_port_that_there_is_none_of_is_a_sentence(name, port):
    with pytest.raises(ConfigError, match=f"{name}=node1:.*port from 1 to {LAST_PORT}") as error:
        processes(EXPLICIT | {name: f"node1:{port}"})
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


@pytest.mark.parametrize("port", [port for port in PORTS if port])
def test_so_is_the_port_for_slurm_which_jax_reads(port):
    with pytest.raises(ConfigError, match=f"JAX_COORDINATOR_PORT=.*port from 1 to {LAST_PORT}"):
        processes(SLURM | {"JAX_COORDINATOR_PORT": port})


@pytest.mark.parametrize(
    "address", ["1234", "node1", "", ":1234", "http://node1:1234", "no de:1234", "::1:1234", "\0:1"]
)
def test_an_address_without_a_host_and_a_port_is_a_sentence(address):
    with pytest.raises(ConfigError, match=r"JAX_COORDINATOR_ADDRESS=.*such as node1:1234, or \[::1\]:1234"):
        processes(EXPLICIT | {"JAX_COORDINATOR_ADDRESS": address})


@pytest.mark.parametrize("name", [*SLURM, *OPEN_MPI])
@pytest.mark.parametrize("value", ["-1", "two", "1.5", "²", "9" * 5000], ids=lambda value: value[:9])
def test_a_number_that_is_none_is_a_sentence(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value[:4]}"):
        processes((SLURM if name in SLURM else OPEN_MPI) | {name: value})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"SLURM_PROCID": "2"}, "SLURM_NTASKS=2 and SLURM_PROCID=2 do not fit"),
        ({"JAX_LOCAL_DEVICE_IDS": "0,x"}, "JAX_LOCAL_DEVICE_IDS=0,x"),
    ],
)
def test_values_that_do_not_fit_are_a_sentence(wrong, named):
    with pytest.raises(ConfigError, match=named):
        processes(SLURM | wrong)


@pytest.mark.parametrize("address", ["node-1.cluster_a:1", "10.0.0.1:65535", "[::1]:1234", "[fe80::1%eth0]:1234"])
def test_good_addresses_are_taken(address):
    assert processes(EXPLICIT | {"JAX_COORDINATOR_ADDRESS": address}) == Processes(4, 3, address, None)


def test_slurm_and_open_mpi_and_a_single_process():
    assert processes(SLURM) == processes(SLURM | OPEN_MPI) == Processes(2, 1, None, None)
    assert processes(OPEN_MPI) == Processes(3, 2, None, None)
    assert processes({"SLURM_NTASKS": "1", "SLURM_PROCID": "odd"}) is processes({}) is None


def test_torchrun_alone_is_a_mistake():
    torchrun = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match=r"WORLD_SIZE='?2'? .*megajax launch.*JAX_COORDINATOR_ADDRESS"):
        processes(torchrun)
    assert processes(torchrun | {"WORLD_SIZE": "1"}) is None
    jax_too = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert processes(torchrun | jax_too) == (2, 1, "node1:1234", None)
    assert processes(torchrun | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}) == (2, 1, None, None)
    assert processes(torchrun | {"OMPI_COMM_WORLD_SIZE": "1"}) is None
