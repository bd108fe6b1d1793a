"""One run: the loop, checkpoints, and going on from them."""
