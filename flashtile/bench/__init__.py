"""The measuring instrument: `run(case)` one backend, `compare(cases, backends)` several, `measure_memory(cases)`,
`compare_versions(a, b)` of flashtile. Each gives what its command writes with --json. Imports torch on first use.

from flashtile import bench
report = bench.compare(bench.build_cases("gpt2-small"), ["flashtile", "sdpa-cudnn"])
report.one(mode="bwd").stats.median    # ms
"""

from importlib import import_module as _import_module

_PUBLIC = {
    "BenchCase": "flashtile.bench.cases",
    "Shape": "flashtile.bench.cases",
    "build_cases": "flashtile.bench.cases",
    "PRESETS": "flashtile.bench.cases",
    "Settings": "flashtile.bench.engine",
    "Result": "flashtile.bench.engine",
    "Report": "flashtile.bench.engine",
    "run": "flashtile.bench.engine",
    "compare": "flashtile.bench.engine",
    "measure_memory": "flashtile.bench.memory",
    "compare_versions": "flashtile.bench.regress",
}

__all__ = list(_PUBLIC)


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flashtile.bench' has no attribute {name!r}")
    return getattr(_import_module(_PUBLIC[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
