"""The statements of the theory, and functions that check them."""
