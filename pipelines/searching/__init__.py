"""What a search trains: the settings that it compares, and the runs with them."""
