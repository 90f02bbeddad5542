"""Takes from Python what it lacks where it was built for glibc 2.17, as conda's is. Put this folder on ``PYTHONPATH``."""

import fcntl
import os
import signal

MODULES = {
    os: ("pidfd_open", "P_PIDFD", "memfd_create", "MFD_"),
    signal: ("pidfd_send_signal",),
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_"),
}

for module, names in MODULES.items():
    for name in [name for name in vars(module) if name.startswith(names)]:
        delattr(module, name)
