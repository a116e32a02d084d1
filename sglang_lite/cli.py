"""The ``sglang-lite`` command: ``serve`` (the default), ``router``, ``fleet``, ``demo-model`` and more."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PROGRAM = "sglang-lite"

USAGE = f"""usage: {PROGRAM} [serve] [MODEL] [options]
       {PROGRAM} router [options]
       {PROGRAM} fleet [options] [-- options of serve]
       {PROGRAM} pd-demo [options]
       {PROGRAM} demo-model --output DIR
       {PROGRAM} check-env [--verify]
       {PROGRAM} version

  serve        serve a model over HTTP; also launch_server, or no sub-command at all
  router       one address for many servers
  fleet        many servers on a Ray cluster or on this machine, kept alive behind a router
  pd-demo      a prefill server, a decode server and one chat through both, on this machine
  demo-model   write the demo model (SmolLM2-135M-Instruct) as a Hugging Face directory
  check-env    report what this machine can run
  version      print the version

'{PROGRAM} serve --help' lists the options of the server.
"""

Command = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 well, 1 failed start, 2 wrong words."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if not words or words[0].startswith("-"):
        return serve(words)
    command = COMMANDS.get(words[0])
    if command is None:
        print(
            f"{PROGRAM}: error: unknown sub-command {words[0]!r} (choose from {', '.join(sorted(COMMANDS))})",
            file=sys.stderr,
        )
        return 2
    return command(words[1:])


def serve(words: Sequence[str]) -> int:
    """Check the configuration, then serve until told to stop."""
    from sglang_lite.configuration.loading import load_config
    from sglang_lite.observability.logs import configure_logging
    from sglang_lite.types import StartupError

    configure_logging()
    config = load_config(words)
    configure_logging(config.log_level)
    try:
        from sglang_lite import startup

        # Options first: a command line that can never work is told so before a port or a model is looked at.
        startup.check_options(config)
        startup.check_device(config)
        if config.node_rank > 0:
            from sglang_lite.engine.node import run_node

            return run_node(startup.prepare(config))
        startup.check_port(config)
        prepared = startup.prepare(config)

        from sglang_lite.server.run import run_server

        return run_server(prepared)
    except StartupError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130


def router(words: Sequence[str]) -> int:
    """Route requests to workers until told to stop."""
    from sglang_lite.observability.logs import configure_logging
    from sglang_lite.router.options import parse_options
    from sglang_lite.router.run import run_router
    from sglang_lite.types import StartupError

    configure_logging()
    try:
        options = parse_options(words)
        configure_logging(options.log_level)
        return run_router(options)
    except StartupError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130


def fleet(words: Sequence[str]) -> int:
    """Run replicas of a server behind a router until told to stop."""
    from sglang_lite.fleet.options import parse_options
    from sglang_lite.fleet.run import run_fleet
    from sglang_lite.observability.logs import configure_logging
    from sglang_lite.types import StartupError

    configure_logging()
    try:
        options = parse_options(words)
        configure_logging(options.log_level)
        return run_fleet(options)
    except StartupError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130


def pd_demo(words: Sequence[str]) -> int:
    """Start a prefill and a decode server and talk to them once."""
    from sglang_lite import pd_demo as demonstration

    return demonstration.main(words)


def demo_model(words: Sequence[str]) -> int:
    """Write the demo model into a directory."""
    from sglang_lite.demo_model import materialize
    from sglang_lite.observability.logs import configure_logging
    from sglang_lite.observability.progress import ProgressLine
    from sglang_lite.types import StartupError

    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} demo-model", description="Write SmolLM2-135M-Instruct as a Hugging Face model directory."
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="directory to make")
    output: Path = parser.parse_args(list(words)).output
    configure_logging()
    try:
        with ProgressLine("Converting the demo model") as progress:
            made = materialize(output, progress.update)
    except StartupError as error:
        return _fail(error)
    print(f"{output}: the demo model is {'ready' if made else 'there already'}")
    return 0


def check_env(words: Sequence[str]) -> int:
    """Report versions and devices. Fails without a device that a production server could use."""
    from sglang_lite.environment import report

    parser = argparse.ArgumentParser(prog=f"{PROGRAM} check-env", description="Report what this machine can run.")
    parser.add_argument(
        "--verify", action="store_true", help="compare every operation of the device with the host's; needs a GPU"
    )
    wants_table: bool = parser.parse_args(list(words)).verify
    code = report()
    if not wants_table:
        return code
    from sglang_lite.acceptance import run

    return run()


def version(words: Sequence[str]) -> int:
    """Print the version."""
    from sglang_lite import __version__

    argparse.ArgumentParser(prog=f"{PROGRAM} version").parse_args(list(words))
    print(f"{PROGRAM} version: {__version__}")
    return 0


COMMANDS: dict[str, Command] = {
    "serve": serve,
    "launch_server": serve,
    "router": router,
    "fleet": fleet,
    "pd-demo": pd_demo,
    "demo-model": demo_model,
    "check-env": check_env,
    "version": version,
}


def _fail(error: Exception) -> int:
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
