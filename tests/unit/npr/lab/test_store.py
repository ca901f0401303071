import json

import pytest

from lazaret.errors import ConfigError
from npr.lab.plan import LabPlan
from npr.lab.store import ResultStore, read_results, write_atomically, write_json


def plan(*methods, rounds=1):
    return LabPlan.model_validate({
        "settings": {"data": {"source": "generated"}, "rounds": rounds},
        "cells": [{"method": method, "seed": 0, "fold": 0} for method in methods],
    })


def result(cell):
    return {"key": cell.key, "slug": cell.slug, "seed": cell.seed, "fold": cell.fold, "variant": cell.variant}


def test_finished_cells_are_taken_up_again(tmp_path):
    wanted = plan("a", "b")
    store = ResultStore(tmp_path)
    store.load(wanted)
    store.record(wanted.cells[0], result(wanted.cells[0]))
    store.write(wanted, {})
    again = ResultStore(tmp_path)
    again.load(wanted)
    assert [again.finished(cell) for cell in wanted.cells] == [True, False]
    assert read_results(tmp_path)["not_run"] == ["b seed=0 fold=0"]


def test_a_cell_that_finished_just_before_a_kill_is_found_in_its_directory(tmp_path):
    wanted = plan("a")
    store = ResultStore(tmp_path)
    write_json(store.directory(wanted.cells[0]) / "result.json", result(wanted.cells[0]))
    store.load(wanted)
    assert store.finished(wanted.cells[0])


def test_cells_of_an_earlier_plan_stay(tmp_path):
    first, second = plan("a", "b"), plan("c")
    for wanted in (first, second):
        store = ResultStore(tmp_path)
        store.load(wanted)
        store.record(wanted.cells[0], result(wanted.cells[0]))
        store.write(wanted, {})
    results = read_results(tmp_path)
    assert [cell["variant"] for cell in results["cells"]] == ["a", "c"]
    assert results["not_run"] == ["b seed=0 fold=0"]


def test_other_settings_are_refused(tmp_path):
    store = ResultStore(tmp_path)
    store.load(plan("a"))
    store.write(plan("a"), {})
    with pytest.raises(ConfigError, match=r"other settings \(rounds\)"):
        ResultStore(tmp_path).load(plan("a", rounds=2))


def test_a_failed_cell_is_said_and_tried_again(tmp_path):
    wanted = plan("a")
    store = ResultStore(tmp_path)
    store.load(wanted)
    store.record_failure(wanted.cells[0], "out of memory")
    store.write(wanted, {})
    assert read_results(tmp_path)["failed"] == [{"key": "a seed=0 fold=0", "error": "out of memory"}]
    again = ResultStore(tmp_path)
    again.load(wanted)
    assert not again.finished(wanted.cells[0])


def test_two_runs_do_not_write_into_one_directory(tmp_path):
    first, second = ResultStore(tmp_path).locked(), ResultStore(tmp_path).locked()
    with first, pytest.raises(ConfigError, match="another run"), second:
        pass
    with ResultStore(tmp_path).locked():
        pass


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("content", ["not json", "[]", json.dumps({"format": "other"})])
def test_a_file_that_is_not_ours_is_refused(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_results(tmp_path)
    assert "results.json" in str(caught.value)
