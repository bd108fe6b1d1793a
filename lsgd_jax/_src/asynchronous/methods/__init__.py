"""Methods whose workers do not wait for each other.

Each decides whom its worker asks, and moves parameters by the answer.
"""
