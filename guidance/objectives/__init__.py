"""The mathematics of training objectives: masking, drawing, losses and decoding."""
