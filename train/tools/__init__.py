"""The launcher."""
