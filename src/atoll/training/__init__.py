"""Robust training: the training loop, methods, schedules, checkpoints and metrics."""
