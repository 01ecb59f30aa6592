"""The command line: one table row a command (main.py), a file for each group of them."""
