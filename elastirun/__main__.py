from elastirun import early, standard_streams


def main() -> None:
    early.obey()
    standard_streams.open_closed()
    from elastirun import cli  # imports click and much else

    cli.main()


if __name__ == "__main__":
    main()
