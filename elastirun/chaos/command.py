"""The command ``elastirun chaos``: proves the failover of a running job of this user. See docs/chaos.md."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import click

from elastirun.agent.failures.exit_codes import ExitCode
from elastirun.chaos import watch
from elastirun.chaos.plan import DEEDS, KINDS, WORKER, FaultTarget, PlannedFault, choose, draw
from elastirun.chaos.play import Play
from elastirun.chaos.recovery import Terms
from elastirun.chaos.verdict import FaultOutcome, judge, table
from elastirun.chaos.watch import RunningAgent
from elastirun.cli import parse
from elastirun.cli.subcommands import read_options, show
from elastirun.errors import StartError, UsageError

FORMAT = 1  # of the JSON; raised when a field changes its meaning
OPTIONS = {  # by name: the default, what is shown for the value, and the help
    "every": ("30s", "TIME", "from one fault to the next, or longer until the job trains"),
    "for": ("10m", "TIME", "for how long; with --every=30s there are 20 faults"),
    "kinds": (",".join(KINDS), "K,K,…", "kinds of faults"),
    "seed": ("0", "N", "decides order and processes; give each node another one"),
    "limit": ("60s", "TIME", "the longest time to the next step, and for an agent to come back"),
    "freeze": ("10s", "TIME", "how long a worker is frozen"),
    "restart": ("off", "TIME", "start an agent that has ended again, by its own command line"),
}
_FLAGS = {
    "supervised": "something else starts agents again, such as systemd: wait for them",
    "yes": "do not ask",
    "json": "one JSON object at the end; needs --yes",
}
_HELP = """\
usage: elastirun chaos [JOB] [OPTIONS]

Kills, freezes and stops processes of a running job of yours on this machine, and measures how long
it takes until the next step. Shows first what it would do, and asks. See docs/chaos.md.

"""
_CODES = "Exit status: 0 the job has held; 1 it has not, or was not put to the proof; 2 wrong use;\n"
_CODES += "3 refused, nothing was done; 4 no such job here; 130 Ctrl-C.\n"


def main(argv: Sequence[str]) -> int:
    """Do what ``argv`` asks for. Return the exit code. Raises UsageError, StartError and NothingFound."""
    given = _parse(argv)
    if given["help"]:
        return show(f"{_HELP}{_options()}\n\n{_CODES}")
    every, lasts, limit, freeze = (_time(name, given) for name in ("every", "for", "limit", "freeze"))
    restart = parse.value_of("--restart", given["restart"], parse.duration) or None
    terms = Terms(freeze, limit, restart, given["supervised"])
    if terms.restart is not None and terms.supervised:
        raise UsageError("--restart and --supervised: only one can start agents again; give one of them")
    if given["json"] and not given["yes"]:
        raise UsageError("--json: nobody can be asked; give --yes, too")
    seed, kinds = parse.value_of("--seed", given["seed"], parse.integer(0)), parse.value_of("--kinds", given["kinds"], _kinds)
    plan = draw(seed, kinds, every, lasts)
    job = watch.find(given["job"])
    agents = watch.look(job)
    if not given["json"]:
        show(_shown(job, plan, agents, terms))
        _ask(given["yes"])
    play = Play(job, terms, lambda outcome: None if given["json"] else show(_line(outcome)))
    return _run(play, plan, lasts, given["json"])


def _run(play: Play, plan: Sequence[PlannedFault], lasts: float, as_json: bool) -> int:
    """Do the faults, and print the table and the verdict. Return the exit code."""

    def stop(signum: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt(signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a frozen worker must be continued
        signal.signal(signum, stop)
    stopped = 0
    try:
        play.run(plan, lasts)
    except KeyboardInterrupt as signalled:
        stopped, play.stopped = signalled.args[0], f"{signal.Signals(signalled.args[0]).name} came"
    except OSError as error:
        play.stopped = f"an agent could not be started again: {error.strerror}"
    held, verdict = judge(play.outcomes, len(plan), play.stopped)
    if as_json:
        faults = [asdict(one) for one in play.outcomes]
        show(json.dumps({"v": FORMAT, "job": play.job, "held": held, "verdict": verdict, "planned": len(plan), "faults": faults}))
    else:
        show(f"\n{table(play.outcomes)}\n\n{verdict}")
    return ExitCode.signalled(stopped) if stopped else ExitCode.OK if held else ExitCode.FAILED


def _ask(yes: bool) -> None:
    """Let the user confirm. Errors: ``UsageError``: nobody can be asked; ``StartError``: the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise StartError("nothing was done, because there is no terminal to ask at; give --yes to do it")
    with suppress(click.Abort):
        if click.confirm("Do it?"):
            return
    raise StartError("nothing was done")


# --- the command line


def _parse(argv: Sequence[str]) -> dict[str, Any]:
    params: list[click.Parameter] = [click.Option([name, f"--{name}"], default=default) for name, (default, _, _) in OPTIONS.items()]
    params += [click.Option([name, f"--{name}"], is_flag=True) for name in _FLAGS]
    return read_options("chaos", [*params, click.Argument(["job"], required=False)], argv)


def _time(name: str, given: dict[str, Any]) -> float:
    value = parse.value_of(f"--{name}", given[name], parse.duration)
    if not value:
        raise UsageError(f"--{name}: there is no off; give a time, such as {OPTIONS[name][0]}")
    return value


def _kinds(text: str) -> list[str]:
    return list(dict.fromkeys(map(parse.choice(*KINDS), text.split(","))))


def _options() -> str:
    rows = [(f"--{name}={shown}", f"{text} [{default}]") for name, (default, shown, text) in OPTIONS.items()]
    rows += [(f"--{name}", text) for name, text in _FLAGS.items()]
    rows += [("", ""), ("kinds:", ""), *((f"  {kind}", deed) for kind, deed in DEEDS.items())]
    return "\n".join(f"  {name:17}{text}".rstrip() for name, text in rows)


# --- plan and table


def _shown(job: str, plan: Sequence[PlannedFault], agents: Sequence[RunningAgent], terms: Terms) -> str:
    """Return what would be done, as the job is now."""
    first = agents[0]
    lines = [f"job {parse.quote(job)}: {len(agents)} of its agents here; nodes in the round: {first.members}, at least {first.min_nodes}"]
    for agent in agents:
        workers = ", ".join(f"rank {agent.ranks[pid]} pid {pid}" if pid in agent.ranks else f"pid {pid}" for pid in agent.training)
        host = ", hosts the store" if agent.hosts_store else ""
        lines.append(f"  {agent.node}  {agent.state}  agent pid {agent.process.pid}{host}  workers that step: {workers or 'none'}")
    lines += ["", f"{len(plan)} fault{'s' * (len(plan) != 1)}; to these as the job is now, but each is looked up again when it is time:"]
    for fault in plan:
        victim = choose(fault, agents, terms.comes_back)
        what = f"{DEEDS[fault.kind]}: {victim.name}" if isinstance(victim, FaultTarget) else f"left out: {victim}"
        minutes, seconds = divmod(round(fault.after), 60)
        lines.append(f"  {minutes:02}:{seconds:02}  {fault.kind:6}  {what}")
    lines += ["", _about_agents(terms)]
    kills, left = sum(fault.kind == WORKER for fault in plan), first.max_restarts - first.failures
    if kills > left:
        have = f"{max(0, left)} of --max-restarts={first.max_restarts} are left"
        lines.append(f"warning: {kills} workers are to be killed, each counts as a failure, and {have}: the job would end")
    return "\n".join(lines)


def _about_agents(terms: Terms) -> str:
    if terms.restart is not None:
        return f"An agent that has ended is started again {terms.restart:g} s later, by its own command line, in a session of its own."
    return f"An agent that has ended is {'waited for' if terms.supervised else 'not started again'}."


def _line(outcome: FaultOutcome) -> str:
    """Return one line as a fault is over."""
    time, kind, victim, seconds, _ = outcome.cells
    if outcome.left_out:
        return f"{time}  {kind:6}  left out: {outcome.left_out}"
    return f"{time}  {kind:6}  {victim}: {outcome.trouble or f'next step after {seconds}'}"
