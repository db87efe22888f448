"""What the loop trains for each objective: a guided model with its batches, losses and validation."""
