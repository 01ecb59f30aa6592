"""Oumi's configurations: YAML of GRPO, SFT and DPO, its commands, its Python names."""
