"""The trainer: python -m train NAME."""
