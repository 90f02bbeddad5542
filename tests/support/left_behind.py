"""Lines of a worker's script that leave processes behind."""

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
