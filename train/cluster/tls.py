"""Mutual TLS between the coordinator and the processes of a run."""

import inspect
import pathlib
import ssl
from typing import Any

import jax


CERT, KEY, CA = "cert.pem", "key.pem", "ca.pem"


def credentials(folder: str | None) -> dict[str, Any]:
    """Arguments for jax by which the processes prove to one another who they are.

    Raises:
      ValueError: files are missing, or this jax does not know what to do with them.
    """
    if folder is None:
        return {}
    files = {"cert": CERT, "key": KEY, "ca": CA}
    paths = {f"mtls_{k}_file": pathlib.Path(folder) / name for k, name in files.items()}
    missing = [path.name for path in paths.values() if not path.is_file()]
    if missing:
        raise ValueError(
            f"`distributed.tls` must be a folder with {', '.join(files.values())}, but "
            f"{folder} holds no {', '.join(missing)}"
        )
    known = inspect.signature(jax.distributed.initialize).parameters
    if not paths.keys() <= known.keys():
        raise ValueError(f"`distributed.tls` needs jax 0.12, here is jax {jax.__version__}")
    return {k: str(path) for k, path in paths.items()} | {"verify_secure_credentials": True}


def context(folder: str | None) -> ssl.SSLContext | None:
    """Python's means to connect as jax will.

    With files that it cannot use jax would wait for the others in vain, and not say why.

    Raises:
      ValueError: the files cannot be used.
    """
    if folder is None:
        return None
    where = pathlib.Path(folder)
    names = CA
    try:
        found = ssl.create_default_context(cafile=str(where / CA))
        names = f"{CERT} and {KEY}"
        # Without a password it would ask for one; jax takes no encrypted key.
        found.load_cert_chain(where / CERT, where / KEY, password="")
    except OSError as error:
        raise ValueError(
            f"`distributed.tls` must be a folder with a certificate, its key and its CA, "
            f"but {names} in {folder} cannot be used: {why(error)}"
        ) from error
    found.verify_flags &= ~ssl.VERIFY_X509_STRICT  # jax is not so strict
    found.set_alpn_protocols(["h2"])
    return found


def why(error: OSError) -> str:
    """What is wrong, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return error.strerror or str(error)
