//! Memory that two processes map, and its way from one to the other.
//!
//! A file without a name (`memfd`), sealed so that it can neither shrink nor grow: a process that cut it
//! short would else kill whoever reads it. Which process may touch which part when is agreed elsewhere.
#![expect(
    unsafe_code,
    reason = "a mapping that another process writes to is beyond what Rust can check"
)]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// A mapped file without a name.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    map: memmap2::MmapRaw,
}

impl SharedMemory {
    /// New memory, all zeros; it takes room as it is written.
    pub fn create(bytes: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("homing-kv", flags)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Self::map(file, bytes)
    }

    /// Memory that another process made. What is not sealed, or has another size, is refused.
    pub fn open(file: OwnedFd, bytes: usize) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let size = rustix::fs::fstat(&file)?.st_size;
        if !seals.contains(SealFlags::SHRINK) || u64::try_from(size) != Ok(bytes as u64) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::map(file, bytes)
    }

    fn map(file: OwnedFd, bytes: usize) -> io::Result<Self> {
        let file = std::fs::File::from(file);
        let map = memmap2::MmapOptions::new().len(bytes).map_raw(&file)?;
        let file = OwnedFd::from(file);
        Ok(Self { file, map })
    }

    /// The file, to be passed on.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Some of its bytes, which nobody may write meanwhile.
    pub fn read(&self, at: usize, bytes: usize) -> &[u8] {
        assert!(at + bytes <= self.map.len(), "{bytes} bytes at {at}");
        // SAFETY: within the mapping, which lives as long as `self` and cannot shrink. The other process
        // gave this part away and does not write it before it gets it back; one that breaks this changes
        // bytes that are then refused or wrong, and nothing but numbers is made of them.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(at), bytes) }
    }

    /// Has some of its bytes written, which nobody may read or write meanwhile.
    pub fn write(&self, at: usize, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) {
        assert!(at + bytes <= self.map.len(), "{bytes} bytes at {at}");
        // SAFETY: within the mapping, as above. This part was taken by the caller, who has it alone: no
        // other slice of it exists in this process, and the other process does not touch it before it is
        // told to.
        fill(unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(at), bytes) });
    }
}

/// Passes an open file over a socket, with one byte.
pub fn send_file(over: &UnixStream, file: BorrowedFd<'_>) -> io::Result<()> {
    let files = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let byte = [IoSlice::new(&[0])];
    let sent = rustix::net::sendmsg(over, &byte, &mut ancillary, SendFlags::NOSIGNAL)?;
    if sent == 1 {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// Takes the file that [`send_file`] passed. Whatever else came with it is closed.
pub fn receive_file(over: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(over, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    files
        .next()
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}
