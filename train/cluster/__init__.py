"""Several processes: detection, rendezvous, texts, signals, lock step on Ray Train."""
