"""What workers leave behind: lines of a script that leave processes, and a folder that torch leaves."""

from pathlib import Path

TORCHS_OWN = "torchinductor_"  # what its import of torch._dynamo makes, and leaves, in the folder for temporary files

# Two processes, each in a session of its own and with init for a parent; one of them is stopped. The script imports os and signal.
DAEMONS = """
for stopped in (False, True):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            if stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                signal.pause()
        os._exit(0)
    os.wait()
"""


def own_files(folder: Path) -> list[str]:
    """Return the names in a folder for temporary files, but for what torch leaves there."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(TORCHS_OWN))
