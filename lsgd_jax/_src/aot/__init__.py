"""Ahead-of-time compilation for clusters that this machine does not have."""
