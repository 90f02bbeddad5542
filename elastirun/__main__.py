from elastirun.cli import main

main()
