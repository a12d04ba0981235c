"""The looped model: rows, one loop, five axes. Imports no Ray, no MLflow, no DeepSpeed."""
