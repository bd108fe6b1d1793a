"""The acceptance run: python -m train.accept."""
