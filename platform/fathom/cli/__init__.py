"""The ``fathom`` command: one module per command, imported only when that command runs."""
