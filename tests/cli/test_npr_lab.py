"""The command as a user runs it: real processes on tiny images, killed and started again."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from npr import plugin
from npr.data import manifest as manifest_source
from npr.data import store
from npr.lab import plugins
from npr.lab.cli import main
from npr.methods import registry
from tests.support.processes import running

COMMAND = [sys.executable, "-m", "npr.lab.cli"]
TINY = [
    "--data", "generated:scale=0.001,sites=3", "--folds", "fold", "--image-size", "16",
    "--architecture", "test_efficientnet", "--weights", "none", "--no-plots",
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def lab(capfd, monkeypatch):
    """The console script's own entry, in this process: starting torch anew for every command would take minutes."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments, expect=0):
        monkeypatch.setattr(sys, "argv", ["npr-lab", *map(str, arguments)])
        code = 0
        capfd.readouterr()
        try:
            main()
        except SystemExit as end:
            code = end.code
        done = capfd.readouterr()
        assert code == expect, done.err
        return done

    yield run
    torch.set_num_threads(threads)


SMALL_RUN = ["run", *TINY, "--methods", "fedavg,local", "--rounds", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """One finished run for all tests that begin with one; each changes a copy of its own."""
    out, threads = tmp_path_factory.mktemp("small-run"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["npr-lab", *SMALL_RUN, "--out", str(out)])
        with pytest.raises(SystemExit, match="0"):
            main()
    torch.set_num_threads(threads)
    return out


@pytest.fixture
def finished(small_run, tmp_path):
    return shutil.copytree(small_run, tmp_path / "finished")


def results(out):
    return json.loads((out / "results.json").read_text())


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


METHODS = {
    "local", "fedavg", "fedprox", "moon", "creff", "fedrs", "fedlc", "balancefl", "fedrep", "fedrod", "fedbabu",
    "fedper", "fednpr", "fednpr-per",
}
COMBINED = {f"{name}+npr" for name in ("fedprox", "fedbabu", "fedrep", "fedrod", "moon")}


def test_list_is_complete_and_aliases_are_rows(lab):
    rows = json.loads(lab("list", "--json").out)["methods"]
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names)) and METHODS | COMBINED | {"fedavg+npr"} <= set(names)
    assert next(row for row in rows if row["name"] == "fedavg+npr")["alias_of"] == "fednpr"
    text = lab("list").out
    assert "fedavg+npr" in text and "alias of fednpr" in text


def test_a_run_leaves_results_and_a_table_and_is_not_redone(lab, tmp_path):
    arguments = ["run", *TINY, "--methods", "fedavg,fednpr-per", "--rounds", 2, "--out", tmp_path]
    first = lab(*arguments)
    assert "| fednpr-per | personal | refit " in first.out and (tmp_path / "table.md").read_text() == first.out
    content = results(tmp_path)
    assert [cell["variant"] for cell in content["cells"]] == ["fedavg", "fednpr-per"] and not content["not_run"]
    assert [entry["round"] for entry in content["cells"][0]["rounds"]] == [1, 2]
    assert "global" in content["cells"][0]["final"] and "local" in content["cells"][0]["final"]
    again = lab(*arguments, "--json")
    assert "start" not in again.err and json.loads(again.out) == content == results(tmp_path)
    other = lab(*arguments[:-4], "--rounds", 3, "--out", tmp_path, expect=2)
    assert "other settings (rounds)" in other.err


def test_killed_in_the_middle_it_goes_on_where_it_was(lab, tmp_path):
    """kill -9 in the second cell: the first is not redone, the second goes on, and its end is that of a quiet run."""
    arguments = [*TINY, "--methods", "local,fednpr-per", "--rounds", "8", "--evaluate-every", "4"]
    killed, quiet = tmp_path / "killed", tmp_path / "quiet"
    process = subprocess.Popen(
        [*COMMAND, "run", *arguments, "--out", str(killed)], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip().endswith(" s") and "fednpr-per" in line and "round 3" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    before = results(killed)
    assert [cell["variant"] for cell in before["cells"]] == ["local"]
    assert before["not_run"] == ["fednpr-per seed=0 fold=fold"]
    done = lab("run", *arguments, "--out", killed)
    assert "local seed=0 fold=fold: start" not in done.err
    resumed = [line for line in done.err.splitlines() if "fednpr-per" in line and ": round " in line]
    assert "round 1," not in resumed[0] and len(resumed) <= 6
    lab("run", *arguments, "--out", quiet)
    ours, theirs = ({cell["variant"]: cell for cell in results(out)["cells"]} for out in (killed, quiet))
    assert before["cells"][0] == ours["local"]
    assert ours["fednpr-per"]["final"] == theirs["fednpr-per"]["final"]
    assert [entry["round"] for entry in ours["fednpr-per"]["rounds"]] == list(range(1, 9))


def children(pid):
    """Workers are started by threads, so the lists of all threads count."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for listed in lists for child in listed.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
def test_workers_die_with_their_parent(tmp_path):
    arguments = [*TINY, "--methods", "local,fedavg", "--workers", "2", "--rounds", "500", "--out", str(tmp_path)]
    process = subprocess.Popen([*COMMAND, "run", *arguments], stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        wait_until(lambda: len(children(process.pid)) == 2)
        workers = children(process.pid)
    finally:
        process.kill()
        process.wait(timeout=30)
    wait_until(lambda: not any(running(pid) for pid in workers))


def test_workers_share_the_cells_and_find_the_same_as_one_process(lab, small_run, tmp_path):
    one = results(small_run)
    two = json.loads(lab(*SMALL_RUN, "--out", tmp_path / "two", "--workers", "2", "--json").out)
    assert [cell["variant"] for cell in two["cells"]] == ["fedavg", "local"]
    assert [cell["final"] for cell in one["cells"]] == [cell["final"] for cell in two["cells"]]


def test_a_failing_cell_is_told_and_the_others_run(lab, tmp_path):
    grid = ["--methods", "fedavg", "--grid", "learning_rate=1e30,0.001"]
    done = lab("run", *TINY, *grid, "--rounds", 2, "--out", tmp_path, "--json", expect=1)
    content = json.loads(done.out)
    assert [cell["variant"] for cell in content["cells"]] == ["fedavg[learning_rate=0.001]"]
    assert "finite" in content["failed"][0]["error"] and "FAILED" in done.err


def test_secure_aggregation_is_the_same_run(lab, tmp_path):
    arguments = ["run", *TINY, "--methods", "fedavg", "--rounds", 2, "--json"]
    plain = json.loads(lab(*arguments, "--out", tmp_path / "plain").out)
    secure = json.loads(lab(*arguments, "--out", tmp_path / "secure", "--aggregation", "secure").out)
    one, two = (content["cells"][0]["final"]["global"]["head"] for content in (plain, secure))
    assert abs(one["mean_bauc"] - two["mean_bauc"]) < 0.05 and one["images"] == two["images"]


@pytest.mark.parametrize(
    ("arguments", "says", "hints"),
    [
        (["--methods", "fednrp"], "unknown method 'fednrp'", "fednpr"),
        (["--data", "genrated"], "unknown data source 'genrated'", "generated"),
        (["--preset", "paper-isci"], "unknown preset 'paper-isci'", "paper-isic"),
        (["--set", "lamda_npr=1"], "unknown setting 'lamda_npr'", "lambda_npr"),
        (["--set", "lambda_npr=-1"], "lambda_npr", "docs/methods.md"),
        (["--grid", "fedprox:mu=1", "--methods", "fedavg"], "values for 'fedprox'", ""),
        (["--preset", "paper-isic"], "needs the path of the images", "fed-isic:PATH"),
        (["--seeds", "x"], "not a list of whole numbers", "0-4"),
        (["--rounds", "0"], "rounds", ""),
        (["--workers", "0"], "workers", ""),
        (["--reference", "fedagv"], "unknown method 'fedagv'", "fedavg"),
        (["--reference", "fedavg:locl"], "unknown model 'locl'", "local"),
        (["--reference", "fedavg:local:haed"], "unknown predictor 'haed'", "head"),
        (["--set", "predict=both"], "'predict' is not a setting of training", "every predictor"),
        (["--tune", "fedprox:mu=1", "--methods", "fedavg"], "values for 'fedprox'", ""),
        (["--validation", "0"], "validation", ""),
        ([*TINY, "--folds", "9"], "no fold 9", "0 to 4"),
        ([*TINY, "--architecture", "nosuchnet"], "nosuchnet", ""),
        ([*TINY, "--data", "csv:nowhere.csv"], "nowhere.csv", ""),
    ],
)
def test_a_wrong_request_is_one_clear_error_and_nothing_is_written(lab, tmp_path, arguments, says, hints):
    done = lab("run", *arguments, "--out", tmp_path / "out", expect=2)
    assert says in done.err and hints in done.err and "Traceback" not in done.err
    assert not (tmp_path / "out").exists() and not done.out


@pytest.fixture
def manifest(tmp_path):
    """A small manifest of three sites; `spoil` changes it before the run."""
    folder = tmp_path / "images"
    folder.mkdir()
    rows = ["image,label,site,split"]
    for number in range(36):
        image = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(image).save(folder / f"{number}.png")
        side = "test" if number % 3 == 0 else "train"
        rows.append(f"{number}.png,{'ab'[number // 3 % 2]},{'xyz'[number % 9 // 3]},{side}")

    def written(spoil=lambda rows: None):
        spoil(rows)
        (folder / "m.csv").write_text("\n".join(rows) + "\n")
        small = [word for word in TINY if word != "fold"]
        small[small.index("--folds") + 1 : small.index("--folds") + 1] = ["split"]
        small[small.index("--data") + 1] = f"csv:{folder / 'm.csv'}"
        return ["run", *small, "--rounds", 1, "--out", tmp_path / "out"]

    written.folder, written.out = folder, tmp_path / "out"
    return written


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder, rows: (folder / "7.png").unlink(), "m.csv row 9: image file is missing"),
        (lambda folder, rows: (folder / "7.png").write_bytes(b"no image"), "m.csv row 9: image cannot be read"),
        (lambda folder, rows: rows.append(rows[3]), "m.csv row 38"),
        (lambda folder, rows: rows.__setitem__(slice(1, None), []), "m.csv"),
    ],
    ids=["missing", "unreadable", "twice", "empty"],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_data_that_cannot_be_used_is_one_clear_error_and_nothing_is_written(lab, manifest, spoil, says, workers):
    arguments = manifest(lambda rows: spoil(manifest.folder, rows))
    done = lab(*arguments, "--methods", "fedavg,local", "--seeds", "0-1", "--workers", workers, expect=2)
    assert done.err.count(says) == 1 and "Traceback" not in done.err and not done.out
    assert not manifest.out.exists()


def test_sites_without_test_images_and_test_images_of_one_class_are_data_like_others(lab, manifest):
    def spoil(rows):
        rows[1:] = [row.replace("test", "train") if ",x," in row else row for row in rows[1:]]
        rows[1:] = [row for row in rows[1:] if not (row.endswith("test") and ",b," in row)]

    wanted = ["--methods", "fedavg", "--evaluate-every", 1, "--rounds", 2, "--json"]
    content = json.loads(lab(*manifest(spoil), *wanted).out)
    final = content["cells"][0]["final"]["global"]["head"]
    assert final["mean_bauc"] is None and final["sites"]["x"]["bacc"] is None and final["mean_bacc"] is not None
    row = content["summary"][0]
    assert row["mean_bauc"] == [] and "none" in (manifest.out / "table.md").read_text()


def test_a_site_with_one_image_is_refused_by_name(lab, manifest):
    def spoil(rows):
        own = [row for row in rows if ",x," in row and row.endswith("train")]
        rows[:] = [row for row in rows if row not in own[1:]]

    assert "site x has " in lab(*manifest(spoil), "--methods", "fedavg", expect=2).err
    assert not manifest.out.exists()


@pytest.fixture
def own_registry(monkeypatch):
    """A plugin stays registered for as long as its process lives: here for as long as the test."""
    registry.names()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(plugin, "_loaded", {})
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setenv(plugins.VARIABLE, "")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cell_with_a_bug_in_it_fails_alone_and_leaves_its_traceback(lab, own_registry, tmp_path, workers):
    broken = tmp_path / "broken.py"
    broken.write_text(
        "from npr.methods.base import Method\n"
        "from npr.methods.registry import register\n\n\n"
        "@register('broken', 'raises what nobody expects')\n"
        "class Broken(Method):\n"
        "    def work(self, site, round_number):\n"
        "        return 1 // 0\n"
    )
    out = tmp_path / "out"
    run = ["--methods", "broken,local", "--rounds", 1, "--out", out, "--workers", workers, "--json"]
    content = json.loads(lab("--plugin", broken, "run", *TINY, *run, expect=1).out)
    assert [cell["variant"] for cell in content["cells"]] == ["local"]
    error = content["failed"][0]["error"]
    assert error.startswith("unexpected ZeroDivisionError: see cells/broken.")
    assert "return 1 // 0" in (out / error.partition("see ")[2]).read_text()


def test_images_are_decoded_once_for_all_cells(lab, manifest, monkeypatch):
    decoded = []
    original = store.open_image
    for module in (store, manifest_source):
        if hasattr(module, "open_image"):
            monkeypatch.setattr(module, "open_image", lambda *a, **k: decoded.append(a) or original(*a, **k))
    lab(*manifest(), "--methods", "fedavg,local", "--seeds", "0-1")
    assert len(decoded) == 36


def test_cells_of_other_defaults_do_not_share_a_row(lab, finished):
    content = results(finished)
    content["cells"][0]["config_hash"] = "0" * 64
    (finished / "results.json").write_text(json.dumps(content))
    before = (finished / "results.json").read_bytes()
    assert "with other defaults" in lab(*SMALL_RUN, "--out", finished, "--seeds", "0-1", expect=2).err
    assert (finished / "results.json").read_bytes() == before


def test_a_dry_run_names_the_cells(lab, tmp_path):
    grid = ["--methods", "fedavg,fednpr", "--seeds", "0-1", "--grid", "fednpr:lambda_npr=0.1,1", "--dry-run"]
    out = tmp_path / "out"
    assert len(lab("run", *TINY, *grid, "--out", out).out.splitlines()) == 6
    assert len(json.loads(lab("run", *TINY, *grid, "--out", out, "--json").out)["cells"]) == 6
    assert not out.exists()
    assert "no fold 9" in lab("run", *TINY, "--folds", "9", "--dry-run", "--out", out, expect=2).err


def test_cells_that_would_repeat_another_are_left_out_and_named(lab, tmp_path):
    grid = ["--methods", "fedavg,fednpr,fedavg+npr", "--grid", "lambda_npr=0.1,1", "--dry-run"]
    done = lab("run", *TINY, *grid, "--out", tmp_path / "out")
    kept = ["fedavg[lambda_npr=0.1]", "fednpr[lambda_npr=0.1]", "fednpr[lambda_npr=1]"]
    assert [line.partition(" ")[0] for line in done.out.splitlines()] == kept
    assert done.err.count("would repeat another cell") == 3


def _curves_of_a_run_that_is_finished(lab, arguments, out):
    """They can be asked for later: nothing is trained again."""
    before = results(out)
    lab(*arguments, "--track", "tensorboard", "--track", "mlflow")
    assert results(out)["cells"] == before["cells"]
    for cell in before["cells"]:
        assert (out / "tensorboard" / cell["slug"] / "events.out.tfevents.1.lazaret").stat().st_size > 100
    losses = [path.read_text().split()[1] for path in (out / "mlflow").glob("*/*/metrics/loss")]
    assert sorted(losses) == sorted(repr(cell["rounds"][0]["loss"]) for cell in before["cells"])
    (judged,) = (out / "mlflow").glob("*/*/metrics/test/global/head/mean_bacc")
    assert judged.read_text().split()[2] == "1", "the test images were judged after the last round"
    names = [str(path).partition("/metrics/")[2] for path in (out / "mlflow").glob("*/*/metrics/**/*")]
    assert any("0.75-head_0.25-prototypes" in name for name in names), "mixtures too"
    assert all(re.fullmatch(r"[\w.\- :/]+", name) for name in names), "MLflow reads no run with another name in it"


def test_tables_of_a_run(lab, finished):
    rows = json.loads(lab("table", finished, "--json", "--reference", "local").out)["rows"]
    assert next(row for row in rows if row["variant"] == "fedavg")["difference"]["reference"].startswith("local:")
    assert "### Table E" in lab("table", finished, "--paper", "--dataset", "ich").out
    text = lab("table", finished, "--format", "csv").out
    cells = {cell["key"]: cell for cell in results(finished)["cells"]}
    read = list(csv.DictReader(io.StringIO(text)))
    assert {row["side"] for row in read} == {"validation", "test"} and {row["key"] for row in read} == set(cells)
    for row in read:
        side = {"validation": "validation", "test": "final"}[row["side"]]
        value = cells[row["key"]][side][row["model"]][row["predictor"]]["mean_bacc"]
        assert row["mean_bacc"] == ("" if value is None else repr(value))
    assert [row["chosen"] for row in read if row["side"] == "test"].count("True") == 2
    _curves_of_a_run_that_is_finished(lab, [*SMALL_RUN, "--out", finished], finished)
    assert "run `npr-lab run --out DIR` first" in lab("table", finished / "nowhere", expect=2).err


def test_ray_is_an_extra_that_is_asked_for_by_name(lab, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    done = lab("run", *TINY, "--methods", "fedavg", "--engine", "ray", "--out", tmp_path, expect=2)
    assert "lazaret[ray]" in done.err


def test_plots_are_drawn(lab, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = [argument for argument in TINY if argument != "--no-plots"]
    lab("run", *arguments, "--methods", "fednpr", "--grid", "lambda_npr=0.1,1", "--rounds", 2, "--evaluate-every", 1,
        "--out", tmp_path)
    drawn = {path.name.split(".")[0] for path in (tmp_path / "plots").glob("*.png")}
    assert {"curves", "sites", "ablation-lambda_npr"} <= drawn and any(name.startswith("features-") for name in drawn)
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "plots").glob("*.png"))


def test_privacy_is_an_option_of_a_cell_and_is_spent(lab, tmp_path):
    few = ["dp.steps=1", "dp.dimensions=4", "assign=nearest"]
    few = [word for setting in few for word in ("--set", setting)] + ["--grid", "dp.epsilon=null,8"]
    content = json.loads(
        lab("run", *TINY, "--methods", "fednpr-per", *few, "--rounds", 1, "--out", tmp_path, "--json").out
    )
    private, plain = (cell["privacy"] for cell in content["cells"])
    assert plain is None and private["unit"] == "patient" and len(private["spent"]) == 3
    # The plan is fixed before anything is read, so its limit is judged by PLD; Renyi divergence says more.
    assert all(0 < spent["pld"] <= 8 and spent["pld"] <= spent["rdp"] < 9 for spent in private["spent"].values())


def test_what_would_void_privacy_is_refused_before_anything_is_read(lab, tmp_path):
    out = tmp_path / "out"
    assert "assign" in lab("run", *TINY, "--methods", "fednpr", "--dp", "epsilon=8", "--out", out, expect=1).err
    assert "no epsilon" in lab("run", *TINY, "--methods", "fedavg", "--dp", "clip=2", "--out", out, expect=2).err
    assert "dp.epsilon" in lab("run", *TINY, "--methods", "fedavg", "--dp", "epsilon=0", "--out", out, expect=2).err
    assert not out.exists()


def test_the_audit_finds_no_more_than_is_allowed(lab):
    report = json.loads(lab("audit", "--canaries", 200, "--json").out)
    assert report["consistent"] and report["attacks"]["canaries"]["found"] <= report["attacks"]["canaries"]["allowed"]


def test_the_audit_finds_training_without_noise(lab, monkeypatch):
    """The twin: noise switched off behind the ledger's back is found out, and the exit code says so."""
    from security.dp.noise import NoiseSource

    def silence(self, out):
        out[:] = 0.0  # whatever was in that memory: NaN times zero would still be NaN
        return out

    monkeypatch.setattr(NoiseSource, "gaussian", silence)
    report = json.loads(lab("audit", "--canaries", 1000, "--json", expect=1).out)
    assert not report["attacks"]["canaries"]["consistent"]
