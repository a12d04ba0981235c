"""The OpenAI-compatible HTTP surface, with one ``depth`` object per request."""
