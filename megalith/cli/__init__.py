"""The command line: one table entry per command (commands.py), and one file per group of commands."""
