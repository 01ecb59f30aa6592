"""`megalith completion`: scripts that complete commands, options and settings in bash, zsh and fish.

The scripts are generated from the command table and the settings, so they need no Python when a key is pressed.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

from megalith.cli.commands import COMMANDS, GROUPS
from megalith.cli.parser import Arguments, option_strings

SHELLS = ("bash", "zsh", "fish")
TAKES_SETTINGS = ("train", "sft", "dpo", "kto", "reward", "distill", "teacher-logits", "grpo", "parity", "evaluate",
                  "plan")  # fmt: skip


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        'Print a script that completes commands, options and settings. bash: add `eval "$(megalith completion bash)"` '
        "to ~/.bashrc. zsh: the same with zsh in ~/.zshrc, after compinit. fish: megalith completion fish > "
        "~/.config/fish/completions/megalith.fish. Repeat it after an update."
    )
    parser.add_argument("shell", choices=SHELLS)


def run_completion(args: Arguments) -> int:
    words = words_by_command()
    print(_fish(words) if args.shell == "fish" else _bash(words, args.shell), end="")
    return 0


def words_by_command() -> dict[str, list[str]]:
    """Return the arguments that can follow each command: commands after "" and after groups, otherwise options."""
    from megalith.cli.main import build_parser
    from megalith.cli.planning import read_options
    from megalith.cli.training import launcher_words
    from megalith.config.describe import alias_words, settings
    from megalith.config.run import RunConfig

    words = {"": sorted({name.split()[0] for name in COMMANDS})}
    for group in GROUPS:
        words[group] = [name.split()[1] for name in COMMANDS if name.startswith(f"{group} ")]
    keys = [f"--{setting.path}" for setting in settings(RunConfig) if not setting.not_yet]
    keys += [f"--{name}" for name, _ in alias_words()]
    for name, command in COMMANDS.items():
        options: Sequence[str] = ()
        if command.options is not None:
            parser = build_parser(name.split())
            for word in name.split():
                parser = parser.commands.choices[word]
            options = _options(parser)
        elif command.run == "training:train":
            options = launcher_words()
        elif name == "plan":
            options = ["show", "goodput", "calibrate", *read_options()]
        words[name] = [*options, *(keys if name in TAKES_SETTINGS else ())]
    return words


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for option in option_strings(parser) if option.startswith("--")]


def _cases(words: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the cases of a shell's `case` statement. Commands with equal lists share a case."""
    return [
        f"    {'|'.join(map(shlex.quote, names)) or chr(39) * 2}) words={shlex.quote(' '.join(following))} ;;"
        for following, names in _names_by_words(words).items()
    ]


def _names_by_words(words: Mapping[str, Sequence[str]]) -> dict[tuple[str, ...], list[str]]:
    """Return the names of the commands that share each list of arguments. The empty list is omitted."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, following in words.items():
        if following:
            names.setdefault(tuple(following), []).append(name)
    return names


BASH = """# completion of megalith; zsh reads it with bashcompinit
_megalith() {
    local current="${COMP_WORDS[COMP_CWORD]}" command="" words=""
    if [ "$COMP_CWORD" -gt 1 ]; then command="${COMP_WORDS[1]}"; fi
    case "$command" in
    @GROUPS@) if [ "$COMP_CWORD" -gt 2 ]; then command="$command ${COMP_WORDS[2]}"; fi ;;
    esac
    case "$command" in
@CASES@
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -o bashdefault -F _megalith megalith
"""


def _bash(words: Mapping[str, Sequence[str]], shell: str) -> str:
    script = BASH.replace("@GROUPS@", "|".join(GROUPS)).replace("@CASES@", "\n".join(_cases(words)))
    return "autoload -U +X bashcompinit && bashcompinit\n" * (shell == "zsh") + script


FISH = """# completion of megalith
function __megalith_words
    set -l typed (commandline -opc)
    set -l command ""
    if test (count $typed) -gt 1
        set command $typed[2]
    end
    if contains -- "$command" @GROUPS@; and test (count $typed) -gt 2
        set command "$command $typed[3]"
    end
    set -l words ""
    switch "$command"
@CASES@
    end
    string split " " -- $words
end
complete -c megalith -a "(__megalith_words)"
"""


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    cases = [
        f"    case {' '.join(map(_fish_quoted, names))}\n        set words {_fish_quoted(' '.join(following))}"
        for following, names in _names_by_words(words).items()
    ]
    return FISH.replace("@GROUPS@", " ".join(GROUPS)).replace("@CASES@", "\n".join(cases))


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
