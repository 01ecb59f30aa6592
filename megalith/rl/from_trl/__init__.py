"""TRL's and PEFT's arguments as settings of ours."""
