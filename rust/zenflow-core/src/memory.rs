//! Host memory for masters, moments and slots: whole pages from the system, huge ones where it has them.
//!
//! The states of a model are gigabytes that every step streams through once, so what counts is how far a TLB
//! entry reaches and on which NUMA node a page lies. Huge pages by `madvise` settle the first, and
//! [`HostBuffer::touch`] the second: Linux places a page on the node of the thread that first writes
//! to it, so the pool's threads do that, each for the part it will be dealt ([`crate::deal`]), not the one
//! thread that happened to allocate.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use crate::error::{Error, Result};
use crate::process::Birth;

/// The alignment that every buffer has at least, an empty one included: a cache line, and the widest vector.
pub const ALIGNMENT: usize = 64;

/// The smallest page of any system we run on; touching more often than once a page does no harm.
const PAGE: usize = 4096;

#[repr(align(64))]
struct Nothing;

/// Zero-filled memory of fixed size and place, given back when dropped.
///
/// It hands out a raw pointer and no slices: parts of it are with the worker, with the device's copy engines
/// and with torch at the same time, and who may touch which part when is its owner's business.
#[derive(Debug)]
pub struct HostBuffer {
    /// `None` if empty, and after a drop in a process that doesn't have the pages.
    map: Option<MmapRaw>,
    start: NonNull<u8>,
    len: usize,
    /// Set once the pages are withheld from forked children.
    private_to: Option<Birth>,
}

// SAFETY: the buffer owns its pages, and nothing about them belongs to a thread. Its methods only tell where
// they are, `touch` aside, which uses atomics; reads and writes go through the raw pointer and are
// answered for by whoever makes them.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// `bytes` zero bytes, aligned to a page ([`ALIGNMENT`] if there are none). The system commits pages only
    /// as they are touched, so success doesn't prove that they are all to be had.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`], which names `bytes` and `purpose`.
    pub fn new(bytes: usize, purpose: &'static str) -> Result<Self> {
        let out_of_memory = |cause: String| Error::OutOfMemory { bytes, purpose, cause };
        if bytes == 0 {
            let start = NonNull::<Nothing>::dangling().cast();
            return Ok(Self { map: None, start, len: 0, private_to: None });
        }
        if isize::try_from(bytes).is_err() {
            return Err(out_of_memory("more than this machine can address".to_owned()));
        }
        let map = MmapOptions::new().len(bytes).map_anon().map_err(|e| out_of_memory(e.to_string()))?;
        let map = MmapRaw::from(map);
        // Advice, no more: kernels without huge pages, or with them turned off, refuse it, and all works
        // the same, only slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let start = NonNull::new(map.as_mut_ptr())
            .ok_or_else(|| out_of_memory("the system mapped it at address 0".to_owned()))?;
        Ok(Self { map: Some(map), start, len: bytes, private_to: None })
    }

    /// Withholds the pages from children forked from now on (Linux; elsewhere nothing happens). Says whether
    /// it was done.
    ///
    /// Without this every page that the parent writes while a child lives is copied first, so that a forked
    /// `DataLoader` worker slowly doubles the host memory of the states. With it, a child that touches the
    /// buffer is killed by the system: it is for memory which children are kept away from.
    pub fn withhold_from_children(&mut self) -> bool {
        #[cfg(target_os = "linux")]
        if let Some(map) = &self.map {
            if map.advise(memmap2::Advice::DontFork).is_ok() {
                self.private_to = Some(Birth::here());
                return true;
            }
        }
        false
    }

    /// The first byte. Valid for reads and writes of [`len`](Self::len) bytes until the buffer is dropped.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Size in bytes, as asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes the system commit the pages that hold `bytes` now, on the NUMA node of the calling thread where
    /// they aren't there yet. The contents stay as they are. Nobody else may be writing to these bytes
    /// meanwhile, except through atomics.
    ///
    /// # Panics
    ///
    /// Where the range doesn't lie within the buffer.
    pub fn touch(&self, bytes: Range<usize>) {
        assert!(bytes.end <= self.len, "bytes {bytes:?} of a buffer of {}", self.len);
        let mut offset = bytes.start;
        while offset < bytes.end {
            // SAFETY: `offset < len`, so the byte is inside the mapping, which `&self` keeps alive; a byte is
            // aligned anywhere. Others write to it through atomics only, says the contract.
            let byte = unsafe { AtomicU8::from_ptr(self.as_ptr().add(offset)) };
            // A write in the eyes of the page tables, and none in those of a reader: 0 becomes 0, and
            // anything else shows that the page is there already.
            let _ = byte.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
            // The buffer starts on a page.
            offset = (offset / PAGE + 1) * PAGE;
        }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.private_to.is_some_and(|birth| !birth.is_here()) {
            // A forked child from which the pages were withheld: something else may lie at the address.
            std::mem::forget(self.map.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The huge page of x86-64 and of ARM with 4 KiB pages.
    const HUGE_PAGE: usize = 2 << 20;

    #[test]
    fn zeroed_aligned_and_writable() {
        for bytes in [1, 4095, 4096, 4097, HUGE_PAGE * 2 + 3] {
            let buffer = HostBuffer::new(bytes, "a test").unwrap();
            assert_eq!(buffer.len(), bytes);
            assert_eq!(buffer.as_ptr().addr() % PAGE, 0);
            // SAFETY: the buffer is alive, of this length, initialised by the system, and only here.
            let slice = unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr(), bytes) };
            assert!(slice.iter().all(|&b| b == 0));
            slice.fill(0xA5);
            assert_eq!(slice[bytes - 1], 0xA5);
        }
    }

    #[test]
    fn nothing_is_a_buffer_too() {
        let buffer = HostBuffer::new(0, "nothing").unwrap();
        assert!(buffer.is_empty());
        assert_eq!(buffer.as_ptr().addr() % ALIGNMENT, 0);
        buffer.touch(0..0);
    }

    #[test]
    #[should_panic(expected = "bytes 4090..4097 of a buffer of 4096")]
    fn only_its_own_bytes_are_touched() {
        HostBuffer::new(4096, "a test").unwrap().touch(4090..4097);
    }

    #[test]
    fn too_much_is_named() {
        for bytes in [1 << 60, usize::MAX] {
            let text = HostBuffer::new(bytes, "optimizer states").unwrap_err().to_string();
            let begin = format!("could not allocate {bytes} bytes for optimizer states: ");
            assert!(text.starts_with(&begin), "{text}");
        }
    }

    /// Pages of this process that are in memory, as the kernel counts them for one mapping.
    #[cfg(target_os = "linux")]
    fn resident_bytes(buffer: &HostBuffer) -> usize {
        let mut seen = vec![0_u8; buffer.len().div_ceil(PAGE)];
        // SAFETY: the range is one mapping of ours, starting on a page, and `seen` has a byte for each page.
        let result = unsafe { libc::mincore(buffer.as_ptr().cast(), buffer.len(), seen.as_mut_ptr()) };
        assert_eq!(result, 0);
        seen.iter().filter(|&&page| page & 1 == 1).count() * PAGE
    }

    /// Every page that holds one of the bytes and no other, from ranges that begin and end anywhere.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_touch_commits_and_changes_nothing() {
        let bytes = 9 * PAGE + 5;
        let buffer = HostBuffer::new(bytes, "a test").unwrap();
        // Huge pages would come as a whole; the advice can be taken back.
        if let Some(map) = &buffer.map {
            map.advise(memmap2::Advice::NoHugePage).unwrap();
        }
        // SAFETY: inside the buffer, which is only here.
        unsafe { buffer.as_ptr().add(PAGE).write(7) };
        buffer.touch(PAGE..PAGE + 1);
        assert_eq!(resident_bytes(&buffer), PAGE);
        buffer.touch(3 * PAGE - 1..5 * PAGE + 1);
        assert_eq!(resident_bytes(&buffer), 5 * PAGE);
        buffer.touch(7 * PAGE..7 * PAGE);
        buffer.touch(9 * PAGE + 4..bytes);
        assert_eq!(resident_bytes(&buffer), 6 * PAGE);
        buffer.touch(0..bytes);
        assert_eq!(resident_bytes(&buffer), 10 * PAGE);
        // SAFETY: as above.
        let slice = unsafe { std::slice::from_raw_parts(buffer.as_ptr(), bytes) };
        assert!(slice.iter().enumerate().all(|(i, &b)| b == if i == PAGE { 7 } else { 0 }));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_child_has_no_withheld_pages() {
        let mut buffer = HostBuffer::new(4 * PAGE, "a test").unwrap();
        assert!(buffer.withhold_from_children());
        let mut byte = 0_u8;
        // SAFETY: the child calls `mincore`, which doesn't touch the page, and `_exit`; both are single
        // system calls, fit for a child of a threaded process.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: `mincore` reports an address without a mapping as an error; `_exit` ends the child.
            unsafe { libc::_exit(libc::mincore(buffer.as_ptr().cast(), PAGE, &raw mut byte).abs()) };
        }
        let mut status = -1;
        // SAFETY: `status` is a live `c_int`, and the child is ours and not yet waited for.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 1, "status {status:#x}");
        assert_eq!(resident_bytes(&buffer), 0, "the parent has the mapping still, untouched");
    }
}
