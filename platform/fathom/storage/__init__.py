"""Bytes by URI: a folder or ``s3://``, one configuration from the environment, damage found by digest."""
