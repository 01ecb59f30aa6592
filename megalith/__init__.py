"""Megalith trains large transformers on any number of devices."""
