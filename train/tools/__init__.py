"""The other commands: launch, compare, interconnect, graphs."""
