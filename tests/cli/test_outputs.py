"""Output folders: nothing of anybody is lost, and results appear complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from hashlib import sha256
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosspack.cli import outputs, remote
from crosspack.cli.listing import LISTING, Listed, write_listing
from crosspack.cli.outputs import writing
from packing_core.errors import PackingError
from packing_core.training.files import is_plain


def run(folder, files: dict[str, str], **options) -> None:
    """Publish a result of these files, as a command does."""
    with writing(folder, "manifest.json", names=("train-*",), **options) as output:
        for name, text in {"manifest.json": "{}", **files}.items():
            path = output.partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        output.publish()


def held(folder) -> dict[str, str]:
    """Every file below the folder but the listing."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.name != LISTING
    }


def test_a_result_replaces_an_earlier_one_and_leaves_nothing_of_it(tmp_path):
    out = tmp_path / "out"
    run(out, {"train-0": "a", "train-1": "b", "old/deep/file": "c"})
    run(out, {"train-0": "d"}, overwrite=True)
    assert held(out) == {"manifest.json": "{}", "train-0": "d"}
    assert not (out / "old").exists()


def test_all_files_of_a_result_may_be_read_by_the_same_people(tmp_path):
    with writing(tmp_path / "out", "manifest.json") as output:
        for name, mode in (("manifest.json", 0o644), ("model.safetensors", 0o600)):
            (output.partial / name).write_text("{}")
            (output.partial / name).chmod(mode)
        output.publish()
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~mask}


def test_files_of_others_stay_when_ours_are_replaced(tmp_path):
    out = tmp_path / "out"
    run(out, {"train-0": "a", "tokenizer/vocabulary": "v"})
    (out / ".git").mkdir()
    others = {".git/HEAD": "ref", "thesis.txt": "the only copy", "tokenizer/mine": "m"}
    for name, text in others.items():
        (out / name).write_text(text)
    run(out, {"train-1": "b"}, overwrite=True)
    assert held(out) == {"manifest.json": "{}", "train-1": "b", **others}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_strangers_manifest_does_not_make_a_folder_ours(tmp_path, overwrite):
    (tmp_path / "manifest.json").write_text('{"of": "somebody"}')
    (tmp_path / "notes").write_text("n")
    with pytest.raises(PackingError, match="is not empty|has no crosspack-files.json, so it holds something else"):
        run(tmp_path, {}, overwrite=overwrite)
    assert held(tmp_path) == {"manifest.json": '{"of": "somebody"}', "notes": "n"}


@pytest.mark.parametrize(
    "listing",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"format": "crosspack files 1"}',
        '{"format": "crosspack files 1", "files": [{"name": "notes", "size": 1, "sha256": ""}], "sha256": ""}',
        "signed, outside",
        "signed, through a link",
    ],
    ids=range(7),
)
def test_a_listing_that_we_did_not_write_makes_nothing_ours(tmp_path, listing):
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_text("v")
    (out / "notes").write_text("n")
    (out / "link").symlink_to(tmp_path)
    if listing.startswith("signed"):
        name = "../victim" if listing.endswith("outside") else "link/victim"
        write_listing(out, [Listed.of(victim, name)])
    else:
        (out / LISTING).write_text(listing)
    with pytest.raises(PackingError, match="is not a list that crosspack wrote|link is a link: nothing was changed"):
        run(out, {}, overwrite=True)
    assert victim.read_text() == "v" and (out / "notes").read_text() == "n"


def test_a_listed_file_that_was_changed_is_not_ours_any_more(tmp_path):
    run(tmp_path / "out", {"train-0": "a"})
    (tmp_path / "out/train-0").write_text("b")  # of the same size
    with pytest.raises(PackingError, match="train-0 was changed since crosspack wrote it: move it elsewhere"):
        run(tmp_path / "out", {}, overwrite=True)
    assert (tmp_path / "out/train-0").read_text() == "b"


def test_a_strangers_file_in_the_place_of_a_result_is_refused_before_the_work(tmp_path):
    run(tmp_path, {"train-0": "a"})
    (tmp_path / "train-1").write_text("mine")
    work = writing(tmp_path, "manifest.json", names=("train-*",), overwrite=True)
    with pytest.raises(PackingError, match="train-1 is not a file that crosspack wrote"):
        work.__enter__()


def test_a_file_that_appears_during_the_work_is_not_replaced(tmp_path):
    with writing(tmp_path, "manifest.json") as output:
        (output.partial / "x").write_text("ours")
        (tmp_path / "x").write_text("mine")
        with pytest.raises(PackingError, match="x is not a file that crosspack wrote"):
            output.publish()
    assert held(tmp_path) == {"x": "mine"}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_result_goes_through_nobodys_file_or_link(tmp_path, kind):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    run(out, {"train-0": "a"})
    elsewhere.mkdir()
    (out / "tokenizer").symlink_to(elsewhere) if kind == "link" else (out / "tokenizer").write_text("mine")
    before = held(tmp_path)
    with pytest.raises(PackingError, match="tokenizer is not a file that crosspack wrote"):
        run(out, {"tokenizer/vocabulary": "v"}, overwrite=True)
    assert held(tmp_path) == before


@pytest.mark.parametrize("error", [PackingError("no"), KeyboardInterrupt()])
def test_a_run_that_fails_changes_nothing(tmp_path, error):
    run(tmp_path / "old", {"train-0": "a"})
    for folder in (tmp_path / "old", tmp_path / "new"):
        before = held(tmp_path)
        work = writing(folder, "manifest.json", overwrite=True)
        (work.__enter__().partial / "x").write_text("x")
        assert not work.__exit__(type(error), error, None)
        assert held(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_an_interrupted_publication_owns_what_it_left(tmp_path, monkeypatch):
    run(tmp_path, {"train-0": "a", "train-1": "b"})
    moved = []

    def broken(source, target, name):
        if name == "train-1":
            raise KeyboardInterrupt
        moved.append(name)
        os.replace(source / name, target / name)

    with monkeypatch.context() as patched:
        patched.setattr(outputs, "move_inside", broken)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, {"train-0": "c", "train-1": "d"}, overwrite=True)
    assert "train-0" in moved and "manifest.json" not in held(tmp_path)  # it does not look finished
    run(tmp_path, {"train-2": "e"}, overwrite=True)
    assert held(tmp_path) == {"manifest.json": "{}", "train-2": "e"}


def test_an_output_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for name in ("train-0", "train-1"):
        run(tmp_path / "out", {name: "a"}, overwrite=name == "train-1")
    assert (tmp_path / "out").is_symlink() and held(tmp_path / "disk") == {"manifest.json": "{}", "train-1": "a"}


def test_a_mount_point_is_written_inside(tmp_path, monkeypatch):
    (tmp_path / "lost+found").mkdir()
    removed = []
    monkeypatch.setattr(os, "rmdir", lambda path, **options: removed.append(path))  # a mount point is busy
    run(tmp_path, {"train-0": "a"})
    assert held(tmp_path) == {"manifest.json": "{}", "train-0": "a"}
    assert str(tmp_path) not in map(str, removed)


@pytest.mark.parametrize("made", ["file", "below a file", "null", "long", "dangling"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, made):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    places = {"below a file": "file/out", "null": "a\0b", "long": "a" * 5000}
    with pytest.raises(PackingError, match=r"^--output [^\n]*: pass a folder"):
        run(tmp_path / places.get(made, made), {})
    assert (tmp_path / "file").read_text() == "x"


def test_an_error_about_another_file_names_that_file(tmp_path):
    work = writing(tmp_path / "out", "manifest.json")
    work.__enter__()
    try:
        (tmp_path / "absent").read_text()
    except OSError as error:
        with pytest.raises(PackingError, match=f"^{tmp_path / 'absent'}: No such file or directory$"):
            work.__exit__(type(error), error, error.__traceback__)


def test_the_result_reaches_the_device_before_its_names_do(tmp_path, monkeypatch):
    seen = []
    fsync, replace = os.fsync, os.replace
    name = "/proc/self/fd/{}".format
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(("sync", os.readlink(name(fd)))), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b, **fds: (seen.append(("rename", str(b))), replace(a, b, **fds)))
    run(tmp_path, {"train-0": "a"})
    kinds = [(what, os.path.basename(path)) for what, path in seen]
    assert kinds.index(("sync", "train-0")) < kinds.index(("rename", "train-0"))
    assert ("sync", str(tmp_path)) in seen[kinds.index(("rename", "manifest.json")) :]


# -- what somebody else prepared ---------------------------------------------------------------------------------------


WORK = outputs._WORK
JOURNAL = f"{WORK}/{outputs._MOVES}"


def prepared(folder, old=(), new=(), summary="manifest.json", run="r") -> None:
    """A folder as a publication leaves it that was interrupted before its first move: (name, text) of each file."""
    listed = [[{"name": n, "size": len(t), "sha256": sha256(t.encode()).hexdigest()} for n, t in x] for x in (old, new)]
    (folder / WORK / "result").mkdir(parents=True)
    for name, text in new:
        if is_plain(name):
            (folder / WORK / "result" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / WORK / "result" / name).write_text(text)
    content = {"summary": summary, "run": run, "old": listed[0], "new": listed[1]}
    (folder / JOURNAL).write_text(json.dumps(content))


def everything(folder) -> dict[str, str]:
    """Files, links and folders below a folder, and what they hold."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path)
        if path.is_symlink()
        else (path.read_text() if path.is_file() else "a folder")
        for path in folder.rglob("*")
    }


MANIFEST = ("manifest.json", "{}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([("../victim", "v")], [MANIFEST]),
        ([], [("../victim", "mine"), MANIFEST]),
        ([], [("link/victim", "mine"), MANIFEST]),
        ([("link/victim", "v")], [MANIFEST]),
        ([], [("notes", "mine"), MANIFEST]),
        ([("notes", "other")], [MANIFEST]),
        ([("notes", "n")], [MANIFEST]),  # ours by its content, and --overwrite is not given
        ([], [(".crosspack-lock", "mine"), MANIFEST]),
        ([], [("a", "b")]),
    ],
    ids=["deletes outside", "writes outside", "writes through a link", "deletes through a link", "replaces", "changed"]
    + ["without --overwrite", "the lock", "no summary"],
)
def test_a_journal_that_somebody_prepared_changes_nothing(tmp_path, old, new):
    """A folder with such a journal lost files outside of it, without --overwrite."""
    out, place = tmp_path / "out", tmp_path / "place"
    out.mkdir()
    place.mkdir()
    (tmp_path / "victim").write_text("v")
    (place / "victim").write_text("v")
    (out / "notes").write_text("n")
    (out / "link").symlink_to(place)
    prepared(out, old, new)
    before = everything(tmp_path)
    with pytest.raises(PackingError):
        run(out, {}, run="r")
    assert everything(tmp_path) == before


def test_an_interrupted_publication_of_ours_is_completed(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    prepared(out, [], [("train-0", "a"), MANIFEST])
    with writing(out, "manifest.json", run="r") as output:
        assert output.finished
    assert held(out) == {"train-0": "a", "manifest.json": "{}"}


@pytest.mark.parametrize("inner", ["", "result", "result/deep"])
def test_a_work_folder_that_is_a_link_or_holds_one_is_refused(tmp_path, inner):
    """The link's target was emptied."""
    out, place = tmp_path / "out", tmp_path / "place"
    place.mkdir()
    (place / "thesis").write_text("the only copy")
    path = out / WORK / inner
    path.parent.mkdir(parents=True)
    path.symlink_to(place)
    before = everything(tmp_path)
    for options in ({"run": "r"}, {}):
        with pytest.raises(PackingError, match="is a link"):
            run(out, {}, **options)
        assert everything(tmp_path) == before


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-5, 10**12)
        | st.sampled_from(["", "..", "/", "notes", "../victim", "a/b"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["summary", "run", "old", "new", "name", "size", "sha256", "x"]), inner)
        ),
        max_leaves=12,
    )
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_journal_reaches_a_file_of_others(tmp_path, content):
    out = tmp_path / uuid4().hex / "out"
    (out / WORK / "result").mkdir(parents=True)
    (out.parent / "victim").write_text("v")
    (out / "notes").write_text("n")
    (out / JOURNAL).write_text(json.dumps(content))
    with pytest.raises(PackingError):
        run(out, {}, run="r")
    assert (out.parent / "victim").read_text() == "v" and (out / "notes").read_text() == "n"


@pytest.mark.parametrize("made", ["link", "open"])
def test_the_folder_for_uploads_is_ours_alone(tmp_path, monkeypatch, made):
    """It had a predictable name in the temporary directory, and whoever made it first could read and change it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = remote._own_folder()
    assert folder.stat().st_mode & 0o777 == 0o700 and remote._own_folder() == folder
    folder.rmdir()
    if made == "link":
        (tmp_path / "place").mkdir()
        folder.symlink_to(tmp_path / "place")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(PackingError, match="is a link or a file|is open to other users"):
        remote._own_folder()


@pytest.mark.parametrize("where", ["gone", "coming"])
def test_a_link_that_is_put_on_the_way_after_the_check_leads_nowhere(tmp_path, monkeypatch, where):
    """Somebody who may write in the folder is faster than the publication that was checked."""
    victim, out = tmp_path / "victim", tmp_path / "out"
    run(out, {"inner/train-0": "a"})
    victim.mkdir()
    (victim / "train-0").write_text("mine")
    check = outputs._check_free

    def swap(folder, names):
        check(folder, names)
        shutil.rmtree(out / "inner")
        (out / "inner").symlink_to(victim)

    with writing(out, "manifest.json", overwrite=True) as output:
        (output.partial / "inner").mkdir()
        (output.partial / "inner" / ("train-0" if where == "coming" else "train-1")).write_text("b")
        (output.partial / "manifest.json").write_text("{}")
        monkeypatch.setattr(outputs, "_check_free", swap)
        with pytest.raises(PackingError, match="inner is a link or a file by now"):
            output.publish()
    assert held(victim) == {"train-0": "mine"}
