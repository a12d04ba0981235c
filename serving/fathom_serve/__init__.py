"""Serving for adaptive-depth language models: the engine, its API and its Ray Serve application."""
