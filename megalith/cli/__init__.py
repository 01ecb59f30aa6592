"""The command line: one table row per command (commands.py), and one file per group of commands."""
