"""Scripts that complete the options of ``elastirun`` in a shell. They hold the names: a key press starts no Python."""

from __future__ import annotations

from elastirun.cli import parse
from elastirun.cli.options import OPTIONS

_BASH = """\
_elastirun() {{
  case ${{COMP_WORDS[COMP_CWORD]}} in
    -*) COMPREPLY=($(compgen -W "{names}" -- "${{COMP_WORDS[COMP_CWORD]}}"));;
    *) COMPREPLY=();;
  esac
}}
complete -o default -F _elastirun elastirun
"""
_ZSH = """\
#compdef elastirun
_elastirun() {{
  if [[ $PREFIX == -* ]]; then
    compadd -- {names}
  else
    _files
  fi
}}
compdef _elastirun elastirun
"""
_TCSH = """\
complete elastirun 'c/--/({bare})/' 'p/*/f/'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "tcsh": _TCSH}


def script(shell: str) -> str:
    """Return the script for ``shell``. Raises UsageError for a shell without one."""
    template = _SCRIPTS[parse.value_of("--print-completion", shell, parse.choice(*_SCRIPTS))]
    names = ["--help", *(option.name for option in OPTIONS)]
    return template.format(names=" ".join(names), bare=" ".join(name[2:] for name in names)).rstrip("\n")
