"""``klrl completion SHELL``: prints a script that completes commands, choices and settings."""

from __future__ import annotations

from klrl.cli.wrapper import DONE, Parser
from klrl.config.choices import ALL_GROUPS
from klrl.config.explain import described, settings

#: Bash's words end at =, so a reply is only what follows the last = of the word. A space follows a
#: single reply unless a value is to come.
_BASH = """\
_klrl() {
  local word="${COMP_LINE:0:COMP_POINT}"; word="${word##* }"
  COMPREPLY=($(compgen -W "WORDS KEYS" -- "$word"))
  [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[*]}" != *= ]] && compopt +o nospace
  [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
}
complete -o nospace -o default -F _klrl klrl"""
#: zsh adds no space after what is added with -S ''. The value of a setting may be a path.
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
_klrl() { compadd -- WORDS; compadd -S '' -- KEYS; compset -P '*='; _files }
compdef _klrl klrl"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": "complete -c klrl -a 'WORDS KEYS'"}


def completion_command(argv: list[str]) -> int:
    """Print the script of a shell; return the exit code."""
    from klrl.cli.main import COMMANDS

    shell = parser().parse_args(argv).shell
    choices = [f"{group}={name}" for group in ALL_GROUPS for name in described(group)]
    keys = (f"{key}=" for key in (*settings(), "hydra.run.dir", "sweep", "trust"))
    script = _SCRIPTS[shell].replace("KEYS", " ".join(keys))
    print(script.replace("WORDS", " ".join([*COMMANDS, *choices])))
    return DONE


def parser() -> Parser:
    """Return the command's argument parser."""
    script = 'Print a completion script; for bash, eval "$(klrl completion bash)" in ~/.bashrc.'
    parser = Parser(prog="klrl completion", description=script)
    parser.add_argument("shell", choices=_SCRIPTS, metavar="SHELL", help="bash, zsh or fish")
    return parser
