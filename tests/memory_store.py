"""A key-value store in memory, through which threads are the processes of a run."""

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from train.cluster.session import Session


class Service:
    """What all processes have written, by folder and process, and who of them is dead."""

    def __init__(self):
        self.texts = defaultdict(dict)
        self.counts = defaultdict(int)
        self.dead = set()
        self.is_there = True
        self.lock = threading.Lock()


class MemoryStore:
    """See `train.cluster.key_value_store.KeyValueStore`."""

    def __init__(self, service, process_id, num_processes):
        self.service = service
        self.process_id, self.num_processes = process_id, num_processes

    def write(self, folder, text):
        with self.service.lock:
            self.service.texts[folder][self.process_id] = text

    def read(self, folder):
        with self.service.lock:
            return dict(self.service.texts[folder])

    def live(self, processes):
        return set(processes) - self.service.dead

    def is_service_there(self):
        return self.service.is_there

    def service_port(self):
        return None


def sessions(count, service=None):
    """Those of so many processes, on hosts a, b, c, …"""
    service = Service() if service is None else service
    hosts = [chr(ord("a") + i) for i in range(count)]
    return [Session(MemoryStore(service, i, count), hosts) for i in range(count)]


def each(count, function, service=None):
    """What function(session) returns in each of so many processes, which are threads."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, sessions(count, service)))
