"""What is no stage: checks of the machine, conversion of pickled weights."""
