import pytest

from lazaret.errors import ConfigError
from npr.lab.plan import Cell, make_cells, parse_folds, parse_grids, parse_integers, parse_value


def test_methods_are_innermost_so_that_a_stopped_run_has_compared_them():
    cells = make_cells(["fedavg", "fednpr"], [0, 1], ["fold_lesion"])
    assert [(cell.method, cell.seed) for cell in cells] == [("fedavg", 0), ("fednpr", 0), ("fedavg", 1), ("fednpr", 1)]


def test_a_grid_for_one_method_leaves_the_others_alone():
    cells = make_cells(["fedavg", "fednpr"], [0], [0], parse_grids(["fednpr:lambda_npr=0.1,1", "fednpr:clusters=1,4"]))
    assert [cell.variant for cell in cells] == [
        "fedavg",
        "fednpr[clusters=1,lambda_npr=0.1]",
        "fednpr[clusters=1,lambda_npr=1]",
        "fednpr[clusters=4,lambda_npr=0.1]",
        "fednpr[clusters=4,lambda_npr=1]",
    ]


def test_a_methods_own_grid_goes_over_the_common_one():
    cells = make_cells(["fedavg", "fednpr"], [0], [0], parse_grids(["learning_rate=0.1", "fednpr:learning_rate=0.2"]))
    assert [dict(cell.options)["learning_rate"] for cell in cells] == [0.1, 0.2]


def test_the_same_cell_is_planned_once():
    assert len(make_cells(["fedavg", "fedavg"], [0, 0], [1, 1])) == 1


def test_slugs_are_file_names_and_differ_where_cells_differ():
    cells = make_cells(["fednpr"], [0, 1], [0, "fold_lesion"], {None: {"assign": ["a/b", "a_b", "a b"]}})
    slugs = [cell.slug for cell in cells]
    assert len(set(slugs)) == len(cells) == 12
    assert not any("/" in slug or " " in slug for slug in slugs)


def test_cells_survive_json():
    cell = Cell(method="fednpr", seed=3, fold="fold_lesion", options=(("lambda_npr", 1), ("flag", True), ("rate", 1.0)))
    again = Cell.model_validate_json(cell.model_dump_json())
    assert again == cell and again.slug == cell.slug and again.variant == "fednpr[lambda_npr=1,flag=true,rate=1.0]"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("0.5", 0.5), ("true", True), ("null", None), ("near", "near"), ("[12,14]", (12, 14)), ("{}", "{}")],
)
def test_values(text, value):
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


def test_integers_and_folds():
    assert parse_integers("0,2-4,2") == (0, 2, 3, 4)
    assert parse_folds("fold_lesion,0-1") == ("fold_lesion", 0, 1)
    with pytest.raises(ConfigError, match="not a list of whole numbers"):
        parse_integers("1,x")


@pytest.mark.parametrize("text", ["lambda_npr", "=1", "fednpr:=1", "lambda_npr="])
def test_a_grid_that_cannot_be_read(text):
    with pytest.raises(ConfigError, match="cannot read"):
        parse_grids([text])
