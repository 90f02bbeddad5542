"""The program of a worker that runs a function for ``elastirun.launch``: ``python function_worker.py FOLDER``.

FOLDER holds the call and takes its result as ``result-ROUND-RANK``. The process is set up as the standard library sets up a spawned one.
"""

import os
import sys
from pathlib import Path


def main(folder: str) -> None:
    """Call the function and write its result. An exception ends the process, as in any other worker."""
    from multiprocessing import process, spawn

    from elastirun.functions import ByValue

    current = process.current_process()
    # The standard library then explains the error of a script without "if __name__ == '__main__'".
    current._inheriting = True  # type: ignore[attr-defined]
    try:
        spawn.prepare(ByValue.loads(Path(folder, "preparation").read_bytes()))
        fn, args = ByValue.loads(Path(folder, "call").read_bytes())
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    result = fn(*args)
    path = f"{folder}/result-{os.environ['ELASTIRUN_ROUND']}-{os.environ['RANK']}"
    unfinished = Path(folder, f".{os.path.basename(path)}")
    unfinished.write_bytes(ByValue.dumps(result))
    unfinished.rename(path)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).absolute().parents[2])  # the folder of the package, not the one of its modules
    main(sys.argv[1])
