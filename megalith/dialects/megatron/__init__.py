"""Megatron-LM's command line: its flags, its scripts and the files to which they refer."""
