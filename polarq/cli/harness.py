"""`polarq harness`: which agent programs there are, what each can be told, and whether a release of one works here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from polarq import bubblewrap
from polarq.cli.interrupts import Interrupts
from polarq.cli.options import Json
from polarq.cli.outcome import ExitCode, Unusable, command, complain
from polarq.cli.terminal import Column, Screen, print_json, print_table, shown
from polarq.errors import InvalidInput, PolarqError
from polarq.registry import names, plugin

harness = typer.Typer(help="The agent programs that tasks can run: list, show, check.", no_args_is_help=False)

COLUMNS = (Column("harness"), Column("program"), Column("version"), Column("supported"))
DETAIL = 1000
"""Characters of what broke: a program's last words may be long."""
_NAMES_OF_MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])")
_CHOICE = re.compile(r"Optional\[Literal\[(.*)\]\]")
Name = Annotated[str, typer.Argument(metavar="NAME", help="A harness, as `polarq harness list` names it.")]


@harness.command("list")
@command
def list_(as_json: Json = False) -> ExitCode:
    """List the installed harnesses. One that cannot be loaded is listed with the reason, and is exit code 1."""
    found = [_listed(name) for name in names("harnesses")]
    broken = ExitCode.FAILED if any("problem" in one for one in found) else ExitCode.OK
    if as_json:
        print_json({"harnesses": found})
        return broken
    screen = Screen()
    print_table(screen, COLUMNS, [[Text(shown(one[column.name] or "-")) for column in COLUMNS] for one in found])
    screen.say("'polarq harness show NAME' says which APIs one speaks, and what a task can tell it.")
    for one in found:
        if "problem" in one:
            complain(one["problem"])
    return broken


@harness.command()
@command
def show(name: Name, as_json: Json = False) -> ExitCode:
    """Show what a harness runs, where that comes from, and what a task can tell it."""
    told = _told(name, whole=True)
    if as_json:
        print_json(told)
        return ExitCode.OK
    screen = Screen()
    settings = told.pop("settings", {})
    for key, value in told.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        screen.say((f"{key}: ", "bold"), shown(text if text != "" else "-", limit=2000))
    for setting, how in settings.items():
        screen.say(("  agent.settings.", "dim"), shown(setting), ("  ", ""), (shown(how["type"]), "dim"))
        if how["about"]:
            screen.say(("      ", ""), shown(how["about"]))
    return ExitCode.OK


@harness.command()
@command
def check(
    name: Name,
    version: Annotated[
        str | None,
        typer.Option("--version", metavar="V", help="A release to try, supported or not.", show_default=False),
    ] = None,
    dialect: Annotated[
        list[str] | None,
        typer.Option("--dialect", metavar="D", help="Only this API (may be repeated).", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="CHECK", help="Only this check (may be repeated).", show_default=False),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="The sandbox: local, docker, ...")] = "local",
    image: Annotated[
        str, typer.Option("--image", help="Its image, where the backend needs one.", show_default=False)
    ] = "",
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache", metavar="FOLDER", help="Keeps what is installed, for the next time.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> ExitCode:
    """Run a harness's real program here against a scripted model, and say what broke.

    It is installed as a node would do it, in a sandbox without a network, and answered through the real proxy. However
    it ends, nothing that was started goes on.
    """
    screen = Screen()
    broken, found = 0, []
    interrupts = Interrupts()
    # Closed here: what a signal or a closed pipe ends is stopped while further signals are still ours.
    with (
        interrupts.caught(),
        closing(_checked(name, version, dialect, only, backend, image, cache, interrupts)) as each,
    ):
        for one in each:
            found.append(one)
            broken += not one["ok"]
            if not as_json:
                word = "refused" if one["refused"] else "ok" if one["ok"] else "BROKEN"
                verdict = (f"{word:<7}", "green" if one["ok"] else "red")
                detail = shown(one["detail"], limit=DETAIL)
                screen.say(verdict, "  ", f"{one['dialect']}  ", (one["check"], "bold"), "  ", detail)
                screen.file.flush()
    if as_json:
        print_json({"harness": name, "ok": not broken, "findings": found})
    else:
        said = next((one["version"] for one in found if one["version"]), "")
        checks = "1 check" if len(found) == 1 else f"{len(found)} checks"
        screen.say(f"{' '.join(filter(None, [name, said or version]))}: {checks}, {broken} broken")
    return ExitCode.FAILED if broken else ExitCode.OK


def _checked(
    name: str,
    version: str | None,
    dialects: list[str] | None,
    only: list[str] | None,
    backend: str,
    image: str,
    cache: Path | None,
    interrupts: Interrupts,
) -> Generator[dict[str, Any], None, None]:
    try:
        from polarq.testing.conformance import bench, checks, scenario, table
        from polarq.testing.stack import PartDidNotStart
    except ModuleNotFoundError as exc:
        raise Unusable(f"checking needs '{exc.name}': pip install 'polarq[demo]'") from exc
    preset = _preset(name)
    if backend == "local" and (why := bubblewrap.why_not()):
        raise Unusable(f"a program is checked in a sandbox of its own, and there is none: {why}; or --backend docker")
    wanted = [check for check in checks.CHECKS if not only or check in only]
    if unknown := set(only or ()) - set(checks.CHECKS):
        raise InvalidInput("--only", [f"there is no check '{', '.join(sorted(unknown))}' ({', '.join(checks.CHECKS)})"])
    spoken = list(dialects or preset.dialects)
    if unknown := set(spoken) - set(preset.dialects):
        raise InvalidInput("--dialect", [f"{name} does not speak {', '.join(sorted(unknown))}"])
    told = scenario.load(name, preset.conformance)
    if version is not None:
        settings = {**told.agent.get("settings", {}), "version": version, "untested_version": True}
        told = told.model_copy(update={"agent": {**told.agent, "settings": settings}})
    runtime = {"backend": backend, **({"image": image} if image else {})}
    for one in spoken:
        with ExitStack() as undo:
            try:
                here = undo.enter_context(
                    bench.Bench(
                        told,
                        one,
                        runtime,
                        cache=cache or bench.default_cache(),
                        held=interrupts.held,
                        waits=lambda folder: complain(f"waiting for another check, which has {folder}"),
                    )
                )
            except PartDidNotStart as exc:  # whose log is gone with its folder
                complain(str(exc.args[0]), exc.last_lines)
                raise typer.Exit(ExitCode.FAILED) from None
            except OSError as exc:  # no room, or no permission
                where = f"{exc.filename}: " if exc.filename else ""
                raise Unusable(f"nothing can be checked here: {where}{exc.strerror or exc}") from None
            suite = checks.Suite(here)
            for finding in suite.run(wanted):
                yield table.told(finding, harness=name, dialect=one, backend=backend)
            if not suite.runs:
                return


def _listed(name: str) -> dict[str, Any]:
    try:
        return _told(name)
    except PolarqError as exc:
        return {"harness": name, "program": "cannot be used", "version": "", "supported": "", "problem": str(exc)}


def _class(name: str) -> Any:
    found: Any = plugin("harnesses", name)
    unsaid: list[str] = getattr(found, "unsaid", list)()
    if unsaid:
        raise InvalidInput(f"harness '{name}'", [f"its class {found.__name__} does not say {', '.join(unsaid)}"])
    return found


def _preset(name: str) -> Any:
    found = _class(name)
    if not hasattr(found, "program"):
        raise InvalidInput(f"harness '{name}'", ["it runs whatever its task says: there is no program to check"])
    return found


def _told(name: str, *, whole: bool = False) -> dict[str, Any]:
    """What a class says of itself: of a preset, its program; of any other, its text."""
    found = _class(name)
    if not hasattr(found, "program"):
        module = inspect.getmodule(found)
        text = " ".join(((module and module.__doc__) or found.__doc__ or "").split())
        return {"harness": name, "program": "", "version": "", "supported": "", **({"about": text} if whole else {})}
    program = found.program
    told = {
        "harness": name,
        "program": found.title,
        "version": program.versions.default,
        "supported": str(program.versions),
        "dialects": list(found.dialects),
    }
    if not whole:
        return told
    return {
        **told,
        "package": f"{program.package} ({program.kind})",
        "mcp servers": sorted(found.mcp_transports) or "none",
        "skills": "yes" if found.takes_skills else "no",
        "limit of turns": f"agent.settings.{found.turn_limit}" if found.turn_limit else "none (model.max_calls)",
        "kept files": list(found.kept),
        "settings": dict(_settings(found.settings_class)),
    }


def _settings(model: Any) -> Iterator[tuple[str, dict[str, str]]]:
    for key, field in model.model_fields.items():
        kind = _NAMES_OF_MODULES.sub("", inspect.formatannotation(field.annotation))
        if choices := _CHOICE.fullmatch(kind):
            kind = f"{choices[1].replace(', ', ' | ')} | None"
        how = f"{kind}, required" if field.is_required() else f"{kind} = {field.default!r}"
        yield key, {"type": how, "about": " ".join((field.description or "").split())}
