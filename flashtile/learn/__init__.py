"""Learning by doing: exercises whose checks run, and counters of what an algorithm does. The guide is in docs/guide.

    exercises.py    the table: levels, reading paths, exercises
    stubs/          one file an exercise, to be copied and completed
    checks.py       what a completed file must do
    run_kernel.py   the process in which a completed kernel runs
    counters.py     FLOPs, exponentials and bytes of code in PyTorch, counted while it runs
"""
