"""The command ``nodeagent``: ``run`` is the agent, the rest are clients of its admin API."""

import asyncio
import os
import sys
from pathlib import Path

import click

import kit.errors
from nodeagent import configfile
from nodeagent.cli import config, context, dataset, image, volume, volume_audit


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings file; default $NODEAGENT_CONFIG, then /etc/nodeagent/nodeagent.yaml.",
)
@click.option(
    "--api",
    metavar="URL",
    envvar="NODEAGENT_API",
    help="Admin API of the agent to talk to; default: admin.listen of the settings file.",
)
@click.version_option(package_name="nodeagent")
@click.pass_context
def cli(ctx: click.Context, config_path: Path | None, api: str | None) -> None:
    """Node agent for GPU clusters: dataset cache, ready images, safe volumes."""
    ctx.obj = context.Context(config=configfile.locate(config_path), api=api)


@cli.command()
@click.pass_obj
def run(ctx: context.Context) -> None:
    """Run the agent in the foreground until SIGTERM or SIGINT."""
    from nodeagent import app, logs  # clients of the API do not pay for the server

    settings = configfile.load(ctx.config)
    if os.geteuid() != 0:
        raise kit.errors.HostError(
            "nodeagent run",
            "not root: mounts and trusted xattrs need CAP_SYS_ADMIN",
            "run it as root, or in a privileged container",
        )
    logs.configure()
    asyncio.run(app.Agent(ctx.config, settings).run())


cli.add_command(config.group)
cli.add_command(dataset.group)
cli.add_command(volume.group)
volume_audit.join(volume.group)
cli.add_command(image.group)


def main() -> None:
    """Entry point. Errors of ours end with one line and the exit code of their class."""
    try:
        cli(standalone_mode=False)
    except kit.errors.AgentError as error:
        click.echo(f"nodeagent: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("nodeagent: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stdout = None  # the reader of our output has gone; nothing left to say
        sys.exit(141)
