"""The command line: options and variables become one frozen configuration."""
