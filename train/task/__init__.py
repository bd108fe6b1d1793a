"""The task of a run: experiment, model, optimizer and method."""
