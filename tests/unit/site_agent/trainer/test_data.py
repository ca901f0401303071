"""A site's sides: kept in its state folder, or by the key that was made with the ledger."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from lazaret.errors import DataError, LedgerError
from npr.data.dataset import SiteData
from security.dp.ledger import Terms, Unit
from security.rng import SystemRandomness
from site_agent.config import CoordinatorTable, DataTable, PrivacyTable, SiteConfig, SiteTable
from site_agent.privacy import check_sides_key, create_ledger, ledger_files, sides_key_file
from site_agent.trainer.data import fingerprint, open_data, side_rule
from site_agent.trainer.workers import EncodedSides, encode_sides

CLASSES = ("nevus", "melanoma", "keratosis")
KEY = bytes(32)
PLAIN, PRIVATE = SimpleNamespace(privacy=None), SimpleNamespace(privacy=object())
PLAN = SimpleNamespace(
    terms=lambda config: Terms(
        population=config.privacy.population, unit=Unit.PATIENT, delta=1e-5, cap=3.0, order=8.0
    )
)


def configured(folder: Path, **privacy: object) -> SiteConfig:
    return SiteConfig(
        site=SiteTable(initial_model="initial.safetensors"),
        coordinator=CoordinatorTable(address="hub.example:7443"),
        data=DataTable(source=f"csv:{folder}/table.csv"),
        privacy=PrivacyTable(**privacy),  # type: ignore[arg-type]
        path=folder / "site.toml",
    )


@pytest.fixture
def hospital(tmp_path: Path) -> SiteConfig:
    Image.fromarray(np.full((8, 8, 3), 90, dtype=np.uint8)).save(tmp_path / "one.png")
    rows(tmp_path, 150)
    return configured(tmp_path)


def rows(folder: Path, count: int) -> None:
    """Up to four images of a patient each; every image is a link to the same file."""
    lines = ["image,label,patient"]
    for row in range(count):
        image = folder / f"{row}.png"
        if not image.exists():
            image.symlink_to("one.png")
        patient = row // 3 if row < 150 else 1000 + row // 2
        lines.append(f"{row}.png,{CLASSES[patient % 3]},P-{patient}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")


def opened(config: SiteConfig, manifest: SimpleNamespace, *, keep: bool = True) -> SiteData:
    rule = side_rule(config, manifest, KEY, keep=keep)  # type: ignore[arg-type]
    return open_data(config.data, site="graz", image_size=8, classes=CLASSES, rule=rule)[1]


def images(data: SiteData) -> dict[str, set[str]]:
    sides = {"train": data.train, "test": data.test, "validation": data.validation}
    return {side: set(samples.ids) for side, samples in sides.items() if samples is not None}


def forget(config: SiteConfig) -> None:
    (config.sides / "list.json").unlink()


class TestKept:
    def test_after_twenty_new_rows_nobody_has_moved(self, hospital: SiteConfig) -> None:
        before = images(opened(hospital, PLAIN))
        rows(hospital.path.parent, 170)
        after = images(opened(hospital, PLAIN))
        assert all(before[side] <= after[side] for side in before)
        assert sum(len(part) for part in after.values()) == 170
        assert (hospital.sides / "list.json").stat().st_mode & 0o777 == 0o600

    def test_the_twin_without_the_list_tests_on_what_it_has_trained_on(self, hospital: SiteConfig) -> None:
        before = images(opened(hospital, PLAIN))
        rows(hospital.path.parent, 170)
        forget(hospital)
        after = images(opened(hospital, PLAIN))
        leaked = after["test"] & (before["train"] | before["validation"])
        assert len(leaked) >= 10

    def test_commands_that_look_write_nothing(self, hospital: SiteConfig) -> None:
        opened(hospital, PLAIN, keep=False)
        assert not hospital.sides.exists()

    def test_a_lost_list_is_refused_once_rounds_were_trained(self, hospital: SiteConfig) -> None:
        opened(hospital, PLAIN)
        memory = hospital.state / "memory"
        memory.mkdir()
        (memory / "1.safetensors").write_bytes(b"")
        opened(hospital, PLAIN)
        forget(hospital)
        with pytest.raises(DataError, match="rounds were trained with it"):
            opened(hospital, PLAIN)

    def test_a_worker_divides_as_it_is_told(self, hospital: SiteConfig) -> None:
        opened(hospital, PLAIN)
        rows(hospital.path.parent, 170)
        rule = side_rule(hospital, PLAIN, KEY)  # type: ignore[arg-type]
        dataset, ours = open_data(hospital.data, site="graz", image_size=8, classes=CLASSES, rule=rule)
        told = EncodedSides(encode_sides(dataset.sides))
        theirs = open_data(hospital.data, site="graz", image_size=8, classes=CLASSES, rule=told)[1]
        assert images(ours) == images(theirs)
        rows(hospital.path.parent, 171)
        with pytest.raises(DataError, match="not the rows that were divided"):
            open_data(hospital.data, site="graz", image_size=8, classes=CLASSES, rule=told)


class TestKeyed:
    @pytest.fixture
    def begun(self, hospital: SiteConfig) -> SiteConfig:
        create_ledger(hospital, PLAN, rng=SystemRandomness())  # type: ignore[arg-type]
        return hospital

    def test_the_key_is_made_with_the_ledger_which_names_it(self, begun: SiteConfig) -> None:
        state = ledger_files(begun).peek()
        assert state is not None and len(state.sides) == 64
        check_sides_key(begun, state)
        assert sides_key_file(begun).stat().st_mode & 0o777 == 0o600

    def test_a_patient_more_moves_nobody(self, begun: SiteConfig) -> None:
        before = images(opened(begun, PRIVATE))
        rows(begun.path.parent, 152)
        after = images(opened(begun, PRIVATE))
        assert all(before[side] <= after[side] for side in before)

    def test_nobody_is_held_out_for_a_validation_that_is_off(self, begun: SiteConfig) -> None:
        assert "validation" not in images(opened(begun, PRIVATE))
        paid = configured(begun.path.parent, metrics_noise=20.0)
        assert images(opened(paid, PRIVATE))["validation"]

    def test_a_lost_key_is_an_error_and_no_new_key(self, begun: SiteConfig) -> None:
        state = ledger_files(begun).peek()
        assert state is not None
        kept = sides_key_file(begun).read_bytes()
        sides_key_file(begun).unlink()
        for attempt in (lambda: opened(begun, PRIVATE), lambda: check_sides_key(begun, state)):
            with pytest.raises(LedgerError, match="is missing"):
                attempt()
        assert not sides_key_file(begun).exists()
        for wrong, what in ((bytes(32), "not the ledger's"), (kept[:31], "damaged")):
            sides_key_file(begun).write_bytes(wrong)
            sides_key_file(begun).chmod(0o600)
            with pytest.raises(LedgerError, match=what):
                check_sides_key(begun, state)

    def test_a_second_ledger_of_this_site_uses_the_same_key(self, begun: SiteConfig) -> None:
        other = configured(begun.path.parent, population="children")
        create_ledger(other, PLAN, rng=SystemRandomness())  # type: ignore[arg-type]
        first, second = ledger_files(begun).peek(), ledger_files(other).peek()
        assert first is not None and second is not None and first.sides == second.sides


class TestUnderPrivacy:
    """What is wrong with one patient's rows concerns that patient alone; nothing is refused."""

    @pytest.fixture
    def begun(self, hospital: SiteConfig) -> SiteConfig:
        create_ledger(hospital, PLAN, rng=SystemRandomness())  # type: ignore[arg-type]
        return hospital

    def table(self, config: SiteConfig, *lines: str, header: str = "image,label,patient") -> None:
        (config.path.parent / "table.csv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")

    def opened(self, config: SiteConfig) -> SiteData:
        rule = side_rule(config, PRIVATE, KEY)  # type: ignore[arg-type]
        return open_data(config.data, site="graz", image_size=8, classes=CLASSES, rule=rule, private=True)[1]

    def kept(self, config: SiteConfig) -> set[str]:
        return set().union(*images(self.opened(config)).values())

    def test_faulty_rows_are_left_out_and_told_by_row(
        self, begun: SiteConfig, caplog: pytest.LogCaptureFixture
    ) -> None:
        (begun.path.parent / "torn.png").write_bytes(b"\x89PNG")
        self.table(
            begun,
            "0.png,nevus,Anna",
            "1.png,nothing,Bert",
            "missing.png,nevus,Cora",
            "torn.png,nevus,Dora",
            "2.png,,Emil",
            "3.png,nevus",
            "4.png,nevus,\u00a0\u200b",
            "5.png,nevus,Fritz",
            "6.png,nevus,FRITZ ",
            "7.png,nevus,Anna",
        )
        assert self.kept(begun) == {"0.png", "7.png"}
        assert "table.csv row 3" in caplog.text and "rows are left out" in caplog.text
        assert not any(name in caplog.text for name in ("Anna", "Bert", "Dora", "Fritz", "FRITZ"))

    def test_one_image_of_two_patients_is_kept_for_both(self, begun: SiteConfig) -> None:
        self.table(begun, "0.png,nevus,Anna", "0.png,melanoma,Bert", "0.png,nevus,Anna")
        assert sum(len(part) for part in (self.opened(begun).train, self.opened(begun).test)) == 2

    def test_an_empty_table_and_an_empty_side_are_no_refusal(
        self, begun: SiteConfig, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.table(begun)
        assert len(self.opened(begun).train) == 0 and "no image to train on" in caplog.text
        self.table(begun, header="image,label,patient,split")
        column = begun.model_copy(update={"data": begun.data.model_copy(update={"fold": "split"})})
        assert len(self.opened(column).train) == 0
        self.table(begun, "0.png,nevus,Anna,train", "1.png,nevus,Bert,", header="image,label,patient,split")
        assert images(self.opened(column)) == {"train": {"0.png"}, "test": set()}

    def test_classes_are_listed_and_never_learnt(self, begun: SiteConfig) -> None:
        self.table(begun, "0.png,nevus,Anna", "1.png,unheard of,Bert")
        assert self.opened(begun).train.num_classes == len(CLASSES)

    def test_without_privacy_the_same_rows_are_refused(self, begun: SiteConfig) -> None:
        for lines, what in (
            (("0.png,nevus,Anna", "1.png,nevus,ANNA"), "row 2, spelt in another way"),
            (("0.png,nevus,Anna", "0.png,nevus,Bert"), "the same image as in table.csv row 2"),
            (("0.png,nevus,\u200b",), "patient is empty"),
            (("0.png,other,Anna",), "not in the class list"),
        ):
            self.table(begun, *lines)
            with pytest.raises(DataError, match=what) as caught:
                opened(begun, PLAIN)
            assert "table.csv row" in str(caught.value) and "nna" not in str(caught.value)


def test_a_hospital_with_other_names_says_which_is_which(hospital: SiteConfig) -> None:
    names = ("melanoma", "nevus")

    def labels(class_map: dict[str, str] | None) -> list[int]:
        table = hospital.data.model_copy(update={"class_map": class_map})
        rule = side_rule(hospital, PLAIN, KEY, keep=False)  # type: ignore[arg-type]
        _, data = open_data(table, site="graz", image_size=8, classes=names, rule=rule)
        return sorted(set(data.train.labels.tolist()))

    with pytest.raises(DataError, match="not in the class list"):
        labels(None)
    assert labels({"nevus": "nevus", "melanoma": "melanoma", "keratosis": "nevus"}) == [0, 1]
    with pytest.raises(DataError, match="not in the class list"):
        labels({"nevus": "nevus", "melanoma": "melanoma"})


def test_the_fingerprint_covers_labels_patients_and_splits(hospital: SiteConfig) -> None:
    def version() -> str:
        rule = side_rule(hospital, PLAIN, KEY, keep=False)  # type: ignore[arg-type]
        return fingerprint(*open_data(hospital.data, site="graz", image_size=8, classes=CLASSES, rule=rule), KEY)

    table = hospital.path.parent / "table.csv"
    text = table.read_text()
    seen = {version()}
    assert version() in seen
    header, *lines = text.splitlines()
    sides = [f"{line},{'test' if '-1' in line else 'train'}" for line in lines]
    with_split = "\n".join([f"{header},split", *sides])
    for change in (
        text.replace("0.png,nevus,P-0", "0.png,melanoma,P-0"),
        text.replace("P-49", "P-999"),
        with_split,
        with_split.replace(",P-2,train", ",P-2,test"),
    ):
        table.write_text(change)
        seen.add(version())
    assert len(seen) == 5
