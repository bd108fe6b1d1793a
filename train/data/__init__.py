"""Data sets, and the batches that workers draw from them."""
