"""Several processes: detection, rendezvous, heartbeat, signals."""
