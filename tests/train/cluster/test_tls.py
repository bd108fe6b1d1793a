"""Who is taken for a process of the run, and what the others are told."""

import contextlib
import socket
import ssl
import threading

import certificates
import jax
import pytest

from train.cluster import address, tls


SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # what a coordinator says first


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One for the run, one from another CA, and mixtures."""
    root = tmp_path_factory.mktemp("certificates")
    run, other = (certificates.make(root / name) for name in ("run", "other"))
    stranger = {"ca.pem": run, "cert.pem": other, "key.pem": other}
    no_match = {"ca.pem": run, "cert.pem": run, "key.pem": other}
    return {
        "run": run,
        "other": other,
        "stranger": certificates.mix(root / "stranger", stranger),
        "no match": certificates.mix(root / "no match", no_match),
    }


@contextlib.contextmanager
def server(says, folder=None):
    """Something that listens, with mutual TLS if there is a folder; its port."""
    secure = None
    if folder is not None:
        secure = ssl.create_default_context(
            ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.pem"
        )
        secure.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        secure.verify_mode = ssl.CERT_REQUIRED
        secure.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13's, not jax's

    def serve():
        with contextlib.suppress(OSError):
            while True:
                channel = listening.accept()[0]
                channel.settimeout(5)
                with contextlib.suppress(OSError), channel:
                    if secure is not None:
                        channel = secure.wrap_socket(channel, server_side=True)
                    with channel:
                        channel.recv(100)
                        channel.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def wait(port, folder=None, host="127.0.0.1"):
    return address.wait_for_coordinator(f"{host}:{port}", tls.context(folder), 5)


def test_the_processes_of_the_run_are_taken(folders):
    with server(SETTINGS, folders["run"]) as port:
        assert wait(port, folders["run"]) is None
        assert wait(port, folders["run"], "localhost") is None
    with server(SETTINGS) as port:
        assert wait(port) is None


def test_who_is_not_of_the_run_is_told_so_at_once(folders):
    hint = "right, and do all processes have the same --distributed.tls, or none"
    with server(SETTINGS, folders["run"]) as port:
        fails = f"TLS with what listens at 127.0.0.1:{port} fails: "
        with pytest.raises(OSError, match=f"{fails}.* certificate .*; .*{hint}"):
            wait(port, folders["other"])
        with pytest.raises(OSError, match=f"({fails}|closes connections).*{hint}"):
            wait(port, folders["stranger"])
        with pytest.raises(OSError, match=f"127.0.0.1:{port} closes connections; .*{hint}"):
            wait(port)
        assert address.what_answers(f"127.0.0.1:{port}").endswith(" closes connections")
    with server(SETTINGS) as port, pytest.raises(OSError, match="wrong version number"):
        wait(port, folders["run"])


def test_a_certificate_must_name_the_coordinator(folders, monkeypatch):
    with server(SETTINGS, folders["run"]) as port:
        local = socket.create_connection
        here = lambda _, patience: local(("127.0.0.1", port), patience)
        monkeypatch.setattr(socket, "create_connection", here)
        with pytest.raises(OSError, match="certificate is not valid for 'node0'"):
            wait(port, folders["run"], "node0")


def test_a_server_that_is_no_coordinator_is_said_at_once():
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        words = f"what listens at 127.0.0.1:{port} is no coordinator; .*coordinator right"
        with pytest.raises(OSError, match=words):
            wait(port)


def test_nothing_is_concluded_from_silence(monkeypatch):
    monkeypatch.setattr(address, "PATIENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        wait(silent.getsockname()[1])
        port = silent.getsockname()[1]
    address.wait_for_coordinator(f"127.0.0.1:{port}", None, 0.1)  # jax may try on


def test_credentials_need_all_their_files_and_a_jax_that_knows_them(tmp_path):
    (tmp_path / "cert.pem").touch()
    with pytest.raises(ValueError, match="holds no key.pem, ca.pem"):
        tls.credentials(str(tmp_path))
    for name in ("key.pem", "ca.pem"):
        (tmp_path / name).touch()
    if jax.__version_info__ < (0, 12):
        with pytest.raises(ValueError, match="`distributed.tls` needs jax 0.12, here is"):
            tls.credentials(str(tmp_path))
    else:
        assert tls.credentials(str(tmp_path))["verify_secure_credentials"]
    with pytest.raises(ValueError, match="ca.pem in .* cannot be used: no certificate"):
        tls.context(str(tmp_path))


def test_files_that_do_not_fit_are_found_out_before_jax_waits(folders):
    with pytest.raises(ValueError, match="cannot be used: key values mismatch"):
        tls.context(str(folders["no match"]))
