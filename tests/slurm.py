"""A Slurm cluster on this machine for tests: slurmctld, munged, and a slurmd per host."""

import os
import subprocess
import time

from hosts import Hosts


CONFIGURATION = """
ClusterName=lsgd
SlurmctldHost={first}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdTimeout=5
ReturnToService=2
KillWait=30
MpiDefault=none
GresTypes=gpu
NodeName={nodes} CPUs=64 RealMemory=1000 Gres=gpu:4
PartitionName=all Nodes={nodes} Default=YES OverSubscribe=YES:4
"""


class Slurm(Hosts):
    """Hosts whose scheduler is Slurm."""

    def __enter__(self):
        super().__enter__()
        try:
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_daemons(self):
        folder, first = self.folder, self.names[0]
        for name in ("state", *self.names):
            (folder / name).mkdir()
        nodes = ",".join(self.names)
        text = CONFIGURATION.format(first=first, folder=folder, nodes=nodes)
        (folder / "slurm.conf").write_text(text)
        devices = ("null", "zero", "full", "random")  # stand for GPUs
        gpus = "".join(f"Name=gpu File=/dev/{name}\n" for name in devices)
        (folder / "gres.conf").write_text(gpus)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{x}-file={folder}/munge.{x}" for x in ("key", "pid", "log", "seed")]
        socket = f"--socket={folder}/munge.socket"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.start(first, "munged", "--foreground", "--force", *files, socket, **quiet)
        self.until(lambda: (folder / "munge.socket").exists())
        self.start(first, "slurmctld", "-D", env=self.environment(), **quiet)
        for name in self.names:
            self.boot(name)
        self.until(lambda: self.states() == {"idle"})

    def boot(self, name):
        """Starts the daemon of a host."""
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.start(name, "slurmd", "-D", "-N", name, env=self.environment(), **quiet)

    def environment(self, **variables):
        return os.environ | {"SLURM_CONF": f"{self.folder}/slurm.conf"} | variables

    def ask(self, *command, **options):
        """Runs a command of Slurm on the first host and returns its output."""
        options.setdefault("env", self.environment())
        return self.run(self.names[0], *command, **options)

    def states(self):
        """The states of the nodes."""
        try:
            return set(self.ask("sinfo", "-h", "-N", "-o", "%T", timeout=30).split())
        except AssertionError:
            return set()

    def job(self, number):
        """What Slurm says of a job: {name: value}."""
        text = self.ask("scontrol", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def until(self, holds, seconds=60):
        """Waits for a condition."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.1)

    def told(self):
        """The last lines of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log}: {log.read_text()[-1500:]}" for log in logs)
