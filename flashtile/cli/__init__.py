"""The command line: one file a command, each with `add(app)`. Imports no torch, so that `flashtile --help` is immediate.

Exit codes: 0 ok, 1 internal error, 2 usage, 3 numerical mismatch, 4 regression, 5 unclear under --strict, 6 hardware or tool
missing, 130 interrupted (partial results are kept).
"""

import inspect
import sys
import warnings
from importlib import import_module
from typing import Annotated

import typer
import typer.core


class _Root(typer.core.TyperGroup):
    """Its help is plain text: the import of typer's rich help alone takes 0.15 s. The commands' own help has panels."""

    def format_help(self, ctx, formatter):
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)


COMMANDS = ("doctor", "run", "compare", "sweep", "memory", "scale", "regress", "report", "profile", "monitor", "tune",
            "explain", "warm", "presets", "learn", "ladder")  # fmt: skip

def _print_version(wanted: bool) -> None:
    if wanted:
        import flashtile

        print(flashtile.__version__)
        raise typer.Exit()


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _empty() -> typer.Typer:
    """The root, without commands."""
    root = typer.Typer(
        name="flashtile",
        cls=_Root,
        help="Exact attention for PyTorch, and how fast it is: measured, checked, compared.",
        epilog="Exit codes: 0 ok, 1 internal error, 2 usage, 3 numerical mismatch, 4 regression, 5 unclear under --strict, "
        "6 hardware or tool missing, 130 interrupted.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    root.callback(invoke_without_command=True)(_root)
    return root


app = _empty()
for _name in COMMANDS:
    import_module(f"flashtile.cli.{_name}").add(app)


def _needed(arguments) -> typer.Typer:
    """app, or as much of it as a command line needs: typer takes 4 ms to build a command with its flags.

    For the list of commands their names and first lines are enough; for a command, that command.
    """
    root, infos = _empty(), [*app.registered_commands, *app.registered_groups]
    if arguments in ([], ["-h"], ["--help"]):
        for info in infos:
            group = getattr(info, "typer_instance", None)
            root.command(info.name, help=group.info.help if group else inspect.getdoc(info.callback))(lambda: None)
        return root
    chosen = [info for info in infos if info.name == arguments[0]]
    if not chosen:
        return app
    root.registered_commands = [info for info in app.registered_commands if info in chosen]
    root.registered_groups = [info for info in app.registered_groups if info in chosen]
    return root


def main(argv: list[str] | None = None) -> int:
    """Run a command line (default sys.argv) and return its exit code."""
    # torch's, at its first tensor; nothing here needs NumPy, and a plain installation has none
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        for stream in (sys.stdout, sys.stderr):
            # What a terminal's encoding lacks is no reason to end; what replaces a stream may lack this
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        # FlashAttention-4's compiler reads the command line of the process for options of its own, -d among them
        del sys.argv[1:]
    # An option takes a value or none, not both as it likes: `--causal both` is a flag of its own inside.
    for i, word in enumerate(arguments[:-1]):
        if word == "--causal" and arguments[i + 1] == "both":
            arguments[i : i + 2] = ["--causal-both"]
            break
    try:
        _needed(arguments)(arguments, prog_name="flashtile")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
