"""Objectives: what is learned, as sums and counts. Imports no Ray, no MLflow, no DeepSpeed."""
