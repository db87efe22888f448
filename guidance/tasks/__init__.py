"""What the tasks of the papers compute, without models and files: entities, segments, summaries and their scores."""
