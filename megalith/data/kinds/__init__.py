"""Dataset kinds, one file each, listed in dataset_kinds.py."""
