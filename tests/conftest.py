"""What all tests share: Triton's interpreter where there is no GPU, the skip of GPU tests, and fixtures."""

import os
from contextlib import ExitStack

import pytest
import torch
from checks import poisoned_memory
from hypothesis import settings

# Triton looks when it is imported; tests that compile do so in processes of their own, without it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What FLASHTILE_TEST_AS asks for, until the process ends
_AS_OLDER = ExitStack()

# The tensors of tests are small: threads would wait for each other more than they compute.
torch.set_num_threads(1)

# No deadline: the first example may compile, and the interpreter is slow. No database: a test writes nothing beside itself.
settings.register_profile("flashtile", deadline=None, database=None)
settings.load_profile("flashtile")


def pytest_configure():
    """With FLASHTILE_TEST_AS=A100 the GPU here is taken for that older one: its tiles, its instructions, no newer tier."""
    if name := os.environ.get("FLASHTILE_TEST_AS"):
        from dataclasses import replace

        from flashtile import hardware
        from flashtile.bench import tune

        here, older = hardware.detect(), hardware.by_name(name)
        assert older.sm < here.sm, f"FLASHTILE_TEST_AS: expected a GPU older than {here.arch}, got {name}, {older.arch}"
        _AS_OLDER.enter_context(tune.instructions_of(older))
        hardware._detect_gpu = lambda index: replace(older, num_sms=here.num_sms)


def pytest_unconfigure():
    _AS_OLDER.close()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one offline file go to one worker, since they share what it compiles; all others where there is room."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return file if file.endswith("_offline.py") else nodeid

    return Scheduling(config, log)


@pytest.fixture
def forget():
    """A function that forgets plans; they are forgotten at the end too."""
    from flashtile import dispatch, kvcache_ops, ops, tiles

    def clear():
        tiles.hopper_config.cache_clear()
        dispatch.plan.cache_clear()
        ops._CALLS.__init__()
        kvcache_ops._CALLS.__init__()

    yield clear
    clear()


@pytest.fixture
def cut_keys(monkeypatch, forget):
    """Forwards go to the kernel of caches, as those of few queries and many keys do."""
    from flashtile import tiles

    monkeypatch.setattr(tiles, "cuts_keys", lambda problem, device: not problem.varlen and not problem.dropout_p)
    forget()


@pytest.fixture
def tail_of_half(monkeypatch, forget):
    """Half of the heads of a portable kernel begin side by side, as the last ones of many causal tiles do."""
    from dataclasses import replace

    from flashtile import tiles

    whole = tiles.on_gpu

    def half(kernel, config, problem, device):
        config = whole(kernel, config, problem, device)
        heads = problem.num_heads_kv * config.splits if kernel == "dkdv" else problem.num_heads
        return config if kernel == "delta" else replace(config, tail_heads=(problem.batch * heads + 1) // 2)

    monkeypatch.setattr(tiles, "on_gpu", half)
    forget()


@pytest.fixture
def longest_first(monkeypatch, forget):
    """The Hopper backward takes the longest sequences first, as that of many tiles does."""
    from flashtile.hopper import backward_config

    monkeypatch.setattr(backward_config, "sorted_sequences", lambda problem, config: 16)
    forget()


@pytest.fixture
def three_parts(monkeypatch, forget):
    """Tiles of the Hopper forward have three parts of their keys, as those of few queries and many keys do."""
    from checks import three_key_parts

    from flashtile import tiles

    monkeypatch.setattr(tiles, "_numbers_of_parts", three_key_parts)
    forget()


@pytest.fixture
def shared_heads(monkeypatch, forget):
    """Heads of a group share the tiles of the Hopper forward wherever they may, as those of few queries do."""
    from flashtile import tiles

    def group(problem, device, tile_m):
        return (problem.group_size if tiles._may_share(problem) else 1,)

    monkeypatch.setattr(tiles, "_numbers_of_heads", group)
    forget()


@pytest.fixture
def three_query_parts(monkeypatch, forget):
    """Walks of the Hopper backward have up to three parts, as those of few tiles of keys do."""
    from checks import three_query_parts

    from flashtile.hopper import backward_config

    monkeypatch.setattr(backward_config, "query_parts", three_query_parts)
    forget()


@pytest.fixture
def poisoned():
    """Uninitialised memory holds NaN in this test."""
    with poisoned_memory():
        yield


@pytest.fixture
def long_keys(monkeypatch, forget):
    """Few keys are loaded in a loop, as many are."""
    from flashtile import tiles

    monkeypatch.setattr(tiles, "resident_config", lambda problem, device: None)
    forget()


@pytest.fixture
def long_tiles(long_keys, monkeypatch, request, forget):
    """Calls have the tiles of long ones, at head dims to 64 those of so many queries; what other units limit stays as it is."""
    from flashtile import tiles

    limited = (tiles._is_capped, tiles._has_dropout)
    rows = [row if row.when in limited else row._replace(when=None) for row in tiles.HOPPER
            if row.max_keys is None and row.when is not tiles._is_fp8]  # fmt: skip
    rows = [row if len(row.configs) == 1 else row._replace(configs=tuple(c for c in row.configs if c.tile_m == request.param))
            for row in rows]  # fmt: skip
    monkeypatch.setattr(tiles, "HOPPER", tuple(rows))
    forget()
    return request.param
