"""Hosts on this machine for tests: each has its name, its address and its network.

They are network namespaces on one bridge. Needs Linux, root and iproute2.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess

import pytest


TAG = os.getpid() % 10_000  # makes the names of namespaces and links unique
# Not `ip netns exec`, which would hide the control groups that Slurm needs.
AS_HOST = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


class Hosts:
    """Hosts n1, n2, ... that reach one another by their names.

    Args:
      folder: a folder for their files.
      count: the number of hosts.
    """

    def __init__(self, folder, count):
        self.folder = folder
        self.names = [f"n{i + 1}" for i in range(count)]
        self._processes = []

    def address(self, name):
        return f"10.78.0.{self.names.index(name) + 1}"

    def namespace(self, name):
        return f"lsgd{TAG}-{name}"

    def inside(self, name, *command):
        """The command line that runs a command on a host."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespace(name)}"]
        own = ["unshare", "--mount", "--uts", "sh", "-c", AS_HOST, f"{self.folder}/hosts"]
        return [*enter, *own, name, *map(str, command)]

    def start(self, name, *command, **options):
        """Starts a command on a host. It ends with the hosts."""
        line = self.inside(name, *command)
        process = subprocess.Popen(line, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def run(self, name, *command, **options):
        """Runs a command on a host and returns its output."""
        line = self.inside(name, *command)
        done = subprocess.run(
            line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
        )
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def shell(self, path):
        """Writes a program that runs a command on a host as ssh does: HOST COMMAND ..."""
        line = shlex.join(self.inside("HOST", "sh", "-c")).replace("HOST", "$host")
        path.write_text(f'#!/bin/sh\nhost=$1\nshift\nexec {line} "$*"\n')
        path.chmod(0o755)
        return path

    def processes(self, name):
        """The numbers of the processes on a host."""
        line = ["ip", "netns", "pids", self.namespace(name)]
        found = subprocess.run(line, text=True, stdout=subprocess.PIPE, check=True).stdout
        return [int(number) for number in found.split()]

    def unplug(self, name):
        """Takes a host off the network."""
        _ip("link", "set", f"v{TAG}-{name}", "down")

    def plug(self, name):
        """Puts a host back on the network."""
        _ip("link", "set", f"v{TAG}-{name}", "up")

    def kill(self, name):
        """Kills all processes of a host."""
        for number in self.processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def __enter__(self):
        bridge = f"lsgd{TAG}"
        names = [f"{self.address(name)} {name}\n" for name in self.names]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove)
            _ip("link", "add", bridge, "type", "bridge")
            _ip("link", "set", bridge, "up")
            for name in self.names:
                self._add(name, bridge)
            stack.pop_all()
        return self

    def __exit__(self, *_):
        self._remove()

    def _add(self, name, bridge):
        outside, inside = f"v{TAG}-{name}", f"e{TAG}-{name}"
        space = self.namespace(name)
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", space)
        _ip("link", "set", outside, "master", bridge, "up")
        _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", inside)
        _ip("-n", space, "link", "set", inside, "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def _remove(self):
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.kill(name)
        for process in self._processes:
            process.kill()
            process.wait()
        for name in self.names:
            # The kernel would remove it some time after its namespace, and the next hosts
            # have the same names.
            _ip("link", "del", f"v{TAG}-{name}", check=False)
            _ip("netns", "del", self.namespace(name), check=False)
        _ip("link", "del", f"lsgd{TAG}", check=False)


def need(*programs):
    """Skips a test unless it can have hosts and finds programs on the path."""
    for name in ("ip", "nsenter", "unshare", *programs):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    if os.getuid() != 0:
        pytest.skip("only root can make network namespaces")


def _ip(*words, check=True):
    subprocess.run(
        ["ip", *words], check=check, stderr=None if check else subprocess.DEVNULL
    )
