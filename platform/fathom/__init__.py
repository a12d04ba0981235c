"""Fathom: language models that think deeper on hard tokens."""

__version__ = "0.1.0"
