"""What is trained: the experiment, its model, its optimizer and its method."""
