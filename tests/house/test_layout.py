"""What holds of the source tree: a class name means one thing, and unit tests stand where their source stands."""

from __future__ import annotations

from scripts import source_mirror


def test_a_class_name_means_one_thing() -> None:
    twice = source_mirror.class_names()
    assert {name: where for name, where in twice.items() if name not in source_mirror.SHARED_NAMES} == {}
    assert source_mirror.SHARED_NAMES.keys() <= twice.keys(), "an exception that is no longer needed"
    assert all(source_mirror.SHARED_NAMES.values()), "an exception without a reason"


def test_the_unit_tree_mirrors_the_source() -> None:
    assert source_mirror.tests_without_source() == []


def test_the_mirror_sees_what_it_looks_for(tmp_path, monkeypatch) -> None:
    """The same figures over a small tree with one of each fault."""
    for name, text in {
        "lazaret/__init__.py": '"""A contract."""\n',
        "lazaret/errors.py": '"""One."""\n\n# why\nclass Fault:\n    """Said."""\n\n    code = 1\n',
        "security/lonely.py": "from lazaret.errors import Fault\n\n\nclass Other(Fault):\n    pass\n",
        "npr/twice.py": "class Other:\n    pass\n",
        "tests/unit/npr/test_twice_on_sundays.py": "",
        "tests/unit/npr/test_nothing.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(source_mirror, "ROOT", tmp_path)
    found = source_mirror.figures(trace=False)
    assert found["modules"] == 3 and found["single_importer_modules"] == 1
    assert source_mirror.class_names() == {"Other": ["npr.twice", "security.lonely"]}
    assert source_mirror.tests_without_source() == ["tests/unit/npr/test_nothing.py"]
    assert found["product_lines"] == 2 + 3 + 2
    assert found["largest_file"] == 7
