"""One small file per family of methods."""
