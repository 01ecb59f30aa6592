"""Commands that parse their own arguments: those of other systems, and `bench`."""

from __future__ import annotations


def megatron(words: list[str]) -> int:
    """Run `megalith pretrain-gpt FLAGS` or `megalith megatron run|install|flags …`."""
    from megalith.dialects.megatron import door

    if words[0] == "megatron":
        words = words[1:]
        if not words or words[0] in ("-h", "--help"):
            print(door.__doc__)
            return 0
    return door.run_command(words)


def accelerate(words: list[str]) -> int:
    """Run `megalith accelerate launch|config|enable|disable …`."""
    from megalith.dialects.accelerate.launch_door import run_command

    return run_command(words[1:])


def oumi(words: list[str]) -> int:
    """Run `megalith oumi train|distributed|plan|migrate …`."""
    from megalith.dialects.oumi.oumi_command import run_command

    return run_command(words[1:])


def bench(words: list[str]) -> int:
    """Run `megalith bench WORKLOAD|NAME …`."""
    from megalith.bench.bench_command import run_command

    return run_command(words[1:])
