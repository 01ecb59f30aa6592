"""Oumi's interface: its YAML configurations of GRPO, SFT and DPO, its commands and its Python names."""
