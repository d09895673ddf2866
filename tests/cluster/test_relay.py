"""The relay between jax's client and its coordinator."""

import socket
import struct

import pytest

from megajax.cluster import relay


@pytest.fixture
def service():
    """A listening socket in the place of the coordinator, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, f"127.0.0.1:{listener.getsockname()[1]}"
    relay.LOST.clear()


def connected(listener: socket.socket, address: str) -> tuple[socket.socket, socket.socket]:
    """(client's side, service's side) of a connection through a relay to `address`."""
    scheme, _, name = relay.relay(address).partition(":")
    assert scheme == "unix-abstract"
    client = socket.socket(socket.AF_UNIX)
    client.connect(f"\0{name}")
    client.settimeout(10)
    return client, listener.accept()[0]


@pytest.mark.parametrize("resets", [False, True])  # as a host does that does not know the connection any more
def test_bytes_pass_and_the_client_does_not_see_the_end_of_the_service(service, resets):
    relay.LOST.clear()
    client, far = connected(*service)
    client.sendall(b"question")
    assert far.recv(100) == b"question"
    far.sendall(b"answer")
    assert client.recv(100) == b"answer"
    if resets:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    assert relay.LOST.wait(10)
    client.settimeout(0.05)
    with pytest.raises(TimeoutError):  # open, and silent
        client.recv(100)


def test_a_connection_that_the_client_ends_is_no_loss(service):
    relay.LOST.clear()
    client, far = connected(*service)
    client.close()
    assert far.recv(100) == b""
    far.close()
    assert not relay.LOST.wait(0.1)


def test_without_a_service_the_client_is_turned_away_and_may_try_again(service):
    listener, address = service
    listener.close()
    client = socket.socket(socket.AF_UNIX)
    client.connect("\0" + relay.relay(address).partition(":")[2])
    client.settimeout(10)
    assert client.recv(100) == b""
