"""``python -m fathom`` is the ``fathom`` command."""

from fathom.cli.main import main

main()
