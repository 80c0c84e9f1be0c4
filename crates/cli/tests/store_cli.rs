//! `forebay store` as its users run it: logs are made, looked at, checked, emptied and rebuilt, and
//! what cannot be is refused with the reason while what is there stays as it is.
#![allow(clippy::unwrap_used)]

use forebay_kv::ChunkId;
use forebay_store::TenantId;
use forebay_store::log::{ChunkInLog, DiskTierConfig, Inspection, Offline, PAGE_BYTES, crc32c, inspect};
use forebay_store::ssd::FileMedium;
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

fn store(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_forebay")).arg("store").args(args).output().unwrap()
}

/// What a command that succeeds prints.
fn ok(args: &[&str]) -> String {
    let ran = store(args);
    assert!(ran.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

/// What a command that fails prints: on stdout, and why.
fn refused(args: &[&str]) -> (String, String) {
    let ran = store(args);
    assert!(!ran.status.success() && ran.status.code().is_some(), "{args:?} succeeded or crashed");
    (String::from_utf8(ran.stdout).unwrap(), String::from_utf8(ran.stderr).unwrap())
}

/// A directory and the path of a log in it, made by the command; nothing, loudly, where there is no
/// direct I/O.
fn made() -> Option<(TempDir, PathBuf)> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let ran = store(&["init", path.to_str().unwrap(), "--size", "16M", "--segment", "1M"]);
    let told = String::from_utf8_lossy(&ran.stderr);
    if told.contains("direct I/O") {
        testkit::skipped(format_args!("{told}"));
        return None;
    }
    assert!(ran.status.success(), "{told}");
    Some((dir, path))
}

/// The same with 30 chunks, of tenants 0, 1 and 2 in turn.
fn filled() -> Option<(TempDir, PathBuf)> {
    let (dir, path) = made()?;
    let medium = FileMedium::open(&path).unwrap();
    let (mut log, _) = Offline::open(&DiskTierConfig::default(), &medium).unwrap();
    for number in 0..30 {
        let layers = [vec![number; 10_000], vec![number ^ 0xff; 77]];
        log.store(TenantId(u16::from(number % 3)), &ChunkId::from_bytes([number; 32]), None, &layers)
            .unwrap();
    }
    log.close().unwrap();
    Some((dir, path))
}

fn look(path: &Path) -> (Inspection, Vec<ChunkInLog>) {
    let mut chunks = Vec::new();
    let medium = FileMedium::open(path).unwrap();
    (inspect(&medium, |chunk| chunks.push(chunk.clone())).unwrap(), chunks)
}

fn overwrite(path: &Path, at: u64, with: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(with, at).unwrap();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_new_log_is_empty_sound_and_takes_the_space_that_was_asked_for() {
    let Some((_dir, path)) = made() else { return };
    let stat: Value = serde_json::from_str(&ok(&["stat", text(&path), "--json"])).unwrap();
    assert_eq!((&stat["chunks"], &stat["clean"]), (&Value::from(0), &Value::from(true)));
    assert_eq!(stat["file_bytes"], 16 << 20);
    let held = stat["held_bytes"].as_u64().unwrap();
    assert!((16 << 20..(16 << 20) * 101 / 100).contains(&held), "{held}");
    assert!(ok(&["verify", text(&path)]).contains("0 chunks are sound"));
}

#[test]
fn stat_and_verify_say_what_is_there_and_change_nothing() {
    let Some((_dir, path)) = filled() else { return };
    let before = std::fs::read(&path).unwrap();
    let stat: Value = serde_json::from_str(&ok(&["stat", text(&path), "--json"])).unwrap();
    assert_eq!(stat["chunks"], 30);
    assert_eq!(stat["tenants"][2]["bytes"], 10 * 10_077);
    assert!(ok(&["stat", text(&path)]).contains("chunks      30"));
    assert!(ok(&["verify", text(&path)]).contains("30 chunks are sound"));
    assert!(std::fs::read(&path).unwrap() == before);
}

#[test]
fn a_damaged_chunk_is_named_by_verify_and_dropped_by_scrub() {
    let Some((_dir, path)) = filled() else { return };
    let bad = look(&path).1[4].clone();
    overwrite(&path, bad.slot_at + 5000, &[0xee]);
    let before = std::fs::read(&path).unwrap();
    let (table, told) = refused(&["verify", text(&path)]);
    let id: String = bad.copy.id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(table.contains("29 chunks are sound") && table.contains(&id), "{table}");
    assert!(told.contains("forebay store scrub"), "{told}");
    assert!(std::fs::read(&path).unwrap() == before, "verify changes nothing");
    assert!(ok(&["scrub", text(&path)]).contains("1 chunks were dropped"));
    assert!(ok(&["verify", text(&path)]).contains("29 chunks are sound"));
}

#[test]
fn a_purged_tenant_leaves_no_bytes_and_others_stay() {
    let Some((_dir, path)) = filled() else { return };
    assert!(ok(&["purge", text(&path), "--tenant", "1"]).contains("10 chunks of tenant 1 are gone"));
    let tenants: Vec<u16> = look(&path).0.tenants.keys().map(|tenant| tenant.0).collect();
    assert_eq!(tenants, [0, 2]);
    let image = std::fs::read(&path).unwrap();
    let is_of_tenant_1 =
        |page: &[u8]| (0..30u8).any(|number| number % 3 == 1 && page == [number; PAGE_BYTES]);
    assert!(!image.chunks(PAGE_BYTES).any(is_of_tenant_1));
    assert!(ok(&["verify", text(&path)]).contains("20 chunks are sound"));
}

#[test]
fn a_log_that_lost_its_checkpoints_is_recovered_and_one_that_did_not_is_left_alone() {
    let Some((_dir, path)) = filled() else { return };
    let before = std::fs::read(&path).unwrap();
    assert!(refused(&["recover", text(&path)]).1.contains("nothing is to be rebuilt"));
    assert!(std::fs::read(&path).unwrap() == before);
    for area in look(&path).0.layout.checkpoints {
        overwrite(&path, area.offset, &[0; PAGE_BYTES]);
    }
    assert!(refused(&["stat", text(&path)]).1.contains("forebay store recover"));
    let lost = std::fs::read(&path).unwrap();
    for recover in [&["recover", text(&path)][..], &["recover", "--unreadable", text(&path)]] {
        std::fs::write(&path, &lost).unwrap();
        assert!(ok(recover).contains(" journal blocks, 30 chunks"), "{recover:?}");
        assert!(ok(&["verify", text(&path)]).contains("30 chunks are sound"));
    }
}

#[test]
fn a_log_of_which_everything_can_be_read_has_nothing_to_give_up() {
    let Some((_dir, path)) = filled() else { return };
    let before = std::fs::read(&path).unwrap();
    let told = ok(&["recover", "--unreadable", text(&path)]);
    assert!(told.contains("0 pages were given up; the log opens, with 30 chunks"), "{told}");
    assert!(std::fs::read(&path).unwrap() == before);
}

#[test]
fn what_is_there_is_destroyed_only_on_request() {
    let Some((_dir, path)) = filled() else { return };
    let before = std::fs::read(&path).unwrap();
    let init = ["init", text(&path), "--size", "16M", "--segment", "1M"];
    assert!(refused(&init).1.contains("--force"));
    assert!(std::fs::read(&path).unwrap() == before);
    ok(&[&init[..], &["--force"]].concat());
    assert_eq!(look(&path).0.recovered.chunks, 0);
}

#[test]
fn sizes_and_places_that_cannot_be_are_refused_and_nothing_is_left_behind() {
    let Some((dir, _)) = made() else { return };
    let path = dir.path().join("other");
    let with_size = |size: &str, segment: &str| {
        let (_, told) = refused(&["init", text(&path), "--size", size, "--segment", segment]);
        assert!(!path.exists(), "{size}");
        told
    };
    assert!(with_size("100GB", "1M").contains("K, M, G or T"));
    assert!(with_size("1M", "1M").contains("change the size of the file or of the segments"));
    assert!(with_size("16M", "1000").contains("segment_bytes is 1000"));
    assert!(with_size("16777217", "1M").contains("multiple of 4096"));
    assert!(with_size("500T", "1G").contains("do not fit"));
    let nowhere = dir.path().join("missing").join("log");
    let (_, told) = refused(&["init", text(&nowhere), "--size", "16M", "--segment", "1M"]);
    assert!(told.contains("the directory does not exist"), "{told}");
    for command in ["stat", "verify", "scrub", "recover"] {
        assert!(refused(&[command, text(&path)]).1.contains("no such file"), "{command}");
    }
    assert!(refused(&["stat", text(dir.path())]).1.contains(text(dir.path())));
}

#[test]
fn files_that_are_no_log_of_this_version_are_refused_by_every_command_and_stay() {
    let Some((_dir, path)) = filled() else { return };
    let sound = std::fs::read(&path).unwrap();
    let mut newer = sound[..PAGE_BYTES].to_vec();
    newer[12] = 2;
    let crc = crc32c(&newer[12..]).to_le_bytes();
    newer[8..12].copy_from_slice(&crc);
    let foreign = vec![b'#'; sound.len()];
    let cut = sound[..4 << 20].to_vec();
    let newer = [&newer, &sound[PAGE_BYTES..]].concat();
    // Some end before the places where a log says what it is.
    let (short, empty, stump) = (foreign[..1000].to_vec(), Vec::new(), sound[..PAGE_BYTES].to_vec());
    for (image, reason) in [
        (newer, "version 2"),
        (foreign, "not a Forebay log"),
        (short, "not a Forebay log"),
        (empty, "not a Forebay log"),
        (cut, "it was cut"),
        (stump, "it was cut"),
    ] {
        std::fs::write(&path, &image).unwrap();
        for command in [
            &["stat"][..],
            &["verify"],
            &["scrub"],
            &["purge", "--tenant", "1"],
            &["recover"],
            &["recover", "--unreadable"],
        ] {
            let (_, told) = refused(&[&command[..1], &[text(&path)], &command[1..]].concat());
            assert!(told.contains(reason) && told.contains(text(&path)), "{command:?}: {told}");
        }
        assert!(std::fs::read(&path).unwrap() == image, "{reason}");
    }
}

#[test]
fn a_log_that_somebody_has_is_refused_to_all_others() {
    let Some((_dir, path)) = filled() else { return };
    let owner = FileMedium::open(&path).unwrap();
    let before = std::fs::read(&path).unwrap();
    let init = ["init", text(&path), "--size", "16M", "--segment", "1M", "--force"];
    let give_up = ["recover", "--unreadable", text(&path)];
    for command in
        [&["stat", text(&path)][..], &["scrub", text(&path)], &["recover", text(&path)], &give_up, &init]
    {
        let (_, told) = refused(command);
        assert!(told.contains("has this log") && told.contains(text(&path)), "{command:?}: {told}");
    }
    assert!(std::fs::read(&path).unwrap() == before);
    drop(owner);
    ok(&["stat", text(&path)]);
}

#[test]
fn a_file_that_may_not_be_written_is_refused() {
    let Some((_dir, path)) = filled() else { return };
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    if File::options().write(true).open(&path).is_ok() {
        testkit::skipped("this user may write whatever the permissions say");
        return;
    }
    assert!(refused(&["scrub", text(&path)]).1.contains("cannot be written to"));
}

#[test]
fn a_log_whose_making_was_killed_is_made_by_the_next_attempt() {
    let Some((dir, path)) = made() else { return };
    std::fs::remove_file(&path).unwrap();
    // The system kills whoever makes a file longer than this.
    let killed = Command::new("sh")
        .args(["-c", "ulimit -c 0; ulimit -f 1024; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_forebay")])
        .args(["store", "init", text(&path), "--size", "16M", "--segment", "1M"])
        .output()
        .unwrap();
    assert_eq!(killed.status.code(), None, "{}", String::from_utf8_lossy(&killed.stderr));
    assert!(!path.exists(), "half a log has no name");
    ok(&["init", text(&path), "--size", "16M", "--segment", "1M"]);
    ok(&["verify", text(&path)]);
    let left: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["log"], "and nothing beside it");
}

#[test]
fn a_log_behind_a_link_is_made_where_the_link_leads() {
    let Some((dir, path)) = filled() else { return };
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("log", &link).unwrap();
    let init = ["init", text(&link), "--size", "16M", "--segment", "1M"];
    assert!(refused(&init).1.contains("exists already"));
    ok(&[&init[..], &["--force"]].concat());
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink(), "the link stays");
    assert_eq!(look(&path).0.recovered.chunks, 0, "the log that it leads to is new");
    // A link to a disk that is not mounted.
    std::fs::remove_file(&path).unwrap();
    let (_, told) = refused(&init);
    assert!(told.contains("is a link to log, which is not there"), "{told}");
    assert!(!path.exists());
}

#[test]
fn stat_and_verify_need_no_right_to_write() {
    use std::os::unix::process::CommandExt;
    let Some((dir, path)) = filled() else { return };
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    let as_anybody = |command: &str| {
        let mut forebay = Command::new(env!("CARGO_BIN_EXE_forebay"));
        if File::options().write(true).open(&path).is_ok() {
            // This user may write whatever the permissions say; nobody may not.
            forebay.uid(65_534);
        }
        forebay.args(["store", command, text(&path)]).output()
    };
    for command in ["stat", "verify"] {
        let ran = match as_anybody(command) {
            Err(error) => return testkit::skipped(format_args!("nobody may not run forebay here: {error}")),
            Ok(ran) => ran,
        };
        let told = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(ran.status.success(), "{command}: {told}");
        assert!(String::from_utf8_lossy(&ran.stdout).contains("30"), "{command}");
    }
    let told = String::from_utf8_lossy(&as_anybody("scrub").unwrap().stderr).into_owned();
    assert!(told.contains("cannot be written to"), "{told}");
}
