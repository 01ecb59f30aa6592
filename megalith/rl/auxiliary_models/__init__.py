"""Models that a run holds besides the policy: reference, critic and frozen models."""
