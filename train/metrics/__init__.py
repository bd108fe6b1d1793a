"""What a run tells: metrics, progress, plots, tables."""
