"""Train a recipe: what `fathom submit` runs on a cluster. `python jobs/train.py RECIPE [--set section.key=value]`."""

import sys

from fathom.cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
