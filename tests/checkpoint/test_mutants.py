"""Every rule of the checkpoints on disk has a test that notices when it is taken out, as in tests/train/test_mutants.py."""

from __future__ import annotations

from pathlib import Path

from tests.support.changes import compares, gets, instead_of, never, skips, without
from tests.support.mutants import Mutant, copy, each, failing, mutants_in, named_in, unnoticed

__all__ = ["copy"]  # the fixture


mutant = named_in("elastirun/checkpoint", "tests/checkpoint")
quoted = mutants_in("elastirun/checkpoint", "tests/checkpoint")
LATER = "what_a_later_round_has_claimed_an_earlier_one_cannot_change"
ORDER = "the_order_of_the_calls_survives_a_loss_of_power"
RECORD, NAMES = "write_file(os.path.join(staged, COMMIT), memoryview(encode(commit)))\n", "sync_folder(staged)\n"
AT = " " * 16
MUTANTS = (
    # the fence
    mutant(
        "a claim renames the staging folders of earlier rounds away",
        "backends.folder:Folder._sweep",
        gets("claims", "[mine] if mine in self._claims(STAGING) else []"),
        seen_by="directory::a_publisher_that_freezes_before_its_rename_publishes_nothing",
    ),
    mutant(
        "a staging folder is made by its claim only",
        "backends.folder:Folder.write",
        instead_of("mkdir", "os.makedirs(folder)"),
        seen_by=f"directory::{LATER}",
    ),
    mutant(
        "an earlier round does not claim what a later one has",
        "backends.folder:Folder._sweep",
        gets("later", "list[str]()"),
        seen_by=f"directory::{LATER}",
    ),
    mutant(
        "a claim looks again when it has made its folder",
        "backends.folder:Folder.take",
        gets("claims", "[claim]"),
        seen_by="directory::of_claims_at_the_same_time_one_counts_at_most",
    ),
    mutant(
        "what was staged cannot be renamed by its former folder",
        "backends.folder:Folder._rename_away",
        instead_of("f'dead-{name}'", "name"),
        seen_by="directory::a_client_that_still_knows_the_staging_folder_publishes_nothing",
    ),
    mutant(
        "deletion goes through the staging folder",
        "backends.folder:Folder.delete",
        instead_of("os.path.join(staging, f'dead-{one.name}')", "f'.dead-{one.name}'"),
        seen_by=f"directory::{LATER}",
    ),
    mutant(
        "whether the round is current is asked",
        "directory:Directory.publish.check",
        instead_of("check_current", "(lambda *_: None)(current, f'{self.path}: step {commit.step} is not published')"),
        seen_by="directory::nothing_is_published_once_the_round_is_over",
    ),
    mutant(
        "a round that is over claims nothing",
        "directory:Directory.claim",
        without("check_current"),
        seen_by="directory::nothing_is_published_once_the_round_is_over",
    ),
    mutant(
        "one process writes a directory without an agent",
        "backends.folder:Folder._lock",
        instead_of("LOCK_EX", "fcntl.LOCK_SH"),
        seen_by="directory::a_directory_that_another_process_writes_is_refused",
    ),
    mutant(
        "an entry of the log is put where none is",
        "backends.objects:ObjectStore._put",
        instead_of("_pipe", "self._pipe(path, data)"),
        seen_by="objects::a_publisher_that_freezes_before_its_put_publishes_nothing[memory]",
    ),
    mutant(
        "who is not the last to claim deletes nothing",
        "backends.objects:ObjectStore.clean",
        without("_check_holder"),
        seen_by="backends::an_earlier_round_that_cleans_late_deletes_nothing_of_a_later_one[memory]",
    ),
    mutant(
        "the log has no gaps",
        "backends.objects:ObjectStore.publish",
        instead_of("_put", "self._put(commit.sequence, encode(commit))"),
        seen_by="objects::a_gap_in_the_numbers_of_the_trainer_is_none_in_the_log[memory]",
    ),
    # the order in which the disk has the files, so that a loss of power leaves whole checkpoints
    mutant(
        "files are durable before the record, and the record before the rename",
        "backends.files:write_file",
        without("fsync"),
        seen_by=f"interrupted::{ORDER}",
    ),
    quoted(
        "the names are durable before the rename",
        *("backends/folder", "                sync_folder(staged)\n", ""),
        *("interrupted", ORDER),
    ),
    mutant(
        "the rename is durable before old checkpoints are deleted",
        "backends.folder:Folder.publish",
        skips("self.path"),
        seen_by=f"interrupted::{ORDER}",
    ),
    quoted(
        "the record comes last",
        *("backends/folder", f"{AT}{RECORD}{AT}{NAMES}", f"{AT}{NAMES}{AT}{RECORD}"),
        *("interrupted", ORDER),
    ),
    # which checkpoint counts, and which is deleted
    mutant(
        "the newest is the one published last",
        "claims:newest_first",
        gets("key", "lambda one: (one.commit.step if one.commit else -1, one.name)"),
        seen_by="directory::newest_is_what_was_published_last_not_the_highest_step",
    ),
    mutant(
        "one checkpoint remains",
        "claims:outdated",
        instead_of("max", "max(keep, 0)"),
        seen_by="directory::the_newest_remain",
    ),
    mutant(
        "a file of the size and other bytes is damaged",
        "record:matches",
        instead_of("digest.hexdigest() == expected.sha256", "digest.hexdigest()"),
        seen_by="directory::a_damaged_file_is_named[flipped]",
    ),
    mutant(
        "a quick look finds changed bytes as well",
        "record:matches",
        instead_of("crc32 == expected.crc32", "True"),
        seen_by="directory::a_damaged_file_is_named[flipped]",
    ),
    mutant(
        "a read error is no damage for ever",
        "directory:Directory._check",
        instead_of("Damage(name, f'cannot be read: {_reason(error)}', lasting=False)", "Damage(name, f'cannot be read: {_reason(error)}')"),
        seen_by="directory::a_file_that_cannot_be_read_now_is_no_lasting_damage",
    ),
    mutant(
        "a file that no rank reported is not published",
        "directory:Directory.publish.check",
        instead_of("discard", "(lambda *_: None)(claim, commit.step, sizes.keys() - commit.files.keys())"),
        seen_by="directory::what_no_rank_has_reported_is_not_published",
    ),
    mutant(
        "chunks lie within their tensor",
        "tensors:_chunk",
        never("within"),
        seen_by="command::a_tensor_that_is_out_of_range_is_refused",
    ),
    mutant(
        "chunks do not overlap",
        "tensors:check_chunks",
        never("overlapping"),
        seen_by="command::a_tensor_that_is_out_of_range_is_refused",
    ),
    # images and the writer
    mutant(
        "an image that changes is not complete",
        "image:Image.begin",
        without("_COMPLETE.pack_into"),
        seen_by="image::an_image_is_complete_from_its_finish_to_the_next_begin",
    ),
    mutant(
        "memory that can shrink is no image",
        "image:Image.of",
        instead_of("fcntl.fcntl(fd, linux.F_GET_SEALS) & _SEALS == _SEALS", "True"),
        seen_by="image::memory_that_could_be_cut_off_is_no_image",
    ),
    mutant(
        "an image that changed while it was written does not count",
        "writer:_write",
        compares("is", "image"),
        seen_by="writer::an_image_that_changes_while_it_is_written_does_not_count",
    ),
    mutant(
        "a rank whose write failed leaves no files",
        "writer:_write",
        without("discard"),
        seen_by="writer::a_write_that_fails_leaves_nothing_of_this_rank",
    ),
)


@each(MUTANTS)
def test_a_rule_that_is_taken_out_is_missed(copy: Path, one: Mutant) -> None:
    assert unnoticed(copy, one) == ""


def test_as_long_as_no_rule_is_taken_out_the_same_tests_pass(copy: Path) -> None:
    assert failing(copy, MUTANTS) == ""
