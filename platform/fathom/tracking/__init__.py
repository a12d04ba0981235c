"""Runs and models in MLflow: one writer over a local spool; tracking never stops training."""
