"""Several processes: detection, rendezvous, messages, signals, lock step on Ray Train."""
