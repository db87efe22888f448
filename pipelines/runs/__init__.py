"""What a training run consists of, around the loop in `pipelines.training`: data, models, processes, checkpoints, logs."""
