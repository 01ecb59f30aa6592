"""Translation of TRL's and PEFT's arguments to Megalith's settings."""
