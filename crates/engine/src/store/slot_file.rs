//! The file that slots lie in: made anew, locked, all of its space reserved, removed at the end.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use super::format::FILE_HEADER_BYTES;
use super::transfer::SlotIo;

/// How every spill file begins, so that no other file is overwritten by mistake.
const FILE_MAGIC: [u8; 16] = *b"REEF SPILL FILE\n";

/// Why a spill store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum SpillOpenError {
    /// Too small or too large.
    #[error("spill size {file_bytes} bytes: {reason}")]
    Size {
        /// Bytes of the file.
        file_bytes: u64,
        /// What is possible.
        reason: String,
    },
    /// There is something else at the path.
    #[error("{path} is not a spill file: name another path or remove it")]
    Foreign {
        /// The path.
        path: String,
    },
    /// Another process uses the file.
    #[error("spill file {path} is in use by another process: name another path")]
    InUse {
        /// The path.
        path: String,
    },
    /// The disk has not so much space.
    #[error("spill file {path}: no space for {file_bytes} bytes ({source}): choose a smaller size")]
    NoSpace {
        /// The path.
        path: String,
        /// Bytes of the file.
        file_bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The system refused.
    #[error("spill file {path}: {source}")]
    System {
        /// The path.
        path: String,
        /// What the system said.
        source: io::Error,
    },
}

/// An open spill file; removes it on drop.
#[derive(Debug)]
pub(super) struct SlotFile {
    file: File,
    path: PathBuf,
}

impl SlotFile {
    /// Makes the file anew with `file_bytes` bytes that the disk really has, readable by its owner only.
    /// What an older one held is gone.
    pub(super) fn create(path: &Path, file_bytes: u64) -> Result<SlotFile, SpillOpenError> {
        let system = |source| SpillOpenError::System { path: path.display().to_string(), source };
        // Opening a pipe would wait for its other end.
        if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(SpillOpenError::Foreign { path: path.display().to_string() });
        }
        let file = open_private(path).map_err(system)?;
        match file.try_lock() {
            Ok(()) => {}
            // File systems without locks: as good as it gets.
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(system(error)),
            Err(TryLockError::WouldBlock) => {
                return Err(SpillOpenError::InUse { path: path.display().to_string() });
            }
        }
        if !is_spill_file(&file).map_err(system)? {
            return Err(SpillOpenError::Foreign { path: path.display().to_string() });
        }
        // From here on it is ours: removed on any failure.
        let mut made = SlotFile { file, path: path.to_owned() };
        made.begin().map_err(system)?;
        reserve(&made.file, file_bytes).map_err(|source| {
            let path = path.display().to_string();
            match source.kind() {
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                    SpillOpenError::NoSpace { path, file_bytes, source }
                }
                _ => SpillOpenError::System { path, source },
            }
        })?;
        Ok(made)
    }

    /// Empties the file and writes its first bytes: a process killed later leaves a file that the next
    /// one knows as its own.
    fn begin(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        make_private(&self.file)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&FILE_MAGIC)?;
        self.file.set_len(FILE_HEADER_BYTES)
    }
}

/// A file as it is, for a test.
#[cfg(test)]
pub(super) fn open_unchecked(path: &Path) -> io::Result<SlotFile> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    // No such path: nothing is removed.
    Ok(SlotFile { file, path: PathBuf::new() })
}

impl SlotIo for SlotFile {
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        self.file.seek(SeekFrom::Start(offset))?;
        self.file.read(bytes)
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        self.file.seek(SeekFrom::Start(offset))?;
        self.file.write(bytes)
    }
}

impl Drop for SlotFile {
    fn drop(&mut self) {
        // Somebody may have put another file there meanwhile.
        if is_same_file(&self.file, &self.path) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Whether the file is empty or begins as a spill file does.
fn is_spill_file(mut file: &File) -> io::Result<bool> {
    let mut begin = Vec::with_capacity(FILE_MAGIC.len());
    file.seek(SeekFrom::Start(0))?;
    file.take(FILE_MAGIC.len() as u64).read_to_end(&mut begin)?;
    Ok(begin.is_empty() || begin == FILE_MAGIC)
}

fn open_private(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// A file that was there before may have had other permissions.
fn make_private(_file: &File) -> io::Result<()> {
    #[cfg(unix)]
    _file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    Ok(())
}

#[cfg(unix)]
fn is_same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let (Ok(ours), Ok(named)) = (file.metadata(), path.symlink_metadata()) else { return false };
    (ours.dev(), ours.ino()) == (named.dev(), named.ino())
}

#[cfg(not(unix))]
fn is_same_file(_file: &File, path: &Path) -> bool {
    path.is_file()
}

/// Gives the file `bytes` bytes of real space, so that writing to it later finds room whatever else fills
/// the disk.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    match reserve_by_system(file, bytes) {
        Err(error) if error.kind() == ErrorKind::Unsupported => write_zeros(file, bytes),
        reserved => reserved,
    }
}

#[cfg(any(target_os = "linux", target_vendor = "apple"))]
fn reserve_by_system(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
    use rustix::io::retry_on_intr;

    // Asked first: some file systems take all there is before they find that it is not enough.
    let volume = fstatvfs(file)?;
    let free_bytes = volume.f_bavail.saturating_mul(volume.f_frsize);
    if volume.f_blocks > 0 && free_bytes < bytes {
        let reason = format!("{free_bytes} bytes are free");
        return Err(io::Error::new(ErrorKind::StorageFull, reason));
    }
    retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes))?;
    Ok(())
}

#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
fn reserve_by_system(_file: &File, _bytes: u64) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// Fills the file up to `bytes` bytes.
fn write_zeros(mut file: &File, bytes: u64) -> io::Result<()> {
    let mut end = file.seek(SeekFrom::End(0))?;
    let zeros = vec![0; 1 << 20];
    while end < bytes {
        let piece = (bytes - end).min(zeros.len() as u64);
        file.write_all(&zeros[..piece as usize])?;
        end += piece;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::scratch::Scratch;
    use super::*;

    fn bytes_of(path: &Path) -> Vec<u8> {
        std::fs::read(path).unwrap()
    }

    #[test]
    fn is_made_with_all_its_space_and_removed() {
        let scratch = Scratch::new();
        let path = scratch.path("spill");
        let file = SlotFile::create(&path, 3 << 20).unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.len(), 3 << 20);
        #[cfg(unix)]
        {
            use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
            assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
            assert!(metadata.blocks() * 512 >= 3 << 20, "a sparse file has no space of its own");
        }
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn the_portable_way_reserves_as_much() {
        let scratch = Scratch::new();
        let path = scratch.path("spill");
        let file = open_private(&path).unwrap();
        file.set_len(FILE_HEADER_BYTES).unwrap();
        write_zeros(&file, (2 << 20) + 17).unwrap();
        assert_eq!(bytes_of(&path), vec![0; (2 << 20) + 17]);
    }

    #[test]
    fn what_an_older_file_held_is_gone() {
        let scratch = Scratch::new();
        let path = scratch.path("spill");
        std::fs::write(&path, [&FILE_MAGIC[..], &[7; 100_000]].concat()).unwrap();
        let _file = SlotFile::create(&path, 200_000).unwrap();
        let bytes = bytes_of(&path);
        assert_eq!(bytes.len(), 200_000);
        assert!(bytes[FILE_MAGIC.len()..].iter().all(|&byte| byte == 0));
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn other_files_are_not_touched() {
        let scratch = Scratch::new();
        let path = scratch.path("diary");
        std::fs::write(&path, "dear diary").unwrap();
        let error = SlotFile::create(&path, 8192).unwrap_err();
        assert!(matches!(error, SpillOpenError::Foreign { .. }), "{error}");
        assert_eq!(bytes_of(&path), b"dear diary");
        let folder = SlotFile::create(&scratch.path("."), 8192).unwrap_err();
        assert!(matches!(folder, SpillOpenError::Foreign { .. }), "{folder}");
        let nowhere = SlotFile::create(&scratch.path("no/such/folder"), 8192).unwrap_err();
        assert!(matches!(nowhere, SpillOpenError::System { .. }), "{nowhere}");
    }

    #[test]
    fn a_file_in_use_is_refused_and_kept() {
        let scratch = Scratch::new();
        let path = scratch.path("spill");
        let mut first = SlotFile::create(&path, 8192).unwrap();
        first.write_at(4096, b"mine").unwrap();
        let error = SlotFile::create(&path, 16384).unwrap_err();
        assert!(matches!(error, SpillOpenError::InUse { .. }), "{error}");
        assert_eq!(bytes_of(&path).len(), 8192);
        assert_eq!(&bytes_of(&path)[4096..4100], b"mine");
    }

    #[test]
    fn a_successor_at_the_path_is_left_alone() {
        let scratch = Scratch::new();
        let path = scratch.path("spill");
        let file = SlotFile::create(&path, 8192).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "another").unwrap();
        drop(file);
        #[cfg(unix)]
        assert_eq!(bytes_of(&path), b"another");
    }

    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    #[test]
    fn more_than_the_disk_has_is_refused_before_it_is_filled() {
        let scratch = Scratch::new();
        let path = scratch.path("spill");
        let error = SlotFile::create(&path, 1 << 60).unwrap_err();
        assert!(matches!(error, SpillOpenError::NoSpace { .. }), "{error}");
        assert!(error.to_string().contains("choose a smaller size"), "{error}");
        assert!(!path.exists());
    }
}
