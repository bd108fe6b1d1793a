"""Certificates for TLS on this machine, for tests."""

import shutil
import subprocess

import pytest


EXTENSIONS = ("basicConstraints=CA:FALSE", "subjectAltName=IP:127.0.0.1,DNS:localhost")


def make(folder):
    """ca.pem, cert.pem and key.pem for this machine, from a CA of their own."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    folder.mkdir()
    new = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    )
    ca = [*new.split(), "-keyout", "ca-key.pem", "-out", "ca.pem", "-subj", "/CN=CA"]
    own = [*new.split(), "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=trainer"]
    own += ["-CA", "ca.pem", "-CAkey", "ca-key.pem"]
    own += [word for extension in EXTENSIONS for word in ("-addext", extension)]
    for command in (ca, own):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def mix(folder, parts):
    """A folder with files of others: name -> folder."""
    folder.mkdir()
    for name, source in parts.items():
        shutil.copy(source / name, folder)
    return folder
