"""The command line of `elastirun check`."""
