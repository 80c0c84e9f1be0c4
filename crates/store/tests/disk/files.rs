//! Files that are refused, each with a reason that says what to do, and without touching what is
//! there.

use crate::world::{PAGE, directory};
use forebay_store::disk::{DiskError, DiskFile, DiskLink, DiskOptions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The error of an attempt that has to fail, and its message.
fn refused(attempt: Result<DiskFile, DiskError>) -> (DiskError, String) {
    let error = attempt.expect_err("must be refused");
    let message = error.to_string();
    (error, message)
}

#[test]
fn a_created_file_has_all_its_bytes_set_aside_and_opens_again() {
    let directory = directory();
    let path = directory.path().join("kv");
    let created = DiskFile::create(&path, 1 << 20).unwrap();
    assert_eq!(created.bytes(), 1 << 20);
    assert!(created.block_bytes() >= 512 && PAGE.is_multiple_of(created.block_bytes()));
    drop(created);
    let metadata = std::fs::metadata(&path).unwrap();
    assert!(metadata.blocks() * 512 >= 1 << 20, "only {} bytes are on disk", metadata.blocks() * 512);
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "others could read KV");
    assert_eq!(DiskFile::open(&path).unwrap().bytes(), 1 << 20);
}

#[test]
fn a_file_with_holes_gets_them_set_aside_when_opened() {
    let directory = directory();
    let path = directory.path().join("kv");
    std::fs::write(&path, vec![7; PAGE as usize]).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    let held_bytes = || std::fs::metadata(&path).unwrap().blocks() * 512;
    DiskFile::open_with_holes(&path).unwrap();
    assert!(held_bytes() < 1 << 20, "the owner said that they stay");
    DiskFile::open(&path).unwrap();
    assert!(held_bytes() >= 1 << 20);
    assert_eq!(std::fs::read(&path).unwrap()[..PAGE as usize], vec![7; PAGE as usize]);
}

#[test]
fn a_missing_directory_is_named() {
    let directory = directory();
    let path = directory.path().join("no/such/kv");
    let (error, message) = refused(DiskFile::create(&path, PAGE));
    assert!(matches!(error, DiskError::MissingDirectory { .. }), "{error:?}");
    assert!(message.contains("no/such/kv") && message.contains("create it first"), "{message}");
    assert!(matches!(refused(DiskFile::open(&path)).0, DiskError::MissingDirectory { .. }));
    let missing = directory.path().join("kv");
    assert!(matches!(refused(DiskFile::open(&missing)).0, DiskError::Missing { .. }));
}

#[test]
fn an_existing_file_is_not_created_over() {
    let directory = directory();
    let path = directory.path().join("kv");
    std::fs::write(&path, b"precious").unwrap();
    assert!(matches!(refused(DiskFile::create(&path, PAGE)).0, DiskError::Exists { .. }));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn what_does_not_fit_is_refused_and_leaves_nothing_behind() {
    let directory = directory();
    let path = directory.path().join("kv");
    let (error, message) = refused(DiskFile::create(&path, 1 << 60));
    let DiskError::DoesNotFit { bytes, available_bytes, .. } = error else { panic!("{error:?}") };
    assert!(bytes == 1 << 60 && available_bytes < bytes);
    assert!(message.contains(&available_bytes.to_string()), "{message}");
    assert!(!path.exists());
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let directory = directory();
    for bytes in [0, 1, 4097, u64::MAX, u64::MAX - 4095] {
        let path = directory.path().join("kv");
        assert!(matches!(refused(DiskFile::create(&path, bytes)).0, DiskError::Size { .. }), "{bytes}");
        assert!(!path.exists());
    }
    for bytes in [0, 100, 4097] {
        let path = directory.path().join("odd");
        std::fs::write(&path, vec![1; bytes]).unwrap();
        assert!(matches!(refused(DiskFile::open(&path)).0, DiskError::Size { .. }), "{bytes}");
        assert_eq!(std::fs::read(&path).unwrap().len(), bytes);
    }
}

#[test]
fn what_is_not_a_file_is_refused() {
    let directory = directory();
    for path in [directory.path(), Path::new("/dev/null")] {
        let (error, message) = refused(DiskFile::open(path));
        assert!(matches!(error, DiskError::NotAFile { .. }), "{error:?}");
        assert!(message.contains("neither a regular file nor a block device"));
    }
}

#[test]
fn a_read_only_place_is_refused() {
    // /proc is read-only for everybody, root included.
    let (error, _) = refused(DiskFile::open("/proc/version"));
    assert!(!matches!(error, DiskError::System { .. }), "{error:?}");
    let directory = directory();
    let path = directory.path().join("kv");
    DiskFile::create(&path, PAGE).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
    match DiskFile::open(&path) {
        Err(DiskError::ReadOnly { .. }) => {}
        Ok(_) => testkit::skipped("this user may write to read-only files"),
        Err(error) => panic!("{error:?}"),
    }
}

/// A file system without direct I/O, unmounted when dropped. Needs root.
struct HugePages<'a>(&'a Path);

impl HugePages<'_> {
    fn at(directory: &Path) -> Option<HugePages<'_>> {
        let output = Command::new("mount")
            .args(["-t", "hugetlbfs", "-o", "size=8M", "none"])
            .arg(directory)
            .output()
            .ok()?;
        output.status.success().then_some(HugePages(directory))
    }
}

impl Drop for HugePages<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[test]
fn a_file_that_has_no_direct_io_is_not_left_behind() {
    let directory = directory();
    let Some(mounted) = HugePages::at(directory.path()) else {
        return testkit::skipped("this user may not mount");
    };
    let path = mounted.0.join("kv");
    for _ in 0..2 {
        let (error, _) = refused(DiskFile::create(&path, PAGE));
        assert!(matches!(error, DiskError::NoDirectIo { .. }), "{error:?}");
    }
    assert!(!path.exists());
}

/// A loop device over a file, detached when dropped. Needs root.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn over(file: &Path) -> Option<LoopDevice> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let device = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| LoopDevice(device.trim().into()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn a_raw_partition_is_used_in_whole_pages_and_by_one_owner() {
    let directory = directory();
    let image = directory.path().join("image");
    // Three blocks of 512 bytes more than whole pages.
    std::fs::write(&image, vec![0; (1 << 20) + 3 * 512]).unwrap();
    let Some(device) = LoopDevice::over(&image) else {
        return testkit::skipped("no loop devices for this user");
    };
    let file = DiskFile::open(&device.0).unwrap();
    assert_eq!((file.bytes(), file.block_bytes()), (1 << 20, 512));
    let (error, message) = refused(DiskFile::open(&device.0));
    assert!(matches!(error, DiskError::InUse { .. }), "{error:?}");
    assert!(message.contains("in use"), "{message}");
    drop(file);
    // What a link had registered with the system must not keep the device busy after the link's
    // end.
    for _ in 0..5 {
        let file = DiskFile::open(&device.0).unwrap();
        let link = DiskLink::open(file, DiskOptions::default()).unwrap();
        drop(link);
    }
    DiskFile::open(&device.0).unwrap();
}
