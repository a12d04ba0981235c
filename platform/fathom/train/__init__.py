"""The training loop: steps, schedule, checkpoints, and what a worker does from recipe to exported model."""
