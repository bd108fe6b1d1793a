"""Named experiments, one file each: python -m train NAME."""
