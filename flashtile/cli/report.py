"""`flashtile report`: records as one HTML page that needs no network."""

from typing import Annotated

import typer

from flashtile.cli.common import OK, Progress, command, make_console


def add(app) -> None:
    app.command("report")(command(report))


def report(
    records: Annotated[list[str], typer.Argument(help="Records (.json, .jsonl), or folders of them.")],
    html: Annotated[str, typer.Option("--html", help="Write the page here.")] = "report.html",
    md: Annotated[str | None, typer.Option("--md", help="Also the tables as Markdown.")] = None,
    png: Annotated[str | None, typer.Option("--png", help="Also the plots as PNG and SVG, in this folder.")] = None,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Say on stderr what is being done.")] = True,
) -> int:
    """Make one self-contained HTML page of recorded runs: tables, plots, environment, commands, raw data."""
    console = make_console(stderr="-" in (html, md))
    with Progress(progress) as says:
        says.say("reading the records")
        from flashtile.bench import plots, record
        from flashtile.bench import report as page

        files = page.find(records)
        documents = {str(path): record.load(path) for path in files}
        rows = sum(len(document["results"]) for document in documents.values())
        written = [html]
        record.write(html, page.html(documents, f"flashtile report {' '.join(records)}", says.say))
        if md:
            record.write(md, page.markdown(documents))
            written.append(md)
        if png:
            says.say("drawing for files")
            written += plots.write(plots.figures(list(documents.values())), f"{png}/flashtile", documents.values())
    console.print(f"read {len(files)} records, {rows} rows")
    shown = written if len(written) < 6 else [*written[:3], f"and {len(written) - 3} more files"]
    console.print(f"wrote {' '.join(shown)}", markup=False)
    return OK
