"""Estimates of a job's memory, FLOPs, time and communication, and the search for its layout, without its devices."""
