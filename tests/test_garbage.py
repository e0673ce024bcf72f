"""Garbage: the collector rests while a step is planned, and is as it was afterwards."""

import gc
import linecache
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
from torch import fx

import piper_dynamo
from piper_dynamo import _torch_compat as compat
from piper_dynamo.garbage import collect, keep_large_apart, resting_collector, young_collector


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    enabled, threshold = gc.isenabled(), gc.get_threshold()
    gc.enable()
    yield
    assert gc.get_threshold() == threshold
    (gc.enable if enabled else gc.disable)()


def test_it_rests_and_is_back():
    with resting_collector():
        assert not gc.isenabled()
        with resting_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_back_after_a_failure():
    with pytest.raises(ValueError, match="planned"), resting_collector(), young_collector():
        raise ValueError("planned")
    assert gc.isenabled()


def test_young_objects_are_looked_at_within_a_stage():
    with resting_collector(), young_collector():
        assert gc.isenabled()
        ring = weakref.ref(Ring())
        kept = [[] for _ in range(30_000)]
        assert ring() is None
        assert kept


@pytest.mark.parametrize("block", [resting_collector, young_collector])
def test_one_that_the_user_stopped_stays_stopped(block):
    gc.disable()
    with block(), young_collector():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_stage_leaves_neither_rings_nor_source_lines():
    with resting_collector():
        ring = weakref.ref(Ring())
        linecache.cache["<emitted>"] = (3, None, ["a\n"], "<emitted>")
        linecache.cache["<cell>"] = (3, 1.0, ["b\n"], "<cell>")
        assert linecache.getline(piper_dynamo.__file__, 1)
        collect()
        assert ring() is None
        assert piper_dynamo.__file__ not in linecache.cache
        # What has no file could not be read again.
        assert linecache.cache.pop("<emitted>")
        assert linecache.cache.pop("<cell>")


def test_source_lines_are_looked_at_once():
    """Those of graphs stay for good, and a process that compiles many has many."""
    looks = []

    class Entry(tuple):
        def __len__(self):
            looks.append(self)
            return super().__len__()

    linecache.cache["<graph>"] = Entry((3, None, ["a\n"], "<graph>"))
    try:
        for _ in range(3):
            assert linecache.getline(piper_dynamo.__file__, 1)
            collect()
            assert piper_dynamo.__file__ not in linecache.cache
        assert len(looks) == 1
    finally:
        del linecache.cache["<graph>"]


def test_source_lines_that_a_traceback_promised_are_looked_at_once_they_are_read():
    """Python puts them where the promise was, not at the end."""
    name = piper_dynamo.__file__
    linecache.cache.pop(name, None)
    assert linecache.lazycache(name, vars(piper_dynamo))
    linecache.cache["<later>"] = (3, None, ["a\n"], "<later>")
    try:
        collect()
        assert linecache.getline(name, 1)
        collect()
        assert name not in linecache.cache
    finally:
        del linecache.cache["<later>"]


def test_a_dropped_graph_is_gone_at_once():
    graph = fx.Graph()
    node = weakref.ref(graph.call_function(len, (graph.placeholder("x"),)))
    gc.disable()
    assert node() is not None
    compat.drop_graph(graph)
    assert node() is None


@pytest.mark.parametrize("own", [None, "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_large_blocks_are_kept_apart_unless_the_user_chose(own):
    asked = {}
    libc = SimpleNamespace(mallopt=lambda which, value: asked.update({which: value}))
    chosen = {} if own is None else {own: "1"}
    with (
        mock.patch.dict(os.environ, chosen, clear=True),
        mock.patch("piper_dynamo.garbage.ctypes.CDLL", return_value=libc),
    ):
        keep_large_apart()
    assert asked == ({-1: 2 * 2**20, -3: 2**20} if own is None else {})


def test_another_libc_is_left_alone():
    with mock.patch("piper_dynamo.garbage.ctypes.CDLL", return_value=SimpleNamespace()):
        keep_large_apart()
