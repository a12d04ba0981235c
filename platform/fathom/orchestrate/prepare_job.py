"""Files prepared side by side on a Ray cluster: what ``fathom.data.prepared.prepare`` takes in the place of ``map``."""

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fathom import errors
from fathom.data.shards import Part, PartWriter, Task
from fathom.errors import FathomError
from fathom.orchestrate.ray_train import connect


def each_on_ray(write: PartWriter, tasks: list[Task]) -> Iterator[Part]:
    """What ``write`` gives for each file, in their order, each made wherever the cluster has a processor free.

    A Ray Data job. Every machine must see the sources and the folder that ``write`` fills.

    Raises:
        FathomError: whatever ``write`` found wrong, as in one process.
        ServiceError: a Ray address was given and does not answer.
    """
    connect()
    import ray
    import ray.data

    held = ray.put(replace(write, folder=write.folder.absolute()))
    cwd = os.getcwd()

    def prepared(row: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):  # relative sources mean the folder the command was given in
            os.chdir(cwd)
        try:
            made = {"part": ray.get(held)(Task(**row))._asdict()}
        except FathomError as error:  # told below as it is, not in Ray's wrappers, and the first file's first
            made = {"fault": [type(error).__name__, error.message, error.remedy]}
        return {"number": row["number"], "made": json.dumps(made)}

    logging.getLogger("ray.data").setLevel(logging.WARNING)
    rows = [task._asdict() for task in tasks]
    found = ray.data.from_items(rows, override_num_blocks=len(rows)).map(prepared).take_all()
    for row in sorted(found, key=lambda row: row["number"]):
        made = json.loads(row["made"])
        if "fault" in made:
            kind, message, remedy = made["fault"]
            raise getattr(errors, kind)(message, remedy)
        part = made["part"]
        yield Part(**part | {"counts": Counter(part["counts"]), "dropped": Counter(part["dropped"])})
