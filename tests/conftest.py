"""What every test shares: an environment in which no launcher has run yet."""

import os

LAUNCHER_PREFIXES = ("ELASTIRUN_", "GROUP_", "LOCAL_", "MASTER_", "PET_", "ROLE_", "TORCHELASTIC_")

for _name in list(os.environ):  # before any test module is imported, so that the processes the tests start do not see them either
    if _name.startswith(LAUNCHER_PREFIXES) or _name in ("RANK", "WORLD_SIZE"):
        del os.environ[_name]

# TCPStore asks DNS for the name of each peer, for a line in a log. A name server that drops a question costs a second then, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
