"""`flashtile learn`: reading paths, mastery levels, and exercises whose checks run."""

from typing import Annotated

import typer

from flashtile.cli.common import MISMATCH, MISSING, OK, command, complain, make_console

MARKS = {"done": "[green]done[/]", "new": "[dim]-[/]"}


def add(app) -> None:
    app.command("learn")(command(learn))


def learn(
    exercise: Annotated[str, typer.Argument(help="Begin this exercise; once begun, check it.", show_default=False)] = "",
    folder: Annotated[str, typer.Option("--dir", help="Where your exercises lie.")] = "flashtile-exercises",
) -> int:
    """Show the reading paths and exercises with what is done, begin an exercise, or check it. Needs no GPU."""
    console = make_console()
    return _one(console, exercise, folder) if exercise else _overview(console, folder)


def _overview(console, folder) -> int:
    from rich.table import Table

    from flashtile.learn.exercises import EXERCISES, LEVELS, PATHS, check

    console.print("[bold]Reading paths[/] (parts of the guide, docs/guide)")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for name, (purpose, parts) in PATHS.items():
        table.add_row(name, parts, f"[dim]{purpose}[/]")
    console.print(table)
    done = 0
    for level, about in LEVELS.items():
        console.print(f"\n[bold]Level {level}[/]  {about}")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        for exercise in EXERCISES.values():
            if exercise.level == level:
                outcome = check(exercise, folder)
                done += outcome.status == "done"
                part = f"[dim]part {exercise.part}[/]"
                table.add_row(MARKS.get(outcome.status, "[yellow]begun[/]"), f"[bold]{exercise.name}[/]", exercise.title, part)
        console.print(table)
    console.print(f"\n{done} of {len(EXERCISES)} done. Begin or check one: flashtile learn softmax")
    return OK


def _one(console, name, folder) -> int:
    from flashtile.learn.exercises import begin, check, find

    exercise = find(name)
    outcome = check(exercise, folder)
    if outcome.status == "new":
        path = begin(exercise, folder)
        console.print(f"{path}: {exercise.title} (level {exercise.level}, guide part {exercise.part}).\n"
                      f"The file says what to do. Then check it: flashtile learn {name}")  # fmt: skip
        return OK
    if outcome.status == "done":
        console.print(f"[green]done[/]  {exercise.title}")
        for line in filter(None, outcome.words.split("; ")):
            console.print(f"      {line}", markup=False)
        return OK
    words = outcome.words or "not written yet: it raises NotImplementedError"
    complain(f"{name}: {words}")
    return MISSING if outcome.status == "unchecked" else MISMATCH
