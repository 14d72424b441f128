"""Files on disk: all or none, whole at any moment, backed up, and put back."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest

from trimtab.configs import files, formats
from trimtab.configs.files import FileChange
from trimtab.errors import BrokenFile, EnvironmentFault, TrimtabError, UnknownName, WrongUse

OLD = b"batch: 4  # small\nname: a\n"
NEW = b"batch: 8  # small\nname: a\n"
CHANGE: dict[tuple[str | int, ...], Any] = {("batch",): 8}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.yaml"
    path.write_bytes(OLD)
    return path


def apply(*names: str | Path, value: Any = 8, **options: Any) -> files.WriteResult:
    wanted = [FileChange(file=str(name), changes={("batch",): value}) for name in names]
    return files.write_files(files.prepare_files(wanted), **options)


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".tmp"))


def test_a_write_changes_the_file_and_keeps_the_old_one(file: Path) -> None:
    done = apply("train.yaml", words="plan of slm on 4xH100", fingerprint="abc", clock=lambda: 0.0)
    assert file.read_bytes() == NEW
    assert done.files == ("train.yaml",)
    (kept,) = files.list_backups(file)
    assert (Path(done.backups[0]) / "train.yaml").read_bytes() == OLD
    assert (kept.number, kept.words, kept.plan, kept.date[:4]) == (1, "plan of slm on 4xH100", "abc", "1970")
    assert kept.files[0].sha256 == files.hash_bytes(OLD)
    assert (file.parent / ".trimtab" / ".gitignore").read_text() == "*\n"
    assert left_behind(file.parent) == []


def test_the_diff_comes_before_anything_is_written(file: Path) -> None:
    (ready,) = files.prepare_files([FileChange(file="train.yaml", changes=CHANGE)])
    assert ready.diff().splitlines() == [
        "--- train.yaml (now)",
        "+++ train.yaml (new)",
        "@@ -1,2 +1,2 @@",
        "-batch: 4  # small",
        "+batch: 8  # small",
        " name: a",
    ]
    assert [path.name for path in file.parent.iterdir()] == ["train.yaml"]


def test_a_diff_says_that_the_last_line_has_no_end(file: Path) -> None:
    file.write_bytes(b"batch: 4")
    (ready,) = files.prepare_files([FileChange(file="train.yaml", changes=CHANGE)])
    assert ready.diff().endswith("+batch: 8\n\\ No newline at end of file\n")


def test_applying_again_writes_nothing_and_says_so(file: Path) -> None:
    apply("train.yaml")
    before = sorted(file.parent.rglob("*"))
    about = file.stat()
    done = apply("train.yaml")
    assert (done.files, done.backups, done.unchanged) == ((), (), ("train.yaml",))
    assert "already" in done.said[0]
    assert sorted(file.parent.rglob("*")) == before
    assert file.stat().st_mtime_ns == about.st_mtime_ns
    assert file.stat().st_ino == about.st_ino


def test_several_files_are_written_or_none(file: Path) -> None:
    (file.parent / "b.yaml").write_bytes(b"batch: [4\n")
    with pytest.raises(BrokenFile, match=r"b.yaml:2:1"):
        apply("train.yaml", "b.yaml")
    assert file.read_bytes() == OLD
    assert not (file.parent / ".trimtab").exists()


def test_files_of_one_folder_share_a_backup_and_others_have_their_own(file: Path) -> None:
    folder = file.parent / "conf"
    folder.mkdir()
    for path in (folder / "a.yaml", folder / "b.yaml"):
        path.write_bytes(OLD)
    done = apply("train.yaml", "conf/a.yaml", "conf/b.yaml")
    assert len(done.backups) == 2
    assert {file.file for file in files.list_backups(folder / "a.yaml")[0].files} == {"a.yaml", "b.yaml"}
    files.revert_file("conf/a.yaml")
    assert (folder / "a.yaml").read_bytes() == OLD
    assert (folder / "b.yaml").read_bytes() == NEW


def test_one_file_named_twice_takes_both_wishes(file: Path) -> None:
    wanted = [
        FileChange(file="train.yaml", changes={("batch",): 8}),
        FileChange(file="./train.yaml", changes={("name",): "b"}),
    ]
    files.write_files(files.prepare_files(wanted))
    assert file.read_bytes() == b"batch: 8  # small\nname: b\n"


def test_two_wishes_that_contradict_each_other_are_refused(file: Path) -> None:
    wanted = [FileChange(file="train.yaml", changes={("batch",): number}) for number in (8, 16)]
    with pytest.raises(WrongUse, match="both 8 and 16"):
        files.prepare_files(wanted)
    assert file.read_bytes() == OLD


# Back again


def test_revert_goes_back_step_by_step_and_stops_at_the_first(file: Path) -> None:
    for value in (8, 16, 32):
        apply("train.yaml", value=value)
    seen = []
    for _ in range(3):
        files.revert_file("train.yaml")
        seen.append(formats.read_config(file).entries()[0].value)
    assert seen == [16, 8, 4]
    assert file.read_bytes() == OLD
    with pytest.raises(WrongUse, match=r"every write .* taken back already.*there are 2 .*6 "):
        files.revert_file("train.yaml")


def test_any_backup_can_be_named_and_a_revert_can_be_taken_back(file: Path) -> None:
    for value in (8, 16, 32):
        apply("train.yaml", value=value)
    assert files.revert_file("train.yaml", number=2).backup is not None
    assert formats.read_config(file).entries()[0].value == 8
    files.revert_file("train.yaml", number=4)  # what the revert replaced
    assert formats.read_config(file).entries()[0].value == 32
    files.revert_file("train.yaml")
    assert formats.read_config(file).entries()[0].value == 16


def test_a_file_that_was_edited_since_is_not_overwritten(file: Path) -> None:
    apply("train.yaml")
    file.write_bytes(NEW + b"mine: 1\n")
    with pytest.raises(WrongUse, match=r"edited after trimtab wrote it(?s:.*)-mine: 1(?s:.*)--force"):
        files.revert_file("train.yaml")
    assert file.read_bytes() == NEW + b"mine: 1\n"
    done = files.revert_file("train.yaml", force=True)
    assert file.read_bytes() == OLD
    assert (Path(done.backup or "") / "train.yaml").read_bytes() == NEW + b"mine: 1\n"


def test_an_edit_between_two_writes_does_not_stand_in_the_way(file: Path) -> None:
    apply("train.yaml")
    file.write_bytes(NEW + b"mine: 1\n")
    apply("train.yaml", value=16)
    files.revert_file("train.yaml")
    assert file.read_bytes() == NEW + b"mine: 1\n"


def test_reverting_to_what_is_there_already_writes_nothing(file: Path) -> None:
    apply("train.yaml")
    file.write_bytes(OLD)
    assert files.revert_file("train.yaml", number=1).backup is None
    assert len(files.list_backups(file)) == 1


def test_a_file_that_was_deleted_comes_back(file: Path) -> None:
    apply("train.yaml")
    file.unlink()
    files.revert_file("train.yaml", force=True)
    assert file.read_bytes() == OLD


@pytest.mark.usefixtures("file")
def test_without_a_backup_there_is_nothing_to_put_back() -> None:
    with pytest.raises(WrongUse, match="no backup of it"):
        files.revert_file("train.yaml")


@pytest.mark.usefixtures("file")
def test_a_backup_that_does_not_exist_is_named() -> None:
    apply("train.yaml")
    with pytest.raises(UnknownName, match=r"no such backup. There are 1 \(20"):
        files.revert_file("train.yaml", number=7)


def test_a_damaged_backup_is_not_put_back(file: Path) -> None:
    done = apply("train.yaml")
    (Path(done.backups[0]) / "train.yaml").write_bytes(b"batch: 5\n")
    with pytest.raises(BrokenFile, match="checksum differs"):
        files.revert_file("train.yaml")
    assert file.read_bytes() == NEW


@pytest.mark.usefixtures("file")
def test_a_damaged_manifest_is_said() -> None:
    done = apply("train.yaml")
    (Path(done.backups[0]) / "manifest.json").write_bytes(b"{")
    with pytest.raises(BrokenFile, match="manifest cannot be read"):
        files.revert_file("train.yaml")


def test_a_backup_that_was_never_finished_does_not_count_and_its_number_is_not_taken(file: Path) -> None:
    (file.parent / ".trimtab" / "backups" / "1").mkdir(parents=True)
    apply("train.yaml")
    assert [list_backup.number for list_backup in files.list_backups(file)] == [2]


def test_a_write_that_was_killed_before_it_replaced_is_passed_over(file: Path) -> None:
    apply("train.yaml")
    (ready,) = files.prepare_files([FileChange(file="train.yaml", changes={("batch",): 16})])
    note = files.Backup(number=0, date="2030-01-01T00:00:00+0000")
    files._write_backup(file.parent, [ready], note, [])  # noqa: SLF001 - what is there at the moment of the kill
    files.revert_file("train.yaml")
    assert file.read_bytes() == OLD


# Rights, links and names


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_rights_are_kept_on_the_file_and_its_backup(file: Path, mode: int) -> None:
    file.chmod(mode)
    done = apply("train.yaml")
    assert stat.S_IMODE(file.stat().st_mode) == mode
    assert stat.S_IMODE((Path(done.backups[0]) / "train.yaml").stat().st_mode) == mode
    files.revert_file("train.yaml")
    assert stat.S_IMODE(file.stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_owner_is_kept(file: Path) -> None:
    os.chown(file, 12345, 54321)
    apply("train.yaml")
    assert (file.stat().st_uid, file.stat().st_gid) == (12345, 54321)


def test_a_link_is_followed_and_stays_a_link(file: Path) -> None:
    link = file.parent / "link.yaml"
    link.symlink_to("train.yaml")
    done = apply("link.yaml")
    assert link.is_symlink()
    assert file.read_bytes() == NEW
    assert done.files == ("link.yaml",)
    files.revert_file("link.yaml")
    assert file.read_bytes() == OLD


def test_hard_links_are_mentioned(file: Path) -> None:
    os.link(file, file.parent / "other.yaml")
    done = apply("train.yaml")
    assert "2 names on this disk" in done.said[0]
    assert (file.parent / "other.yaml").read_bytes() == OLD


def test_a_read_only_file_is_refused(file: Path) -> None:
    file.chmod(0o444)
    with pytest.raises(EnvironmentFault, match=r"the file is read-only. Nothing was changed"):
        apply("train.yaml")
    assert file.read_bytes() == OLD
    assert not (file.parent / ".trimtab").exists()


def test_a_read_only_folder_is_refused(file: Path) -> None:
    file.parent.chmod(0o555)
    try:
        with pytest.raises(EnvironmentFault, match=r"the folder .* is read-only"):
            apply("train.yaml")
    finally:
        file.parent.chmod(0o755)
    assert [path.name for path in file.parent.iterdir()] == ["train.yaml"]


def test_a_file_in_the_way_of_the_backups_is_said(file: Path) -> None:
    (file.parent / ".trimtab").write_bytes(b"")
    with pytest.raises(EnvironmentFault, match="folder for backups cannot be made"):
        apply("train.yaml")
    assert file.read_bytes() == OLD


def test_a_name_as_long_as_the_disk_allows(file: Path) -> None:
    long = file.with_name("x" * 250 + ".yaml")
    file.rename(long)
    apply(long.name)
    assert long.read_bytes() == NEW


def test_a_path_outside_is_fine_where_it_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = file.parent / "project"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert apply("../train.yaml").files == ("../train.yaml",)
    assert apply(file, value=16).files == (str(file),)


def test_a_link_that_leads_outside_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = file.parent / "project"
    inner.mkdir()
    (inner / "link.yaml").symlink_to("../train.yaml")
    monkeypatch.chdir(inner)
    with pytest.raises(
        WrongUse, match=r"leads to .*train.yaml, outside of the current folder. Name .* itself"
    ):
        apply("link.yaml")
    assert file.read_bytes() == OLD


def test_a_file_that_was_found_and_not_named_must_lie_inside(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = file.parent / "project"
    inner.mkdir()
    monkeypatch.chdir(inner)
    wanted = [FileChange(file=str(file), changes=CHANGE, named=False)]
    with pytest.raises(WrongUse, match="found, not named"):
        files.prepare_files(wanted)
    assert len(files.prepare_files(wanted, roots=[file.parent])) == 1


def test_a_file_that_changed_while_the_user_looked_is_not_written(file: Path) -> None:
    ready = files.prepare_files([FileChange(file="train.yaml", changes=CHANGE)])
    file.write_bytes(b"batch: 5\n")
    with pytest.raises(WrongUse, match="changed since it was read"):
        files.write_files(ready)
    assert file.read_bytes() == b"batch: 5\n"


# What cannot be a config


def test_a_hundred_megabytes_are_refused(file: Path) -> None:
    with file.open("r+b") as handle:
        handle.truncate(100 * 10**6)
    with pytest.raises(WrongUse, match=r"it has 95.4 MiB; a config has at most 19.1 MiB"):
        apply("train.yaml")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"batch: 4\0", "it is binary: byte 9 is zero"),
        ("batch: 4".encode("utf-16"), "it is UTF-16, not UTF-8"),
        ("name: \u00e9\nbatch: '\u00e9'".encode("latin-1"), r"train.yaml:1:7: byte 0xe9 is not UTF-8"),
        (b"\x89PNG\r\n\x1a\n\0\0", "binary"),
    ],
)
def test_bytes_that_are_no_text_are_refused(file: Path, data: bytes, found: str) -> None:
    file.write_bytes(data)
    with pytest.raises(BrokenFile, match=found):
        apply("train.yaml")
    assert file.read_bytes() == data


def test_what_is_no_file_is_refused(file: Path) -> None:
    os.mkfifo(file.parent / "pipe.yaml")
    (file.parent / "conf.yaml").mkdir()
    for name, found in (("no.yaml", "no such file"), ("conf.yaml", "a folder"), ("pipe.yaml", "no ordinary")):
        with pytest.raises(WrongUse, match=found):
            apply(name)


# Trouble in the middle


def test_when_the_second_replace_fails_the_first_is_put_back(file: Path) -> None:
    other = file.parent / "z.yaml"
    other.write_bytes(OLD)

    def replace(source: Path, target: Path) -> None:
        if target.name == "z.yaml":
            raise OSError(5, "Input/output error")
        source.replace(target)

    with pytest.raises(
        EnvironmentFault, match=r"cannot be replaced: Input/output error. Nothing was changed"
    ):
        apply("train.yaml", "z.yaml", replace=replace)
    assert (file.read_bytes(), other.read_bytes()) == (OLD, OLD)
    assert left_behind(file.parent) == []
    assert files.list_backups(file) == []


def test_no_room_for_the_new_text_changes_nothing(file: Path) -> None:
    """A limit on the size of files stands in for a full disk: the write fails half way."""
    large = OLD + b"# " + b"x" * 100_000 + b"\n"
    file.write_bytes(large)
    ready = files.prepare_files([FileChange(file="train.yaml", changes=CHANGE)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(EnvironmentFault, match=r"cannot be written: File too large. Nothing was changed"):
            files.write_files(ready)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.read_bytes() == large
    assert left_behind(file.parent) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        file = disk / "a.yaml"
        file.write_bytes(OLD + b"# " + b"x" * 40_000 + b"\n")
        before = file.read_bytes()
        with pytest.raises(
            EnvironmentFault, match=r"No space left on device. Nothing was changed. Free some"
        ):
            apply(file)
        assert file.read_bytes() == before
        assert left_behind(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_two_at_once_take_turns(file: Path) -> None:
    with files.lock_folders([file.parent]):
        start = time.monotonic()
        busy = pytest.raises(EnvironmentFault, match=f"process {os.getpid()}, is writing here")
        with busy, files.lock_folders([file.parent], patience_s=0.1):
            pass
        assert time.monotonic() - start >= 0.1
    with files.lock_folders([file.parent], patience_s=0):
        pass


def test_the_lock_of_a_process_that_died_does_not_hold(file: Path) -> None:
    script = (
        "import os, sys, signal, pathlib\n"
        "from trimtab.configs import files\n"
        "with files.lock_folders([pathlib.Path(sys.argv[1])]):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(file.parent)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (file.parent / ".trimtab" / "lock").exists()
    assert apply("train.yaml").files


def test_what_a_killed_process_left_is_swept_away(file: Path) -> None:
    stale = file.parent / ".trimtab-0123456789ab-99999999.tmp"
    stale.write_bytes(b"half")
    apply("train.yaml")
    assert not stale.exists()


def _child(file: Path, values: list[int]) -> None:
    """What a child process does until it is killed: write again and again."""
    with contextlib.suppress(TrimtabError):
        for value in values:
            apply(file, value=value)


def killed(file: Path, tries: int) -> int:
    """Kill a writer at `tries` different moments; how many of the kills came before it was done."""
    whole = {OLD} | {OLD.replace(b"4", str(value).encode()) for value in range(10, 1000)}
    random = Random(7)  # noqa: S311 - moments, not secrets
    early = 0
    for number in range(tries):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads; ours touch nothing
            pid = os.fork()
        if pid == 0:
            try:
                _child(file, [10 + (number + step) % 20 for step in range(20)])
            finally:
                os._exit(0)
        time.sleep(random.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        early += os.waitpid(pid, 0)[1] == signal.SIGKILL
        assert file.read_bytes() in whole
        for list_backup in files.list_backups(file):
            assert files.read_backup(file, list_backup) in whole
        if number % 20 == 19:
            apply(file, value=500 + number)  # the next one finds everything in order
            assert left_behind(file.parent) == []
    return early


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_file_whole(file: Path) -> None:
    assert killed(file, 60) > 30


@pytest.mark.slow
def test_two_hundred_kills_leave_the_old_or_the_new_file_whole(file: Path) -> None:
    assert killed(file, 200) > 100
