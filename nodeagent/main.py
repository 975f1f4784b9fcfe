"""The command ``nodeagent``: ``run`` is the agent, ``config`` reads the settings file, the rest are
clients of the admin API.

The rooms bring the rest (``kit.room.Command``). A room's commands are imported when one of them is
called, the settings' models when they are read: a client needs neither, and scripts call it often.
"""

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import kit.errors
import kit.room
from kit import terminal
from nodeagent import SOCKET, configfile, groups
from nodeagent.commands import status


@contextlib.contextmanager
def _absent(package: str) -> Iterator[None]:
    """Who imports it for the first time meanwhile, finds that it is not installed."""
    hidden = package not in sys.modules
    if hidden:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[package]


@dataclass(frozen=True)
class Context:
    """What every command gets (``kit.room.CommandContext``)."""

    config: Path
    address: str | None  # --api
    token_file: Path | None = None

    @property
    def api(self) -> str | None:
        """The address of another node's agent, perhaps; a unix socket is this node's."""
        return None if (self.address or "unix:").startswith("unix:") else self.address

    def client(self) -> kit.room.Api:
        from nodeagent.commands import client

        if self.address is not None:
            return client.Client(self.address, self.token_file)
        if not os.path.lexists(self.config):
            configfile.load(self.config)  # says what to do
        # Of a slip the agent has a finding: it runs with the settings before it.
        return client.Client(f"unix://{configfile.glean(self.config).socket or SOCKET}")

    def offline(self, room: str) -> tuple[Any, Path]:
        from nodeagent import rooms
        from nodeagent.settings import Settings

        try:
            settings = configfile.load(self.config)
        except kit.errors.SettingsError as error:
            if self.config.exists():
                terminal.say(f"nodeagent: {error}; using the defaults", error=True)
            state_dir = configfile.glean(self.config).state_dir
            settings = Settings() if state_dir is None else Settings(state_dir=state_dir)
        wanted = next(each for each in rooms.ROOMS if each.name == room)
        return settings.room(wanted), settings.state_dir

    def section(self, room: str, last_good: Path | None = None) -> kit.room.RoomSection:
        from nodeagent.settings import Settings

        try:
            loaded = configfile.load_or_last(self.config, last_good)
        except kit.errors.SettingsError as error:
            state_dir = configfile.glean(self.config).state_dir
            return kit.room.RoomSection(None, state_dir or Settings().state_dir, error)
        used = self.config
        if loaded.problem and last_good is not None:
            terminal.say(f"nodeagent: {loaded.problem}; {last_good} is used instead", error=True)
            used = last_good
        elif (
            last_good
            and loaded.data is not None
            and (missed := configfile.keep(str(last_good), loaded.data.decode()))
        ):
            terminal.say(f"nodeagent: {missed}", error=True)
        found = getattr(loaded.settings, room)
        off = found is None and room in configfile.glean(used).off
        return kit.room.RoomSection(found, loaded.settings.state_dir, None, off)


class _Room(click.Group):
    """A room's command group; its help line is known before its module is imported."""

    def __init__(self, command: kit.room.Command) -> None:
        super().__init__(command.name, help=command.summary)
        self._load = command.load

    def list_commands(self, ctx: click.Context) -> list[str]:
        return self._load().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._load().get_command(ctx, cmd_name)


class _Program(click.Group):
    """Its commands have their context also while a shell completes a word of theirs."""

    def make_context(self, *given: Any, **more: Any) -> click.Context:
        made = super().make_context(*given, **more)
        known = made.params
        config = configfile.locate(known.get("config_path"))
        made.obj = Context(config, known.get("api"), known.get("token_file"))
        return made


@click.group(cls=_Program, context_settings={"help_option_names": ["-h", "--help"]})
@terminal.file_option(
    "--config",
    "config_path",
    help="Settings file; default $NODEAGENT_CONFIG, then /etc/nodeagent/nodeagent.yaml.",
)
@click.option(
    "--api",
    metavar="URL",
    envvar="NODEAGENT_API",
    help="Agent to talk to, unix:///PATH or https://HOST:PORT; default: admin.socket of the "
    "settings file.",
)
@terminal.file_option(
    "--token-file",
    envvar="NODEAGENT_TOKEN_FILE",
    help="File with the bearer token for an https:// address.",
)
@click.version_option(None, "-V", "--version", package_name="nodeagent")
def cli(**_: Any) -> None:
    """Node agent for GPU clusters: dataset cache, ready images, safe volumes."""


@cli.command()
@terminal.file_option(
    "--last-good",
    help="Keeps a copy of settings that can be used, and is used while they cannot.",
)
@click.pass_obj
def run(ctx: Context, last_good: Path | None) -> None:
    """Run the agent in the foreground until SIGTERM or SIGINT."""
    # Its handlers print a line that is no JSON at each fork. No child of ours talks gRPC.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
    # Clients of the API do not pay for the server. structlog would load rich for tracebacks in
    # colour, which the log has not: 4 MiB of every node.
    with _absent("rich"):
        from nodeagent import app, logs

    loaded = configfile.load_or_last(ctx.config, last_good)
    if os.geteuid() != 0:
        raise kit.errors.HostError(
            "nodeagent run",
            "not root: mounts and trusted xattrs need CAP_SYS_ADMIN",
            "run it as root, or in a privileged container",
        )
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # a core would have keys and tokens
    logs.configure()
    asyncio.run(app.Agent(ctx.config, loaded, last_good).run())


@cli.command()
@terminal.json_option
@click.pass_obj
def doctor(ctx: Context, as_json: bool) -> None:
    """Say what this node has, what it lacks, what that costs and how to get it; needs no agent."""
    from nodeagent.commands import doctor

    found = asyncio.run(doctor.examine(ctx.config))
    if as_json:
        terminal.print_json([vars(each) for each in found])
    else:
        rows = [(each.word, each.room, each.name, each.said) for each in found]
        terminal.say_all(terminal.table(("", "COMPONENT", "CHECK", "FOUND"), rows))
        for each in found:
            if each.wanted and not each.well:
                terminal.say()
                said = f"{each.word} {each.room} {each.name}: {each.said}"
                terminal.say_all((said, f"  costs: {each.cost}", f"  to do: {each.remedy}"))
    if any(each.wanted and not each.well for each in found):
        sys.exit(1)


@cli.command()
@click.option("--yes", is_flag=True, help="Remove it; without this it is only listed.")
@click.option(
    "--forget-volumes",
    is_flag=True,
    help="Also remove the memory of what volumes hold. An agent that is installed later then takes "
    "a volume whose backend answers zeros for a new one.",
)
@terminal.json_option
@click.pass_obj
def uninstall(ctx: Context, yes: bool, forget_volumes: bool, as_json: bool) -> None:
    """List everything of ours on this node; with --yes take it off. No agent may run."""
    from nodeagent.commands import uninstall
    from nodeagent.settings import Settings

    settings = configfile.load(ctx.config) if ctx.config.exists() else Settings()
    if os.geteuid() != 0:
        raise kit.errors.HostError("nodeagent uninstall", "not root", "run it as root")

    def say(each: uninstall.FoundTrace) -> None:
        what = f"{each.room}: {each.trace.kind} {each.trace.name}"
        why = f": {each.trace.stays}" if each.trace.stays else ""
        terminal.say(f"{'stays' if why else 'removed'} {what}{why}", error=as_json)

    report = asyncio.run(uninstall.run(settings, yes, say, forget_volumes))
    if as_json:
        found = [
            {"room": each.room, **each.trace.as_json(), "removed": each.removed}
            for each in report.found
        ]
        terminal.print_json({"found": found, "troubles": report.troubles})
    elif not yes:
        rows = [
            (f.room, f.trace.kind, f.trace.name, "; ".join(f.trace.users))
            for f in report.found
            if not f.trace.stays
        ]
        terminal.say_all(terminal.table(("COMPONENT", "WHAT", "NAME", "USED BY"), rows))
        for each in report.found:
            if each.trace.stays:
                say(each)
        terminal.say()
        terminal.say(f"{len(rows)} in all; --yes removes them.")
    if any(each.removed and each.trace.name.endswith(".service") for each in report.found):
        terminal.say(
            "systemd forgets the units at the next boot, or now: systemctl daemon-reload",
            error=True,
        )
    for trouble in report.troubles:
        terminal.say(f"nodeagent: {trouble}", error=True)
    if report.troubles:
        sys.exit(10)


@cli.group("config")
def config() -> None:
    """Settings file."""


@config.command("check")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@terminal.json_option
@click.pass_obj
def check(ctx: Context, file: Path | None, as_json: bool) -> None:
    """Print the effective settings of FILE (default: the agent's own file), or each mistake with
    its line."""
    settings = configfile.load(file or ctx.config)
    if as_json:
        terminal.print_json(settings.model_dump(mode="json", exclude_none=True))
    else:
        for line in configfile.dump(settings).splitlines():
            terminal.say(line)


for _whole in status.COMMANDS:
    cli.add_command(_whole)

for _group in groups.GROUPS:
    cli.add_command(_Room(_group))


def main() -> None:
    terminal.run(cli, "nodeagent")
