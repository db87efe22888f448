"""What a training run consists of, around the loop in `pipelines.training.loop`: data, models, processes, checkpoints, logs."""
