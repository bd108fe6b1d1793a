"""Data sets, and how workers go through them."""
