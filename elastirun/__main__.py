from elastirun import early


def main() -> None:
    early.obey()
    from elastirun import cli  # imports click and much else

    cli.main()


if __name__ == "__main__":
    main()
