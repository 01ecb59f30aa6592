"""Models of a run apart from the policy: reference, critic and frozen models."""
