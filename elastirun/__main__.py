"""Entry point of the command: installs signal handlers and checks the standard streams before the slow imports."""

import elastirun.clock  # noqa: F401  # before all else: the account of an agent begins with this import
from elastirun import early_signals, standard_streams


def main() -> None:
    early_signals.install()
    standard_streams.open_closed()
    from elastirun.agent.processes.preload import torch_library

    torch_library.load_if_warm()
    from elastirun.cli import main  # imports click and much else

    main.main()


if __name__ == "__main__":
    main()
