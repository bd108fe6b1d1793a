"""Metrics, progress and tables of runs."""
