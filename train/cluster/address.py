"""The coordinator's address: found at once, and listened at nowhere else."""

import ipaddress
import os
import socket
import ssl
import time

from train.cluster import tls


RETRY_S = 60.0  # a cluster may make a host's name known only after it has started the host
PATIENCE_S = 2.0  # to connect, and to be answered
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # first words of a client
SETTINGS = b"\x04"  # the kind of the first frame of a server


def split(address: str) -> tuple[str, int]:
    """Host and port.

    >>> split("[::1]:80")
    ('::1', 80)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def addresses(host: str, patience: float) -> list[str]:
    """What a host's name stands for here.

    Raises:
      OSError: it does not stand for anything, as yet after some seconds' patience.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(each[4][0]) for each in found))
        except OSError as error:
            if time.monotonic() >= deadline:
                reason = f"the host name {host} cannot be resolved here ({error.strerror})"
                raise OSError(f"{reason}; is --distributed.coordinator right?") from error
        time.sleep(0.5)


def check_name(address: str, start_timeout: float) -> None:
    """Raises OSError if the coordinator's name is not known, at once where it must be."""
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    addresses(split(address)[0], min(RETRY_S, start_timeout) if in_pod else 0.0)


def where_to_listen(address: str) -> str:
    """Where process 0 listens for the others: HOST:PORT, or [::]:PORT for everywhere.

    At the given address only, as far as it is known here: in /etc/hosts a host's own name
    often stands for an address at which no other host can reach it.
    """
    given = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if given is not None:
        return given
    host, port = split(address)
    own = [found for found in addresses(host, 0.0) if can_listen(found, 0)]
    is_name_of_this_host = host != "localhost" and not _is_literal(host)
    if is_name_of_this_host:
        own = [found for found in own if not ipaddress.ip_address(found).is_loopback]
    if not own:
        return f"[::]:{port}"
    return f"[{own[0]}]:{port}" if ":" in own[0] else f"{own[0]}:{port}"


def can_listen(host: str, port: int) -> bool:
    """Whether something can listen there; OSError says why not if the port is given."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind) as trial:
        # As servers do: connections that were closed a moment ago take no port.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            if port:
                raise
            return False
    return True


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def wait_for_coordinator(
    address: str, secure: ssl.SSLContext | None, patience: float
) -> None:
    """Returns when the coordinator is there, or after so many seconds.

    jax would go on trying, and not say why, for as long as it waits for the others.

    Raises:
      OSError: something else is there, or it does not take this process for one of the run.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            trouble = _trouble(address, secure)
        except OSError:  # it is not there yet
            time.sleep(0.2)
            continue
        if trouble is None:
            return
        raise OSError(
            f"{trouble}; is --distributed.coordinator right, and do all processes have the "
            "same --distributed.tls, or none?"
        )


def what_answers(address: str, secure: ssl.SSLContext | None = None) -> str:
    """What comes of a connection to an address, for a message."""
    try:
        return _trouble(address, secure) or "something listens there"
    except OSError as error:
        return f"nothing answers there ({error.strerror or error})"


def _trouble(address: str, secure: ssl.SSLContext | None) -> str | None:
    """What keeps this process from talking to a coordinator at an address.

    Args:
      secure: the means for TLS if the coordinator is to use it.

    Returns:
      None: nothing does, as far as is known.

    Raises:
      OSError: nothing answers there.
    """
    host, port = split(address)
    with socket.create_connection((host, port), PATIENCE_S) as plain:
        try:
            said = _said(plain, host, secure)
        except ssl.SSLError as error:
            return f"TLS with what listens at {address} fails: {tls.why(error)}"
        except ConnectionResetError:
            said = b""
        except TimeoutError:  # a coordinator that is busy, perhaps
            return None
    if not said:
        return f"what listens at {address} closes connections"
    is_coordinator = said[3:4] == SETTINGS
    return None if is_coordinator else f"what listens at {address} is no coordinator"


def _said(plain: socket.socket, host: str, secure: ssl.SSLContext | None) -> bytes:
    """What is answered to the first words of HTTP/2."""
    if secure is None:
        plain.sendall(HTTP_2)
        return plain.recv(9)
    with secure.wrap_socket(plain, server_hostname=host) as channel:
        channel.sendall(HTTP_2)
        return channel.recv(9)
