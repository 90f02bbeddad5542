"""The program of a worker that runs a function: ``python function_worker.py FOLDER``, started by ``elastirun.launch``.

FOLDER has the call, and takes what it returns as ``result-ROUND-RANK``. It is set up as the standard library sets up a spawned process.
"""

import os
import sys


def main(folder: str) -> None:
    from multiprocessing import process, spawn

    from elastirun.functions import ByValue

    current = process.current_process()
    current._inheriting = True  # type: ignore[attr-defined]  # a script without "if __name__ == '__main__'" gets spawn's error message
    try:
        spawn.prepare(ByValue.loads(_read(folder, "preparation")))
        fn, args = ByValue.loads(_read(folder, "call"))
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    result = fn(*args)
    path = f"{folder}/result-{os.environ['ELASTIRUN_ROUND']}-{os.environ['RANK']}"
    with open(f"{folder}/.{os.path.basename(path)}", "wb") as file:
        file.write(ByValue.dumps(result))
    os.replace(file.name, path)


def _read(folder: str, name: str) -> bytes:
    with open(f"{folder}/{name}", "rb") as file:
        return file.read()


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # of the package, not of its modules
    main(sys.argv[1])
